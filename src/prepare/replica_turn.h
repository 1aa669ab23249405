// Whose turn it is among the replicas of an expert.
#pragma once

#include <cstdint>
#include <cstring>

#include "problem/problem.h"

namespace moekit::prepare {

/// The turn (>= 0) that ExpertPlacement::home takes for a row's slots: the same on the row's owner
/// and on every rank that receives it.
///
/// combine=slots: by the row's rank and number, so that equal rows and hot experts spread evenly;
/// who serves a slot never shows in the bits. combine=rank_sums: which slots share a rank does
/// show where a row has several, so the turn comes from the row's own weights alone: a row keeps
/// its bits wherever in a batch, and on whichever rank, it stands. `weights` are the row's [top_k].
inline int64_t replica_turn(const Problem& problem, int64_t rank, int64_t token,
                            const float* weights) {
  if (!problem.placement->has_replicas()) return 0;
  if (problem.combine == Combine::slots || problem.config.top_k == 1) return rank + token;
  uint64_t hash = 0x9E3779B97F4A7C15ull;
  for (int64_t j = 0; j < problem.config.top_k; ++j) {
    uint32_t bits;
    std::memcpy(&bits, weights + j, sizeof(bits));
    hash = (hash ^ bits) * 0xFF51AFD7ED558CCDull;
    hash ^= hash >> 29;
  }
  return static_cast<int64_t>(hash >> 2);
}

}  // namespace moekit::prepare
