// Placements: every expert owned, shares that differ by at most one, refusals with figures.
#include "problem/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>

#include "moekit/error.h"

namespace moekit {
namespace {

struct Case {
  int64_t num_experts;
  int num_ranks;
};

class Shares : public ::testing::TestWithParam<Case> {};

void expect_consistent(const ExpertPlacement& p, const Case& c) {
  ASSERT_EQ(p.num_experts(), c.num_experts);
  ASSERT_EQ(p.num_ranks(), c.num_ranks);
  EXPECT_FALSE(p.has_replicas());
  int64_t owned = 0;
  size_t least = SIZE_MAX, most = 0;
  for (int r = 0; r < p.num_ranks(); ++r) {
    const auto& list = p.experts_of(r);
    owned += static_cast<int64_t>(list.size());
    least = std::min(least, list.size());
    most = std::max(most, list.size());
    for (size_t slot = 0; slot < list.size(); ++slot) {
      const auto& homes = p.homes_of(list[slot]);
      ASSERT_EQ(homes.size(), 1u);
      EXPECT_EQ(homes[0].rank, r);
      EXPECT_EQ(homes[0].slot, static_cast<int32_t>(slot));
    }
  }
  EXPECT_EQ(owned, c.num_experts);
  EXPECT_LE(most - least, 1u);
}

TEST_P(Shares, DifferByAtMostOne) {
  expect_consistent(ExpertPlacement::linear(GetParam().num_experts, GetParam().num_ranks),
                    GetParam());
  expect_consistent(ExpertPlacement::round_robin(GetParam().num_experts, GetParam().num_ranks),
                    GetParam());
}

INSTANTIATE_TEST_SUITE_P(Sizes, Shares,
                         ::testing::Values(Case{30, 8}, Case{5, 2}, Case{2, 4}, Case{1, 1},
                                           Case{1, 1024}, Case{2048, 1024}, Case{2047, 1024},
                                           Case{128, 3}, Case{7, 7}, Case{8, 9}));

TEST(Placement, LinearShares) {
  const auto p = ExpertPlacement::linear(30, 8);
  std::vector<size_t> sizes;
  for (int r = 0; r < 8; ++r) sizes.push_back(p.experts_of(r).size());
  EXPECT_EQ(sizes, (std::vector<size_t>{4, 4, 4, 4, 4, 4, 3, 3}));
  EXPECT_EQ(p.experts_of(0), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(p.experts_of(6), (std::vector<int32_t>{24, 25, 26}));
  EXPECT_EQ(p.name(), "linear");
}

TEST(Placement, RoundRobin) {
  const auto p = ExpertPlacement::round_robin(5, 2);
  EXPECT_EQ(p.experts_of(0), (std::vector<int32_t>{0, 2, 4}));
  EXPECT_EQ(p.experts_of(1), (std::vector<int32_t>{1, 3}));
  EXPECT_EQ(p.name(), "round_robin");
}

TEST(Placement, MoreRanksThanExperts) {
  const auto p = ExpertPlacement::linear(2, 4);
  EXPECT_EQ(p.experts_of(1), (std::vector<int32_t>{1}));
  EXPECT_TRUE(p.experts_of(2).empty());
  EXPECT_TRUE(p.experts_of(3).empty());
}

TEST(Placement, ReplicasTakeTurns) {
  const auto p = ExpertPlacement::from_lists(3, {{2, 0}, {}, {1, 2}});
  EXPECT_TRUE(p.has_replicas());
  EXPECT_EQ(p.homes_of(2).size(), 2u);
  EXPECT_EQ(p.home(2, 0).rank, 0);
  EXPECT_EQ(p.home(2, 0).slot, 0);
  EXPECT_EQ(p.home(2, 1).rank, 2);
  EXPECT_EQ(p.home(2, 1).slot, 1);
  EXPECT_EQ(p.home(2, 7).rank, 2);
  EXPECT_EQ(p.home(0, 7).slot, 1);
}

TEST(Placement, ReplicasOfUnlikeExpertsServeOneTokenApart) {
  const auto p = ExpertPlacement::from_lists(4, {{0, 1, 2, 3}, {0, 1, 2, 3}});
  int64_t on_first = 0;
  for (int32_t e = 0; e < 4; ++e) on_first += p.home(e, 0).rank == 0 ? 1 : 0;
  EXPECT_EQ(on_first, 2);
  for (int32_t e = 0; e < 4; ++e) EXPECT_NE(p.home(e, 6).rank, p.home(e, 7).rank);
}

TEST(Placement, FullestHoldsEveryExpertAndFillsEverySlot) {
  for (const auto& [experts, ranks, slots] :
       {std::tuple<int64_t, int, int64_t>{8, 4, 2}, {8, 4, 5}, {3, 5, 1}, {3, 5, 9}, {1, 1, 1}}) {
    const auto p = ExpertPlacement::fullest(experts, ranks, slots);
    for (int r = 0; r < ranks; ++r) {
      EXPECT_EQ(static_cast<int64_t>(p.experts_of(r).size()), std::min(slots, experts));
    }
    EXPECT_EQ(p.max_slots(), std::min(slots, experts));
  }
  EXPECT_THROW(ExpertPlacement::fullest(8, 3, 2), Error);
  EXPECT_THROW(ExpertPlacement::fullest(8, 3, 0), Error);
}

TEST(Placement, DigestsTellListsApart) {
  const auto digest = [](std::vector<std::vector<int32_t>> lists) {
    return ExpertPlacement::from_lists(3, std::move(lists)).digest();
  };
  EXPECT_EQ(digest({{0, 1}, {2}}), digest({{0, 1}, {2}}));
  EXPECT_NE(digest({{0, 1}, {2}}), digest({{1, 0}, {2}}));
  EXPECT_NE(digest({{0, 1}, {2}}), digest({{0}, {1, 2}}));
  EXPECT_NE(digest({{0, 1}, {2}}), digest({{2}, {0, 1}}));
  EXPECT_NE(digest({{0, 1}, {2}}), digest({{0, 1}, {2}, {}}));
}

std::string refusal(int64_t num_experts, std::vector<std::vector<int32_t>> lists) {
  try {
    ExpertPlacement::from_lists(num_experts, std::move(lists));
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    return e.what();
  }
  return "accepted";
}

TEST(Placement, Refusals) {
  EXPECT_NE(refusal(3, {{0, 1}, {0}}).find("expert 2 of 3 is on no rank"), std::string::npos);
  EXPECT_NE(refusal(2, {{1, 1}, {0}}).find("rank 0 lists expert 1 twice"), std::string::npos);
  EXPECT_NE(refusal(2, {{0, 1}, {2}}).find("rank 1 slot 0 names expert 2"), std::string::npos);
  EXPECT_NE(refusal(2, {{0, 1}, {-1}}).find("names expert -1"), std::string::npos);
  EXPECT_NE(refusal(1, {{0}, {0, 0}}).find("rank 1 lists 2 experts"), std::string::npos);
  EXPECT_NE(refusal(2, {}).find("got 0"), std::string::npos);
  EXPECT_NE(refusal(0, {{}}).find("got 0"), std::string::npos);
  EXPECT_THROW(ExpertPlacement::linear(4, 0), Error);
  EXPECT_THROW(ExpertPlacement::round_robin(0, 4), Error);
  EXPECT_THROW(ExpertPlacement::linear(-1, 4), Error);
}

}  // namespace
}  // namespace moekit
