#include "engine/load_counters.h"

#include "prepare/replica_turn.h"
#include "prepare/routing_check.h"

namespace moekit::engine {

void LoadCounters::start(int64_t num_experts, int num_ranks) {
  num_experts_ = num_experts;
  num_ranks_ = num_ranks;
  per_expert_ = std::make_unique<Counter[]>(static_cast<size_t>(num_experts));
  per_rank_ = std::make_unique<Counter[]>(static_cast<size_t>(num_ranks));
}

void LoadCounters::count(const Problem& problem, const RoutingTable& routing) noexcept {
  if (!on()) return;
  const int64_t top_k = routing.top_k;
  for (int64_t t = 0; t < routing.num_tokens; ++t) {
    const GlobalExpert* ids = routing.ids + t * top_k;
    const int64_t turn =
        prepare::replica_turn(problem, problem.rank, t, routing.weights + t * top_k);
    for (int64_t j = 0; j < top_k; ++j) {
      if (!prepare::names_expert(problem, ids[j])) continue;
      const int32_t expert = index_of(ids[j]);
      per_expert_[expert].fetch_add(1, std::memory_order_relaxed);
      const int32_t rank = problem.placement->home(expert, turn).rank;
      per_rank_[rank].fetch_add(1, std::memory_order_relaxed);
    }
  }
  calls_.fetch_add(1, std::memory_order_relaxed);
  tokens_.fetch_add(routing.num_tokens, std::memory_order_relaxed);
}

LoadStatistics LoadCounters::read() const {
  LoadStatistics s;
  for (int64_t e = 0; on() && e < num_experts_; ++e) {
    s.per_expert.push_back(per_expert_[e].load(std::memory_order_relaxed));
  }
  for (int r = 0; on() && r < num_ranks_; ++r) {
    s.per_rank.push_back(per_rank_[r].load(std::memory_order_relaxed));
  }
  s.calls = calls_.load(std::memory_order_relaxed);
  s.tokens = tokens_.load(std::memory_order_relaxed);
  return s;
}

void LoadCounters::reset() noexcept {
  for (int64_t e = 0; on() && e < num_experts_; ++e) {
    per_expert_[e].store(0, std::memory_order_relaxed);
  }
  for (int r = 0; on() && r < num_ranks_; ++r) per_rank_[r].store(0, std::memory_order_relaxed);
  calls_.store(0, std::memory_order_relaxed);
  tokens_.store(0, std::memory_order_relaxed);
}

}  // namespace moekit::engine
