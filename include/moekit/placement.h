// Placement of experts on ranks: plain values, files, and the rebalancer that turns measured loads
// into a placement.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moekit/export.h"

namespace moekit {

/// Which rank holds which experts. experts_of_rank[r] lists global expert ids in slot order; an
/// expert on several ranks has replicas there, which take turns. Every expert has a rank, none
/// stands twice on one rank.
struct Placement {
  std::vector<std::vector<int32_t>> experts_of_rank;
  friend bool operator==(const Placement&, const Placement&) = default;
};

/// Contiguous shares; the first E % R ranks hold one expert more.
MOEKIT_API Placement linear_placement(int64_t num_experts, int num_ranks);
/// Expert e on rank e % R.
MOEKIT_API Placement round_robin_placement(int64_t num_experts, int num_ranks);

/// Throws invalid_argument naming the rank, slot and expert that break the rules of Placement.
MOEKIT_API void check_placement(const Placement& placement, int64_t num_experts);

/// Reads a placement file (docs/formats.md). Throws invalid_argument when there is no such file or
/// it is made for another number of ranks, corrupt_file when its content breaks the rules.
MOEKIT_API Placement load_placement(const std::string& path, int64_t num_experts, int num_ranks);
/// Writes one, beside the final name and renamed.
MOEKIT_API void save_placement(const std::string& path, const Placement& placement);

/// What a layer's calls asked of each expert, since it was made or last reset.
struct LoadStatistics {
  std::vector<int64_t> per_expert;  ///< slots that named each logical expert
  std::vector<int64_t> per_rank;    ///< of these, slots that each rank serves
  int64_t calls = 0;                ///< of this rank, also in a sum over ranks
  int64_t tokens = 0;

  /// Heaviest rank over the mean of all ranks; 1 without any load.
  MOEKIT_API double imbalance() const;
};

enum class RebalancePolicy : uint8_t {
  greedy,        ///< all ranks are alike
  hierarchical,  ///< experts of one routing group stay on one node
};

struct RebalanceOptions {
  int num_ranks = 1;
  int num_nodes = 1;           ///< hierarchical: contiguous shares of num_ranks / num_nodes ranks
  int64_t slots_per_rank = 0;  ///< 0: as few as hold all experts once
  RebalancePolicy policy = RebalancePolicy::greedy;
  int64_t num_groups = 0;  ///< hierarchical: contiguous groups of experts; 0: each expert is one
};

/// A placement for `loads` (slots per expert, as measured): hot experts get replicas in the free
/// slots, and the shares are packed so that the ranks carry alike. Deterministic: equal arguments,
/// equal result.
///
/// No rank has more than slots_per_rank experts, and all slots are filled, unless filling one would
/// make the heaviest rank heavier than linear shares do (greedy), or a rank holds every expert that
/// it may already. Where all slots are filled, the heaviest rank carries at most the mean plus the
/// largest share of one expert (greedy; within each node: hierarchical). Greedy is never worse than
/// linear shares. Throws invalid_argument when the slots can't hold all experts.
MOEKIT_API Placement rebalance(const std::vector<int64_t>& loads, const RebalanceOptions& options);

/// Load of each rank under `placement` when replicas share an expert's load evenly.
MOEKIT_API std::vector<double> rank_loads(const Placement& placement,
                                          const std::vector<int64_t>& loads);

/// What Layer::set_placement did on this rank.
struct PlacementChange {
  int64_t experts_kept = 0;    ///< packed bytes stayed or were moved
  int64_t experts_packed = 0;  ///< read and packed anew
  int64_t bytes_packed = 0;
};

}  // namespace moekit
