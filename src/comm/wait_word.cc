#include "comm/wait_word.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moekit::comm {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "the kernel reads the word itself");

void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen,
              std::chrono::steady_clock::time_point until, WordScope scope) {
  const auto left = until - std::chrono::steady_clock::now();
  if (left <= std::chrono::nanoseconds::zero()) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  const timespec timeout{
      static_cast<time_t>(seconds.count()),
      static_cast<long>(
          std::chrono::duration_cast<std::chrono::nanoseconds>(left - seconds).count())};
  const int wait = scope == WordScope::shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE;
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), wait, seen, &timeout, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word, WordScope scope) {
  const int wake = scope == WordScope::shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), wake, INT_MAX, nullptr, nullptr, 0);
}

void spin_pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace moekit::comm
