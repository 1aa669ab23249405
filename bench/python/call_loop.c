/* The C ABI's own loop, which bench/python/call_overhead.py compiles and compares Python's calls
 * with. */
#include <stdint.h>
#include <time.h>

typedef int32_t run_function(const void* layer, const void* args);

/* Nanoseconds of `count` calls of moekit_layer_run, as the host sees them; -1 where one failed. */
int64_t time_calls(run_function* run, const void* layer, const void* args, int64_t count) {
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int64_t i = 0; i < count; ++i) {
    if (run(layer, args) != 0) return -1;
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (int64_t)(end.tv_sec - begin.tv_sec) * 1000000000 + (end.tv_nsec - begin.tv_nsec);
}
