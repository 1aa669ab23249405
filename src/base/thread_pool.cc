#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "base/check.h"
#include "base/openmp_threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moekit {
namespace {

// About 20 µs of pause instructions on current x86: longer than the gap between the phases of one
// layer, short enough that an idle pool leaves the core. Source: pause is 40-140 cycles since
// Skylake (Intel optimization manual, 2.4.4).
constexpr int kSpins = 600;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads) {
  MOEKIT_CHECK(num_threads >= 1 && num_threads <= 4096,
               "a thread pool needs 1 to 4096 threads, got {}", num_threads);
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { worker(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void ThreadPool::run(FunctionRef<void(int)> body) {
  if (num_threads_ == 1) {
    body(0);
    return;
  }
  if (run_on_openmp_threads(num_threads_, body)) return;
  body_ = &body;
  running_.store(num_threads_ - 1, std::memory_order_relaxed);
  generation_.fetch_add(1,
                        std::memory_order_release);  // publishes body_ and running_ to the workers
  generation_.notify_all();
  body(0);
  for (int spin = 0; running_.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::parallel_for(int64_t num_tasks, FunctionRef<void(int64_t, int)> body) {
  std::atomic<int64_t> next{0};
  auto drain = [&](int thread) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;)
      body(task, thread);
  };
  if (num_tasks <= 1) {
    drain(0);
  } else {
    run(drain);
  }
}

void ThreadPool::worker(int thread) {
  uint32_t seen = 0;
  for (;;) {
    uint32_t now = seen;
    for (int spin = 0; spin < kSpins; ++spin) {
      now = generation_.load(std::memory_order_acquire);
      if (now != seen) break;
      pause();
    }
    if (now == seen) {
      generation_.wait(seen, std::memory_order_acquire);
      continue;
    }
    seen = now;
    if (stop_.load(std::memory_order_relaxed)) return;
    (*body_)(thread);
    running_.fetch_sub(1, std::memory_order_release);  // publishes the job's writes to the caller
  }
}

int usable_cpus() {
  cpu_set_t set;
  int cpus = 1;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cpus = std::max(1, CPU_COUNT(&set));
  // cgroup v2: "max 100000" or "<quota> <period>".
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (file >> quota >> period && quota != "max" && period > 0) {
    const double limit = std::atof(quota.c_str()) / period;
    if (limit > 0) cpus = std::min(cpus, std::max(1, static_cast<int>(limit + 0.999)));
  }
  return cpus;
}

}  // namespace moekit
