// ExpertPlacement: which rank owns which expert. Global, local and physical expert numbers never
// mix.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moekit/placement.h"

namespace moekit {

/// Where one logical expert lives.
struct ExpertHome {
  int32_t rank = 0;
  int32_t slot = 0;  ///< local expert number on that rank
};

/// Every logical expert has one home or more (replicas); every (rank, slot) holds exactly one
/// expert.
class ExpertPlacement {
 public:
  /// Contiguous shares; the first E % R ranks own one expert more.
  static ExpertPlacement linear(int64_t num_experts, int num_ranks);
  /// Expert e lives on rank e % R.
  static ExpertPlacement round_robin(int64_t num_experts, int num_ranks);
  /// experts_of_rank[r] lists the global ids in slot order. Throws invalid_argument unless every
  /// expert in [0, E) appears.
  static ExpertPlacement from_lists(int64_t num_experts,
                                    std::vector<std::vector<int32_t>> experts_of_rank);
  /// Every rank holds `slots` experts (at most E): what memory that any placement of so many slots
  /// may need is sized by. Throws invalid_argument when the slots can't hold all experts.
  static ExpertPlacement fullest(int64_t num_experts, int num_ranks, int64_t slots);

  int64_t num_experts() const { return static_cast<int64_t>(homes_.size()); }
  int num_ranks() const { return static_cast<int>(experts_of_rank_.size()); }
  const std::vector<int32_t>& experts_of(int rank) const { return experts_of_rank_[rank]; }
  const std::vector<ExpertHome>& homes_of(int32_t expert) const { return homes_[expert]; }
  /// The home that serves `expert` in turn `turn` (>= 0): replicas take turns. Experts start at
  /// unlike replicas, so that one token's experts spread.
  ExpertHome home(int32_t expert, int64_t turn) const {
    const auto& homes = homes_[expert];
    if (homes.size() == 1) return homes[0];
    return homes[static_cast<size_t>(turn + expert) % homes.size()];
  }
  /// Most experts of any rank.
  int64_t max_slots() const;
  /// Digest of sizes and lists: equal placements on all ranks have equal digests.
  uint64_t digest() const;
  Placement lists() const { return {experts_of_rank_}; }
  bool has_replicas() const { return has_replicas_; }
  const std::string& name() const { return name_; }

 private:
  std::vector<std::vector<int32_t>> experts_of_rank_;
  std::vector<std::vector<ExpertHome>> homes_;
  bool has_replicas_ = false;
  std::string name_;
};

}  // namespace moekit
