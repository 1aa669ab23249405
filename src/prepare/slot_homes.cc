#include "prepare/slot_homes.h"

#include "prepare/replica_turn.h"
#include "prepare/routing_check.h"

namespace moekit::prepare {

int64_t SlotHomes::assign(const Problem& problem, const RoutingTable& routing, int64_t num_tokens) {
  int64_t unknown = 0;
  for (int64_t t = 0; t < num_tokens; ++t) {
    const GlobalExpert* ids = routing.ids + t * top_k_;
    const int64_t turn = replica_turn(problem, problem.rank, t, routing.weights + t * top_k_);
    for (int64_t j = 0; j < top_k_; ++j) {
      const int64_t i = t * top_k_ + j;
      rank_[i] = -1;
      expert_[i] = LocalExpert::none;
      if (!names_expert(problem, ids[j])) {
        unknown += ids[j] == GlobalExpert::none ? 0 : 1;
        continue;
      }
      const ExpertHome home = problem.placement->home(index_of(ids[j]), turn);
      rank_[i] = home.rank;
      expert_[i] = LocalExpert{home.slot};
    }
  }
  return unknown;
}

bool SlotHomes::is_repeat(int64_t token, int64_t slot, bool by_expert) const {
  const int32_t* ranks = rank_ + token * top_k_;
  const LocalExpert* experts = expert_ + token * top_k_;
  for (int64_t j = 0; j < slot; ++j) {
    if (ranks[j] == ranks[slot] && (!by_expert || experts[j] == experts[slot])) return true;
  }
  return false;
}

int64_t SlotHomes::drop(int64_t token, int64_t slot, bool by_expert, bool keep_row) {
  int32_t* ranks = rank_ + token * top_k_;
  LocalExpert* experts = expert_ + token * top_k_;
  const int32_t rank = ranks[slot];
  const LocalExpert expert = experts[slot];
  int64_t dropped = 0;
  for (int64_t j = slot; j < top_k_; ++j) {
    if (ranks[j] != rank || experts[j] == LocalExpert::none) continue;
    if (by_expert && experts[j] != expert) continue;
    experts[j] = LocalExpert::none;
    if (!keep_row) ranks[j] = -1;
    ++dropped;
  }
  return dropped;
}

}  // namespace moekit::prepare
