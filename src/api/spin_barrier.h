// SpinBarrier: where the ranks of a timed call meet, so that they start within a microsecond of
// each other; std::barrier puts waiters to sleep and wakes them one after the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace moekit::api {

/// Everything written before arrive_and_wait() by one thread is seen after it by all.
class SpinBarrier {
 public:
  explicit SpinBarrier(int num_threads) : num_threads_(num_threads) {}

  void arrive_and_wait() {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    // More threads than CPUs: the missing one may need this one's CPU.
    for (int spin = 0; round_.load(std::memory_order_acquire) == round; ++spin) {
      if (spin >= kSpins) std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpins = 2000;

  const int num_threads_;
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> round_{0};
};

}  // namespace moekit::api
