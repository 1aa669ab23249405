// Recorder: rings of spans, one for each thread of each rank, allocated when a layer is planned and
// written without locks while it runs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "trace/stage.h"

namespace moekit::trace {

/// What a span says beyond its time; -1: nothing.
struct Facts {
  int64_t bytes = -1;      ///< that go to other ranks, or that were copied
  int64_t own_bytes = -1;  ///< that the rank sends to itself
  int64_t rows = -1;
  int64_t tokens = -1;
  int64_t experts = -1;
};

struct Event {
  int64_t begin_ns = 0;  ///< since the recorder's start
  int64_t end_ns = 0;
  int64_t call = 0;
  Facts facts;
  int32_t workspace = 0;
  Stage stage = Stage::input;
};

/// The last `capacity` events of one thread. Several threads may push (calls of one rank that run
/// side by side); reading waits until nobody pushes.
class Ring {
 public:
  explicit Ring(int64_t capacity);
  void push(const Event& event) {
    const int64_t at = next_.fetch_add(1, std::memory_order_relaxed);
    events_[static_cast<size_t>(at) & mask_] = event;
  }
  void clear() { next_.store(0, std::memory_order_relaxed); }
  int64_t size() const;
  int64_t lost() const;
  /// Oldest first.
  std::vector<Event> events() const;

 private:
  size_t mask_;
  std::unique_ptr<Event[]> events_;
  std::atomic<int64_t> next_{0};
};

/// Rings of one rank.
struct RankRings {
  int rank = 0;
  std::vector<std::unique_ptr<Ring>> threads;
  std::unique_ptr<Ring> device;  ///< of its GPU; null: it has none
};

/// Recorders that are on, of the whole process: what a span looks at first.
extern std::atomic<int> recorders_on;

class Recorder {
 public:
  /// spans_per_thread >= 1, rounded up to a power of two. Throws invalid_argument.
  explicit Recorder(int64_t spans_per_thread);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Rings of a rank's `num_threads` threads, and of its GPU where it has one, made when they are
  /// not there yet. Plan time only.
  const RankRings* add_rank(int rank, int num_threads, bool with_device = false);

  void start();
  void stop();
  bool on() const { return on_.load(std::memory_order_relaxed); }
  int64_t now_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count();
  }

  /// Of the system's steady clock, which processes of one host share.
  int64_t start_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(start_.time_since_epoch()).count();
  }

  /// By rank. Stable while no layer is being planned.
  const std::vector<std::unique_ptr<RankRings>>& ranks() const { return ranks_; }
  int64_t lost() const;

 private:
  using Clock = std::chrono::steady_clock;

  const int64_t capacity_;
  std::mutex mutex_;  // guards ranks_ while layers are planned
  std::vector<std::unique_ptr<RankRings>> ranks_;
  std::atomic<bool> on_{false};
  Clock::time_point start_ = Clock::now();
};

/// The recorder's events in Chrome's trace format.
std::string to_chrome_json(const Recorder& recorder);

}  // namespace moekit::trace
