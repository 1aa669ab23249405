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

/// Opens the gate to `body`. It is closed so far: nobody reads body_ or counts in finished_.
void ThreadPool::publish(FunctionRef<void(int)>& body) {
  const uint32_t generation = generation_.load(std::memory_order_relaxed) + 1;
  body_ = &body;
  finished_.store(0, std::memory_order_relaxed);
  gate_.store(uint64_t{generation} << 32,
              std::memory_order_release);  // publishes body_ and finished_ to workers that join
  generation_.store(generation, std::memory_order_release);
  generation_.notify_all();
}

void ThreadPool::wait_for(uint32_t workers) const {
  for (int spin = 0; finished_.load(std::memory_order_acquire) != workers; ++spin) {
    if (spin < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::run(FunctionRef<void(int)> body) {
  if (num_threads_ == 1) return body(0);
  if (run_on_openmp_threads(num_threads_, body)) return;
  publish(body);
  body(0);
  wait_for(static_cast<uint32_t>(num_threads_ - 1));
  gate_.fetch_or(kClosed, std::memory_order_relaxed);  // all have joined and left
}

void ThreadPool::run_awake(FunctionRef<void(int)> body) {
  if (num_threads_ == 1) return body(0);
  if (run_on_openmp_threads(num_threads_, body)) return;
  publish(body);
  body(0);
  const uint64_t gate = gate_.fetch_or(kClosed, std::memory_order_acq_rel);
  wait_for(static_cast<uint32_t>(gate & (kClosed - 1)));
}

/// Whether this worker is part of the job of `generation`: not once its caller is through.
bool ThreadPool::join(uint32_t generation) {
  uint64_t gate = gate_.load(std::memory_order_acquire);
  while (gate >> 32 == generation && (gate & kClosed) == 0) {
    // Acquires body_, and orders the count before the caller's close.
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel,
                                    std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
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
    run_awake(drain);
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
    if (!join(now)) continue;
    (*body_)(thread);
    finished_.fetch_add(1, std::memory_order_release);  // publishes the job's writes to the caller
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
