// RankMap: what a rank is to the layer: which copy of it (dp), which share of the experts (ep),
// which slice of each expert (tp).
#pragma once

#include <cstdint>
#include <vector>

#include "base/check.h"

namespace moekit {

/// Coordinates of one rank.
struct RankCoords {
  int dp = 0;  ///< copies of the layer; they exchange nothing
  int ep = 0;  ///< ranks that share the experts out and exchange rows, each with tokens of its own
  int tp = 0;  ///< ranks that share each expert's columns out, all with the same tokens
  friend bool operator==(const RankCoords&, const RankCoords&) = default;
};

/// rank = (dp * ep_size + ep) * tp_size + tp: ranks that share an expert are neighbours, so that
/// their sums stay inside a host.
struct RankMap {
  int dp_size = 1;
  int ep_size = 1;
  int tp_size = 1;

  /// Of `num_ranks` ranks. Throws invalid_argument where they don't divide.
  static RankMap of(int num_ranks, int tp_size, int dp_size = 1) {
    MOEKIT_CHECK(tp_size >= 1 && dp_size >= 1,
                 "tensor- and data-parallel sizes must be 1 or more, got {} and {}", tp_size,
                 dp_size);
    const int64_t inner = int64_t{tp_size} * dp_size;
    MOEKIT_CHECK(num_ranks >= 1 && num_ranks % inner == 0,
                 "{} ranks can't be {} copies of groups of {} tensor-parallel ranks: the number of "
                 "ranks must be a multiple of {}",
                 num_ranks, dp_size, tp_size, inner);
    return {dp_size, static_cast<int>(num_ranks / inner), tp_size};
  }

  int size() const { return dp_size * ep_size * tp_size; }
  int rank_of(RankCoords c) const { return (c.dp * ep_size + c.ep) * tp_size + c.tp; }
  RankCoords coords_of(int rank) const {
    return {rank / tp_size / ep_size, rank / tp_size % ep_size, rank % tp_size};
  }

  // Groups that meet, as colours of Communicator::split: ranks of one colour, in rank order.
  /// Ranks that exchange rows: one copy, one slice.
  int ep_color(int rank) const {
    const RankCoords c = coords_of(rank);
    return c.dp * tp_size + c.tp;
  }
  /// Ranks that add their parts: one copy, one share of the experts.
  int tp_color(int rank) const { return rank / tp_size; }

  std::vector<int> ep_group(int rank) const { return same(rank, &RankMap::ep_color); }
  std::vector<int> tp_group(int rank) const { return same(rank, &RankMap::tp_color); }

 private:
  std::vector<int> same(int rank, int (RankMap::*color)(int) const) const {
    std::vector<int> group;
    for (int r = 0; r < size(); ++r) {
      if ((this->*color)(r) == (this->*color)(rank)) group.push_back(r);
    }
    return group;
  }
};

}  // namespace moekit
