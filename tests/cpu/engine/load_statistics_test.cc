// Counts of what calls ask of experts and ranks, and a rebalance that they drive.
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "cpu/engine/layer_group.h"

namespace moekit::test {
namespace {

constexpr char kSpec[] = "E=12,k=3,H=64,I=48,weights=fp8_block,tokens=8";

/// Runs 4 tokens on each of 2 ranks with known ids.
void run_known(Group& group) {
  static const int32_t ids[2][4][3] = {{{0, 1, 2}, {0, 3, -1}, {0, 1, 11}, {5, 5, 0}},
                                       {{0, 6, 7}, {-1, -1, -1}, {8, 9, 10}, {0, 1, 2}}};
  static const float weights[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  expect_none(on_ranks(2, [&](int r) {
    LayerArgs a = group.args(r);
    a.topk_ids = TensorView::contiguous(ids[r], DType::i32, {4, 3});
    a.topk_weights = TensorView::contiguous(weights, DType::f32, {4, 3});
    group.layers[r]->run(a);
  }));
}

TEST(LoadStatistics, CountSlotsOfExpertsAndRanks) {
  Group group(kSpec, 2, changeable(12), 4);
  run_known(group);
  run_known(group);
  const LoadStatistics first = group.layers[0]->load_statistics();
  EXPECT_EQ(first.per_expert, (std::vector<int64_t>{8, 4, 2, 2, 0, 4, 0, 0, 0, 0, 0, 2}));
  EXPECT_EQ(first.per_rank, (std::vector<int64_t>{20, 2}));
  EXPECT_EQ(first.calls, 2);
  EXPECT_EQ(first.tokens, 8);
  std::vector<LoadStatistics> sums(2);
  expect_none(on_ranks(2, [&](int r) { sums[r] = group.layers[r]->gather_load_statistics(); }));
  for (const LoadStatistics& sum : sums) {
    EXPECT_EQ(sum.per_expert, (std::vector<int64_t>{12, 6, 4, 2, 0, 4, 2, 2, 2, 2, 2, 2}));
    EXPECT_EQ(sum.per_rank, (std::vector<int64_t>{28, 12}));
    EXPECT_EQ(sum.calls, 2);
    EXPECT_EQ(sum.tokens, 16);
    EXPECT_DOUBLE_EQ(sum.imbalance(), 1.4);
  }
  group.layers[0]->reset_load_statistics();
  EXPECT_EQ(group.layers[0]->load_statistics().per_expert, std::vector<int64_t>(12, 0));
  EXPECT_EQ(group.layers[0]->load_statistics().calls, 0);
  EXPECT_EQ(group.layers[1]->load_statistics().calls, 2);

  // Expert 0 on both ranks: its 6 slots of a round take turns.
  group.change({{{0, 1, 2, 3, 4, 5}, {0, 6, 7, 8, 9, 10, 11}}});
  EXPECT_EQ(group.layers[1]->load_statistics().calls, 0) << "counts are of one placement";
  run_known(group);
  expect_none(on_ranks(2, [&](int r) { sums[r] = group.layers[r]->gather_load_statistics(); }));
  EXPECT_EQ(std::accumulate(sums[0].per_rank.begin(), sums[0].per_rank.end(), int64_t{0}), 20);
  EXPECT_EQ(sums[0].per_rank, (std::vector<int64_t>{8 + 3, 6 + 3}));
}

/// A top-1 router that renormalizes gives every row the weight 1.
TEST(LoadStatistics, ReplicasShareRowsOfEqualWeights) {
  for (const Combine combine : {Combine::slots, Combine::rank_sums}) {
    for (const std::string prepare : {"all2all", "push", "allgather", "hierarchical"}) {
      PlanOptions options = changeable(4, prepare);
      options.combine = combine;
      Group group("E=4,k=1,H=64,I=48,weights=bf16,tokens=8", 2, options, 8);
      const std::vector<int32_t> ids(8, 2);
      const std::vector<float> weights(8, 1.0f);
      const auto run = [&] {
        expect_none(on_ranks(2, [&](int r) {
          LayerArgs a = group.args(r);
          a.topk_ids = TensorView::contiguous(ids.data(), DType::i32, {8, 1});
          a.topk_weights = TensorView::contiguous(weights.data(), DType::f32, {8, 1});
          group.layers[r]->run(a);
        }));
        return group.output;
      };
      const std::vector<float> of_one = run();
      group.change({{{0, 1, 2, 3}, {0, 1, 2, 3}}});
      EXPECT_EQ(run(), of_one) << prepare;
      for (int r = 0; r < 2; ++r) {
        EXPECT_EQ(group.layers[r]->load_statistics().per_rank, (std::vector<int64_t>{4, 4}));
      }
    }
  }
}

TEST(LoadStatistics, OffMeansNone) {
  PlanOptions options = options_for("", 1);
  options.load_statistics = false;
  Group group(kSpec, 2, options, 4);
  run_known(group);
  const LoadStatistics none = group.layers[0]->load_statistics();
  EXPECT_TRUE(none.per_expert.empty());
  EXPECT_TRUE(none.per_rank.empty());
  EXPECT_EQ(none.calls, 0);
  EXPECT_EQ(none.imbalance(), 1.0);
  group.layers[0]->reset_load_statistics();
}

TEST(LoadStatistics, ReadWhileCallsRun) {
  Group group(kSpec, 2, options_for("", 1), 4);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop.load()) {
      const LoadStatistics s = group.layers[0]->load_statistics();
      EXPECT_LE(s.calls, 20);
    }
  });
  for (int i = 0; i < 20; ++i) run_known(group);
  stop = true;
  reader.join();
  EXPECT_EQ(group.layers[0]->load_statistics().calls, 20);
}

TEST(LoadStatistics, DriveARebalance) {
  Group group("E=12,k=3,H=64,I=48,weights=bf16,tokens=8", 2, changeable(8), 16);
  group.run();
  const auto expected = group.output;
  std::vector<Placement> next(2);
  std::vector<std::string> errors = on_ranks(2, [&](int r) {
    const LoadStatistics load = group.layers[r]->gather_load_statistics();
    RebalanceOptions options;
    options.num_ranks = 2;
    options.slots_per_rank = 8;
    next[r] = rebalance(load.per_expert, options);
    group.layers[r]->set_placement(next[r]);
  });
  expect_none(errors);
  EXPECT_EQ(next[0], next[1]);
  group.run();
  EXPECT_EQ(group.output, expected);
}

}  // namespace
}  // namespace moekit::test
