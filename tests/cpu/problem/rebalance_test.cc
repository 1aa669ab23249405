// The rebalancer: what it promises, over many loads and sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "moekit/error.h"
#include "moekit/placement.h"
#include "problem/placement.h"
#include "tensor/rng.h"

namespace moekit {
namespace {

struct Size {
  int64_t experts;
  int ranks;
  int64_t slots;
};

class Loads {
 public:
  /// Kinds: 0 uniform noise, 1 steep (like zipf), 2 one hot expert, 3 none at all, 4 all equal.
  static std::vector<int64_t> make(int kind, int64_t experts, uint64_t seed) {
    std::vector<int64_t> loads;
    const Rng rng(seed, 1);
    for (int64_t e = 0; e < experts; ++e) {
      const auto noise = static_cast<int64_t>(rng.below(static_cast<uint64_t>(e), 1000));
      const auto rank =
          static_cast<int64_t>(rng.below(static_cast<uint64_t>(e) + 100'000, 997)) + 1;
      loads.push_back(kind == 0   ? noise
                      : kind == 1 ? 100'000 / rank
                      : kind == 2 ? (e == experts / 2 ? 1'000'000 : noise)
                      : kind == 3 ? 0
                                  : 7);
    }
    return loads;
  }
};

double heaviest(const Placement& placement, const std::vector<int64_t>& loads) {
  const auto ranks = rank_loads(placement, loads);
  return *std::max_element(ranks.begin(), ranks.end());
}

int64_t filled(const Placement& placement) {
  int64_t count = 0;
  for (const auto& list : placement.experts_of_rank) count += static_cast<int64_t>(list.size());
  return count;
}

/// Largest share of one expert under `placement`.
double largest_share(const Placement& placement, const std::vector<int64_t>& loads) {
  const auto map =
      ExpertPlacement::from_lists(static_cast<int64_t>(loads.size()), placement.experts_of_rank);
  double largest = 0;
  for (size_t e = 0; e < loads.size(); ++e) {
    largest = std::max(largest, static_cast<double>(loads[e]) /
                                    static_cast<double>(map.homes_of(static_cast<int>(e)).size()));
  }
  return largest;
}

const Size kSizes[] = {{8, 4, 2},    {8, 4, 3},    {30, 8, 4},   {30, 8, 7},
                       {5, 2, 3},    {2, 4, 1},    {2, 4, 2},    {1, 3, 1},
                       {64, 16, 5},  {60, 7, 11},  {256, 32, 9}, {3, 2, 2},
                       {128, 8, 16}, {128, 8, 18}, {6, 6, 6},    {4, 2, 100}};

TEST(Rebalance, GreedyKeepsItsPromises) {
  for (const Size& size : kSizes) {
    for (int kind = 0; kind < 5; ++kind) {
      for (uint64_t seed = 1; seed <= 12; ++seed) {
        SCOPED_TRACE(std::to_string(size.experts) + " experts, " + std::to_string(size.ranks) +
                     " ranks, " + std::to_string(size.slots) + " slots, kind " +
                     std::to_string(kind) + ", seed " + std::to_string(seed));
        const auto loads = Loads::make(kind, size.experts, seed);
        RebalanceOptions options;
        options.num_ranks = size.ranks;
        options.slots_per_rank = size.slots;
        const Placement placement = rebalance(loads, options);
        EXPECT_EQ(placement, rebalance(loads, options));
        ASSERT_EQ(placement.experts_of_rank.size(), static_cast<size_t>(size.ranks));
        check_placement(placement, size.experts);  // every expert has a home, none twice on a rank
        for (const auto& list : placement.experts_of_rank) {
          EXPECT_LE(static_cast<int64_t>(list.size()), size.slots);
          EXPECT_TRUE(std::is_sorted(list.begin(), list.end()));
        }
        const double worst = heaviest(placement, loads);
        EXPECT_LE(worst, heaviest(linear_placement(size.experts, size.ranks), loads) * (1 + 1e-9));
        const int64_t slots = size.ranks * std::min(size.slots, size.experts);
        if (filled(placement) != slots) {
          EXPECT_GT(slots, size.experts) << "without spare slots all are filled";
          continue;
        }
        const double total =
            static_cast<double>(std::accumulate(loads.begin(), loads.end(), int64_t{0}));
        EXPECT_LE(worst, total / size.ranks + largest_share(placement, loads) * (1 + 1e-6));
      }
    }
  }
}

TEST(Rebalance, HotExpertsGetTheReplicas) {
  const std::vector<int64_t> loads = {1000, 10, 10, 10};
  RebalanceOptions options;
  options.num_ranks = 4;
  options.slots_per_rank = 2;
  const Placement placement = rebalance(loads, options);
  const auto map = ExpertPlacement::from_lists(4, placement.experts_of_rank);
  EXPECT_EQ(map.homes_of(0).size(), 4u);  // on every rank
  EXPECT_LE(heaviest(placement, loads), 260.0);
  EXPECT_EQ(filled(placement), 8);
}

TEST(Rebalance, FillsAllSlotsWhereThatCostsNothing) {
  // 288 slots for 256 experts, as a deployment of 32 ranks with one spare slot each has them.
  const auto loads = Loads::make(1, 256, 3);
  RebalanceOptions options;
  options.num_ranks = 32;
  options.slots_per_rank = 9;
  const Placement placement = rebalance(loads, options);
  EXPECT_EQ(filled(placement), 288);
  const auto ranks = rank_loads(placement, loads);
  const double mean = std::accumulate(ranks.begin(), ranks.end(), 0.0) / 32;
  EXPECT_LT(heaviest(placement, loads), 1.2 * mean);
}

TEST(Rebalance, LeavesASlotEmptyRatherThanLosingToLinearShares) {
  // Two slots on two ranks: any replica of {1, 2, 3} makes the heavier rank 3.5 or more.
  const std::vector<int64_t> loads = {1, 2, 3};
  RebalanceOptions options;
  options.num_ranks = 2;
  options.slots_per_rank = 2;
  const Placement placement = rebalance(loads, options);
  EXPECT_EQ(heaviest(placement, loads), 3.0);
  EXPECT_EQ(filled(placement), 3);
}

TEST(Rebalance, HierarchicalKeepsGroupsOnANode) {
  for (int kind = 0; kind < 5; ++kind) {
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      const auto loads = Loads::make(kind, 64, seed);
      RebalanceOptions options;
      options.num_ranks = 16;
      options.num_nodes = 4;
      options.slots_per_rank = 5;
      options.policy = RebalancePolicy::hierarchical;
      options.num_groups = 8;
      const Placement placement = rebalance(loads, options);
      EXPECT_EQ(placement, rebalance(loads, options));
      check_placement(placement, 64);
      std::vector<std::set<int64_t>> nodes_of_group(8), groups_of_node(4);
      for (int r = 0; r < 16; ++r) {
        EXPECT_LE(placement.experts_of_rank[r].size(), 5u);
        for (const int32_t e : placement.experts_of_rank[r]) {
          nodes_of_group[e / 8].insert(r / 4);
          groups_of_node[r / 4].insert(e / 8);
        }
      }
      for (const auto& nodes : nodes_of_group) EXPECT_EQ(nodes.size(), 1u);
      for (const auto& groups : groups_of_node) EXPECT_EQ(groups.size(), 2u);
    }
  }
}

TEST(Rebalance, UnevenGroupsAndUngroupedExperts) {
  RebalanceOptions options;
  options.num_ranks = 6;
  options.num_nodes = 3;
  options.policy = RebalancePolicy::hierarchical;
  options.num_groups = 4;  // two of one node, one of the others
  const auto loads = Loads::make(1, 24, 5);
  Placement placement = rebalance(loads, options);
  check_placement(placement, 24);
  EXPECT_EQ(filled(placement), 6 * 6) << "a node of two groups needs 6 slots on each rank";
  options.num_groups = 0;
  placement = rebalance(loads, options);
  check_placement(placement, 24);
  EXPECT_EQ(filled(placement), 24);
}

TEST(Rebalance, Refusals) {
  const std::vector<int64_t> loads(12, 1);
  const auto refusal = [&](RebalanceOptions o, std::vector<int64_t> with) -> std::string {
    try {
      rebalance(with, o);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
      return e.what();
    }
    return "accepted";
  };
  const auto has = [](const std::string& text, const std::string& words) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  };
  RebalanceOptions o;
  has(refusal(o, {}), "got none");
  has(refusal(o, {3, -1}), "load of expert 1 is -1");
  o.num_ranks = 0;
  has(refusal(o, loads), "at least 1 rank");
  o.num_ranks = 4;
  o.slots_per_rank = 2;
  has(refusal(o, loads), "at least 3 are needed");
  o.slots_per_rank = 3;
  o.policy = RebalancePolicy::hierarchical;
  o.num_nodes = 3;
  has(refusal(o, loads), "4 ranks on 3 nodes");
  o.num_nodes = 2;
  o.num_groups = 5;
  has(refusal(o, loads), "don't form 5 equal groups");
  o.num_groups = 1;
  has(refusal(o, loads), "a group for every node");
  o.num_groups = 3;  // two groups of four on one node of two ranks
  has(refusal(o, loads), "at least 4 are needed");
}

TEST(LoadStatistics, Imbalance) {
  LoadStatistics s;
  EXPECT_EQ(s.imbalance(), 1.0);
  s.per_rank = {0, 0};
  EXPECT_EQ(s.imbalance(), 1.0);
  s.per_rank = {30, 10};
  EXPECT_EQ(s.imbalance(), 1.5);
}

}  // namespace
}  // namespace moekit
