// RankMap: every rank stands in one place, groups are what they should be, sizes that don't divide
// are refused.
#include "problem/rank_map.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "moekit/error.h"

namespace moekit {
namespace {

TEST(RankMap, CoordinatesAndRanksAreInverse) {
  for (const int dp : {1, 2, 3}) {
    for (const int ep : {1, 2, 5}) {
      for (const int tp : {1, 2, 4}) {
        const RankMap map = RankMap::of(dp * ep * tp, tp, dp);
        EXPECT_EQ(map.ep_size, ep);
        EXPECT_EQ(map.size(), dp * ep * tp);
        std::set<int> seen;
        for (int d = 0; d < dp; ++d) {
          for (int e = 0; e < ep; ++e) {
            for (int t = 0; t < tp; ++t) {
              const RankCoords at{d, e, t};
              const int rank = map.rank_of(at);
              EXPECT_EQ(map.coords_of(rank), at);
              seen.insert(rank);
            }
          }
        }
        EXPECT_EQ(static_cast<int>(seen.size()), map.size());
        EXPECT_EQ(*seen.begin(), 0);
        EXPECT_EQ(*seen.rbegin(), map.size() - 1);
      }
    }
  }
}

TEST(RankMap, OrderOfTheAxes) {
  const RankMap map = RankMap::of(12, 2, 2);  // dp 2, ep 3, tp 2
  EXPECT_EQ(map.coords_of(0), (RankCoords{0, 0, 0}));
  EXPECT_EQ(map.coords_of(1), (RankCoords{0, 0, 1}));
  EXPECT_EQ(map.coords_of(2), (RankCoords{0, 1, 0}));
  EXPECT_EQ(map.coords_of(6), (RankCoords{1, 0, 0}));
  EXPECT_EQ(map.coords_of(11), (RankCoords{1, 2, 1}));
  EXPECT_EQ(map.tp_group(3), (std::vector<int>{2, 3}));
  EXPECT_EQ(map.ep_group(3), (std::vector<int>{1, 3, 5}));
  EXPECT_EQ(map.ep_group(8), (std::vector<int>{6, 8, 10}));
}

TEST(RankMap, GroupsMeetInOneRank) {
  const RankMap map = RankMap::of(24, 3, 2);
  for (int rank = 0; rank < map.size(); ++rank) {
    const auto ep = map.ep_group(rank), tp = map.tp_group(rank);
    EXPECT_EQ(static_cast<int>(ep.size()), map.ep_size);
    EXPECT_EQ(static_cast<int>(tp.size()), map.tp_size);
    std::set<int> common(ep.begin(), ep.end());
    int shared = 0;
    for (const int r : tp) shared += common.count(r) != 0 ? 1 : 0;
    EXPECT_EQ(shared, 1);
    for (const int r : ep) EXPECT_EQ(map.coords_of(r).dp, map.coords_of(rank).dp);
    for (const int r : tp) EXPECT_EQ(map.coords_of(r).ep, map.coords_of(rank).ep);
  }
}

TEST(RankMap, Refusals) {
  const auto refusal = [](int ranks, int tp, int dp) -> std::string {
    try {
      RankMap::of(ranks, tp, dp);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
      return e.what();
    }
    return "accepted";
  };
  EXPECT_NE(refusal(8, 3, 1).find("a multiple of 3"), std::string::npos);
  EXPECT_NE(refusal(8, 2, 3).find("a multiple of 6"), std::string::npos);
  EXPECT_NE(refusal(0, 1, 1).find("0 ranks"), std::string::npos);
  EXPECT_NE(refusal(4, 0, 1).find("got 0 and 1"), std::string::npos);
  EXPECT_NE(refusal(4, 1, -1).find("got 1 and -1"), std::string::npos);
  EXPECT_NE(refusal(1, 1 << 20, 1 << 20).find("a multiple of"), std::string::npos);
}

}  // namespace
}  // namespace moekit
