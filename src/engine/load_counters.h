// LoadCounters: which experts and ranks the calls of a layer ask for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "moekit/placement.h"
#include "problem/problem.h"
#include "problem/routing_table.h"

namespace moekit::engine {

/// Counts with relaxed atomics, so that calls on several workspaces may add while another thread
/// reads; a reader may see part of a call. No allocation after start().
class LoadCounters {
 public:
  /// Counting begins; without it count() does nothing.
  void start(int64_t num_experts, int num_ranks);
  bool on() const { return per_expert_ != nullptr; }
  /// Adds a call of this rank's tokens.
  void count(const Problem& problem, const RoutingTable& routing) noexcept;
  LoadStatistics read() const;
  void reset() noexcept;

 private:
  using Counter = std::atomic<int64_t>;
  int64_t num_experts_ = 0;
  int num_ranks_ = 0;
  std::unique_ptr<Counter[]> per_expert_, per_rank_;
  Counter calls_{0}, tokens_{0};
};

}  // namespace moekit::engine
