// CallGate: keeps calls and a change of what they read apart, without a lock on the way of a call.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/check.h"

namespace moekit::engine {

/// Open to any number of calls, or closed by one change. Neither side waits: calls and changes of a
/// layer are collective, so one that waits for the other on one rank would hold up all ranks.
class CallGate {
 public:
  /// Throws invalid_argument while the gate is closed.
  void enter() {
    if (calls_.fetch_add(1, std::memory_order_acquire) >= 0) return;
    leave();
    fail(ErrorCode::invalid_argument,
         "a change of placement is in progress: make calls and changes of a layer from one thread");
  }
  void leave() { calls_.fetch_sub(1, std::memory_order_release); }

  int64_t in_flight() const { return calls_.load(std::memory_order_relaxed); }
  /// Closes the gate unless a call is in flight.
  bool try_close() {
    int64_t none = 0;
    return calls_.compare_exchange_strong(none, kClosed, std::memory_order_acquire);
  }
  void open() { calls_.fetch_sub(kClosed, std::memory_order_release); }

 private:
  static constexpr int64_t kClosed = -(int64_t{1} << 40);
  std::atomic<int64_t> calls_{0};
};

}  // namespace moekit::engine
