// SlotHomes: which rank and which of its experts serve each slot of this rank's tokens, in arrays
// of the workspace.
#pragma once

#include <cstdint>

#include "problem/expert_id.h"
#include "problem/problem.h"
#include "problem/routing_table.h"

namespace moekit::prepare {

/// View of rank and expert [num_tokens, top_k]. A slot without expert has LocalExpert::none; its
/// rank is -1, or the rank that gets the token's row for other slots.
class SlotHomes {
 public:
  SlotHomes(int64_t top_k, int32_t* rank, LocalExpert* expert)
      : top_k_(top_k), rank_(rank), expert_(expert) {}

  /// Homes of the first `num_tokens` tokens. Returns the slots with an id that names no expert and
  /// is not -1.
  int64_t assign(const Problem& problem, const RoutingTable& routing, int64_t num_tokens);

  /// Sets one slot; LocalExpert::none goes with rank -1.
  void set(int64_t token, int64_t slot, int32_t rank, LocalExpert expert) {
    rank_[token * top_k_ + slot] = rank;
    expert_[token * top_k_ + slot] = expert;
  }

  int32_t rank(int64_t token, int64_t slot) const { return rank_[token * top_k_ + slot]; }
  LocalExpert expert(int64_t token, int64_t slot) const { return expert_[token * top_k_ + slot]; }

  /// Whether an earlier slot of the token has the same rank (and, with `by_expert`, the same
  /// expert).
  bool is_repeat(int64_t token, int64_t slot, bool by_expert) const;
  /// A slot whose rank gets the token's row for it: the first of the token's slots there.
  bool sends_row(int64_t token, int64_t slot) const {
    return rank(token, slot) >= 0 && !is_repeat(token, slot, false);
  }

  /// Takes the expert away from this slot and the token's later ones of the same rank (and, with
  /// `by_expert`, the same expert). `keep_row`: the rank gets the row all the same. Returns their
  /// number.
  int64_t drop(int64_t token, int64_t slot, bool by_expert, bool keep_row);

 private:
  int64_t top_k_;
  int32_t* rank_;
  LocalExpert* expert_;
};

}  // namespace moekit::prepare
