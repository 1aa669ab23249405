// The ways to share experts out among ranks. from_lists is the only place that builds the maps, so
// every placement has passed the same checks.
#include "problem/placement.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moekit {
namespace {

void check_sizes(int64_t num_experts, int64_t num_ranks) {
  MOEKIT_CHECK(num_experts >= 1 && num_experts <= std::numeric_limits<int32_t>::max(),
               "an expert placement needs 1 to {} experts, got {}",
               std::numeric_limits<int32_t>::max(), num_experts);
  MOEKIT_CHECK(num_ranks >= 1 && num_ranks <= std::numeric_limits<int32_t>::max(),
               "an expert placement needs at least 1 rank, got {}", num_ranks);
}

}  // namespace

ExpertPlacement ExpertPlacement::linear(int64_t num_experts, int num_ranks) {
  check_sizes(num_experts, num_ranks);
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(num_ranks));
  const int64_t share = num_experts / num_ranks;
  const int64_t larger_shares = num_experts % num_ranks;
  int32_t next = 0;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t count = share + (rank < larger_shares ? 1 : 0);
    for (int64_t i = 0; i < count; ++i) lists[rank].push_back(next++);
  }
  ExpertPlacement placement = from_lists(num_experts, std::move(lists));
  placement.name_ = "linear";
  return placement;
}

ExpertPlacement ExpertPlacement::round_robin(int64_t num_experts, int num_ranks) {
  check_sizes(num_experts, num_ranks);
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(num_ranks));
  for (int64_t e = 0; e < num_experts; ++e) {
    lists[e % num_ranks].push_back(static_cast<int32_t>(e));
  }
  ExpertPlacement placement = from_lists(num_experts, std::move(lists));
  placement.name_ = "round_robin";
  return placement;
}

ExpertPlacement ExpertPlacement::from_lists(int64_t num_experts,
                                            std::vector<std::vector<int32_t>> experts_of_rank) {
  check_sizes(num_experts, static_cast<int64_t>(experts_of_rank.size()));
  ExpertPlacement placement;
  placement.name_ = "lists";
  placement.homes_.resize(static_cast<size_t>(num_experts));
  const auto num_ranks = static_cast<int32_t>(experts_of_rank.size());
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const std::vector<int32_t>& list = experts_of_rank[rank];
    MOEKIT_CHECK(
        list.size() <= static_cast<size_t>(num_experts),
        "rank {} lists {} experts, but there are only {}: an expert may appear once a rank", rank,
        list.size(), num_experts);
    for (size_t slot = 0; slot < list.size(); ++slot) {
      const int32_t e = list[slot];
      MOEKIT_CHECK(e >= 0 && e < num_experts,
                   "rank {} slot {} names expert {}, expected one in [0, {})", rank, slot, e,
                   num_experts);
      std::vector<ExpertHome>& homes = placement.homes_[e];
      // Ranks are visited in order, so a second home on this rank can only be the last one added.
      MOEKIT_CHECK(homes.empty() || homes.back().rank != rank,
                   "rank {} lists expert {} twice (slots {} and {}): replicas must be on different "
                   "ranks",
                   rank, e, homes.back().slot, slot);
      homes.push_back({rank, static_cast<int32_t>(slot)});
      placement.has_replicas_ = placement.has_replicas_ || homes.size() > 1;
    }
  }
  const auto homeless = std::find_if(placement.homes_.begin(), placement.homes_.end(),
                                     [](const auto& homes) { return homes.empty(); });
  MOEKIT_CHECK(homeless == placement.homes_.end(),
               "expert {} of {} is on no rank: every expert needs a home",
               homeless - placement.homes_.begin(), num_experts);
  placement.experts_of_rank_ = std::move(experts_of_rank);
  return placement;
}

ExpertPlacement ExpertPlacement::fullest(int64_t num_experts, int num_ranks, int64_t slots) {
  check_sizes(num_experts, num_ranks);
  const int64_t held = std::min(slots, num_experts);
  MOEKIT_CHECK(
      held >= 1 && held >= (num_experts + num_ranks - 1) / num_ranks,
      "{} slots on each of {} ranks can't hold {} experts: at least {} slots a rank are needed",
      slots, num_ranks, num_experts, (num_experts + num_ranks - 1) / num_ranks);
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(num_ranks));
  int64_t next = 0;
  for (auto& list : lists) {
    for (int64_t i = 0; i < held; ++i) list.push_back(static_cast<int32_t>(next++ % num_experts));
  }
  return from_lists(num_experts, std::move(lists));
}

int64_t ExpertPlacement::max_slots() const {
  size_t most = 0;
  for (const auto& list : experts_of_rank_) most = std::max(most, list.size());
  return static_cast<int64_t>(most);
}

uint64_t ExpertPlacement::digest() const {
  uint64_t digest = 0x9E3779B97F4A7C15ull;
  const auto mix = [&](uint64_t value) {
    digest ^= value + 0x9E3779B97F4A7C15ull + (digest << 6) + (digest >> 2);
    digest *= 0xFF51AFD7ED558CCDull;
    digest ^= digest >> 33;
  };
  mix(static_cast<uint64_t>(num_experts()));
  for (const auto& list : experts_of_rank_) {
    mix(list.size() + (uint64_t{1} << 32));
    for (const int32_t expert : list) mix(static_cast<uint64_t>(expert));
  }
  return digest;
}

Placement linear_placement(int64_t num_experts, int num_ranks) {
  return ExpertPlacement::linear(num_experts, num_ranks).lists();
}

Placement round_robin_placement(int64_t num_experts, int num_ranks) {
  return ExpertPlacement::round_robin(num_experts, num_ranks).lists();
}

void check_placement(const Placement& placement, int64_t num_experts) {
  ExpertPlacement::from_lists(num_experts, placement.experts_of_rank);
}

}  // namespace moekit
