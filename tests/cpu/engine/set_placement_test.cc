// Placements that change under a living layer: bits, what is read, what is refused.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <functional>
#include <string>

#include "cpu/engine/layer_group.h"
#include "moekit/error.h"
#include "quant/stored_codec.h"
#include "tensor/rng.h"

namespace moekit::test {
namespace {

constexpr char kSpec[] = "E=12,k=3,H=64,I=48,weights=fp8_block,tokens=8";

/// A random placement with `slots` slots a rank, some of them replicas or empty.
Placement random_placement(int64_t experts, int ranks, int64_t slots, uint64_t seed) {
  const Rng rng(seed, 3);
  uint64_t next = 0;
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(rng.below(next++, static_cast<uint64_t>(n)));
  };
  Placement placement;
  placement.experts_of_rank.resize(static_cast<size_t>(ranks));
  const auto put = [&](int32_t e, int64_t rank) {
    auto& list = placement.experts_of_rank[rank];
    if (static_cast<int64_t>(list.size()) >= slots) return false;
    if (std::find(list.begin(), list.end(), e) != list.end()) return false;
    list.insert(list.begin() + below(static_cast<int64_t>(list.size()) + 1), e);
    return true;
  };
  for (int32_t e = 0; e < experts; ++e) {
    int64_t rank = below(ranks);
    while (!put(e, rank)) rank = (rank + 1) % ranks;
  }
  for (int64_t extra = below(ranks * slots); extra > 0; --extra) {
    put(static_cast<int32_t>(below(experts)), below(ranks));
  }
  return placement;
}

class SetPlacement : public testing::TestWithParam<const char*> {};

TEST_P(SetPlacement, BitsAreThoseOfOneRankAfterEveryChange) {
  for (const char* spec :
       {kSpec, "E=12,k=3,H=72,I=40,weights=int4_g32,shared_I=24,tokens=8",
        "E=7,k=2,H=64,I=33,weights=nvfp4,activations=nvfp4,bias=both,tokens=8"}) {
    for (const int ranks : {1, 3}) {
      Group group(spec, ranks, changeable(ranks == 1 ? 12 : 6, ranks == 1 ? "" : GetParam()));
      const std::vector<float> expected =
          run_layer(group.source, options_for("", 1), 1, group.rows);
      const int64_t workspace = group.layers[0]->explanation().plan.workspace_bytes;
      group.run();
      EXPECT_EQ(group.output, expected);
      for (uint64_t seed = 1; seed <= 12; ++seed) {
        const Placement next =
            random_placement(group.source.config.num_experts, ranks, ranks == 1 ? 12 : 6, seed);
        group.change(next);
        for (const auto& layer : group.layers) EXPECT_EQ(layer->placement(), next);
        group.run();
        EXPECT_EQ(group.output, expected) << spec << ", " << ranks << " ranks, change " << seed;
      }
      EXPECT_EQ(group.layers[0]->explanation().plan.workspace_bytes, workspace);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Members, SetPlacement,
                         testing::Values("all2all", "allgather", "low_latency"),
                         [](const auto& info) { return std::string(info.param); });

/// Experts of one layer, some of which `change` treats, over two ranks: bits as on one rank after
/// each of two changes of placement; returns what these packed on each rank.
std::vector<std::vector<PlacementChange>> change_twice(
    const std::function<void(StoredExpert& expert, size_t e)>& change) {
  Group group("E=6,k=2,H=64,I=64,weights=int4_g32,tokens=4", 2, changeable(6), 5);
  for (auto& canonical : group.canonical) {
    for (size_t e = 0; e < canonical->experts.size(); ++e) change(canonical->experts[e], e);
  }
  LayerSource changed = group.source;
  changed.canonical = group.canonical[0];
  const auto expected = run_layer(changed, options_for("", 1), 1, group.rows);
  PlanOptions options = changeable(6);
  options.max_tokens = group.tokens;
  group.open(options);
  group.run();
  EXPECT_EQ(group.output, expected);
  std::vector<std::vector<PlacementChange>> changes;
  for (const Placement& next :
       {Placement{{{0, 1, 2, 5}, {3, 4}}}, Placement{{{0, 1}, {3, 4, 2, 5}}}}) {
    changes.push_back(group.change(next));
    group.run();
    EXPECT_EQ(group.output, expected);
  }
  return changes;
}

TEST(SetPlacementLayer, ExpertsOfUnlikePackingAreRepacked) {
  // Scales of expert 5 alone are f32: beside it all are, and places larger.
  std::deque<std::vector<float>> wide;
  const auto changes = change_twice([&](StoredExpert& expert, size_t e) {
    if (e != 5) return;
    for (StoredMatrix* m : {&expert.gate, &expert.up, &expert.down}) {
      CodeGrid& grid = m->scales.values;
      ASSERT_EQ(bytes_of(grid.unit), 2);
      const int64_t groups = m->cols / m->scales.col_group;
      std::vector<float> scales(static_cast<size_t>(m->rows * groups));
      for (int64_t i = 0; i < m->rows * groups; ++i) {
        scales[i] = quant::scale_at(*m, i / groups, i % groups * m->scales.col_group);
      }
      wide.push_back(std::move(scales));
      grid.data = reinterpret_cast<const std::byte*>(wide.back().data());
      grid.unit = DType::f32;
      grid.col_stride = 4;
      grid.row_stride = 4 * groups;
    }
  });
  EXPECT_EQ(changes[0][0].experts_packed, 4) << "rank 0 repacks all, as expert 5 widens its scales";
  EXPECT_EQ(changes[1][0].experts_packed, 2);
  EXPECT_EQ(changes[0][1].experts_packed, 2) << "rank 1 repacks what it keeps, as 5 went";
  EXPECT_EQ(changes[1][1].experts_packed, 4);
}

TEST(SetPlacementLayer, ActOrderOfOneExpertRepacksNoOther) {
  // Columns of all experts count as sorted, wherever expert 5 lives; else bits would follow it.
  std::vector<int32_t> order(64);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>((63 - i) / 32);
  const auto changes = change_twice([&](StoredExpert& expert, size_t e) {
    if (e == 5) expert.up.group_index = expert.gate.group_index = order.data();
  });
  EXPECT_EQ(changes[0][0].experts_packed, 1);
  EXPECT_EQ(changes[0][1].experts_packed, 0);
  EXPECT_EQ(changes[1][0].experts_packed, 0);
  EXPECT_EQ(changes[1][1].experts_packed, 2);
}

/// Points a rank's view of an expert at memory that no one may read, or back at the weights.
class Guard {
 public:
  Guard() : page_(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Guard() { munmap(page_, kBytes); }
  void forbid(StoredExpert& expert) const {
    for (StoredMatrix* m : {&expert.gate, &expert.up, &expert.down}) {
      m->codes.data = static_cast<const std::byte*>(page_);
      m->scales.values.data = static_cast<const std::byte*>(page_);
    }
  }

 private:
  static constexpr size_t kBytes = size_t{1} << 24;
  void* page_;
};

TEST(SetPlacementLayer, ARankReadsOnlyTheExpertsThatAreNewToIt) {
  const Guard guard;
  const auto source = make_layer(kSpec);
  Group group(kSpec, 3, changeable(6));
  const auto expected = run_layer(source, options_for("", 1), 1, group.rows);
  const auto allow = [&](const Placement& readable) {
    for (int r = 0; r < 3; ++r) {
      for (StoredExpert& expert : group.canonical[r]->experts) guard.forbid(expert);
      for (const int32_t e : readable.experts_of_rank[r]) {
        group.canonical[r]->experts[e] = group.source.canonical->experts[e];
      }
    }
  };
  PlanOptions options = changeable(6);
  options.max_tokens = group.tokens;
  allow(linear_placement(12, 3));
  group.open(options);  // packs its own experts, with the others out of reach
  group.run();
  EXPECT_EQ(group.output, expected);

  // Rank 0 keeps 0, 2 and 3 in other slots and gets 11; rank 1 loses 5; rank 2 gets 5 and 0.
  const Placement next{{{3, 11, 0, 2}, {4, 6, 7, 1}, {8, 5, 9, 10, 11, 0}}};
  allow({{{11}, {1}, {5, 0}}});
  const auto changes = group.change(next);
  EXPECT_EQ(changes[0].experts_kept, 3);
  EXPECT_EQ(changes[0].experts_packed, 1);
  EXPECT_EQ(changes[1].experts_packed, 1);
  EXPECT_EQ(changes[2].experts_packed, 2);
  EXPECT_EQ(changes[2].bytes_packed, 2 * changes[0].bytes_packed);
  allow({{{}, {}, {}}});
  group.run();
  EXPECT_EQ(group.output, expected);
  for (const PlacementChange& change : group.change(next)) EXPECT_EQ(change.experts_packed, 0);
}

TEST(SetPlacementLayer, RefusalsReachAllRanksAndChangeNothing) {
  Group group(kSpec, 3, changeable(6));
  const auto linear = [](int) { return linear_placement(12, 3); };
  group.run();
  const auto expected = group.output;
  group.change(random_placement(12, 3, 6, 99));
  group.expect_refused(
      [](int r) { return r == 1 ? round_robin_placement(12, 3) : linear_placement(12, 3); },
      "rank 1 asks for another placement than rank 0");
  group.expect_refused([](int) { return linear_placement(12, 4); },
                       "lists experts of 4 ranks, the layer runs on 3");
  group.expect_refused(
      [](int) {
        return Placement{{{0, 1, 2}, {3, 4, 5}, {6, 7, 8}}};
      },
      "expert 9 of 12 is on no rank");
  group.expect_refused(
      [](int) {
        return Placement{{{0, 1, 2, 3, 4, 5, 6}, {7, 8, 9}, {10, 11}}};
      },
      "gives a rank 7 experts, the layer was planned for 6 slots");
  group.expect_refused([](int r) { return r == 2 ? Placement{} : linear_placement(12, 3); },
                       "rank 2: ");
  {  // a call in flight on one workspace of each rank
    std::vector<std::unique_ptr<Workspace>> spaces(3);
    std::vector<std::unique_ptr<PendingCall>> calls(3);
    expect_none(on_ranks(3, [&](int r) {
      spaces[r] = group.layers[r]->make_workspace();
      calls[r] = std::make_unique<PendingCall>(
          group.layers[r]->dispatch(group.args(r), nullptr, spaces[r].get()));
    }));
    group.expect_refused(linear, "1 call(s) are in flight");
    expect_none(on_ranks(3, [&](int r) { calls[r]->wait(); }));
    EXPECT_EQ(group.output, expected);
  }
  // One rank finds that it can't pack what it would get: an expert that is misshapen there.
  StoredExpert& broken = group.canonical[2]->experts[8];
  broken.up.rows += 1;
  group.change({{{0, 1, 2, 3}, {4, 5, 6, 7, 8}, {9, 10, 11}}});
  group.expect_refused(linear, "rank 2: all experts need matrices of one shape");
  group.run();
  EXPECT_EQ(group.output, expected);
  broken.up.rows -= 1;
  group.change(linear(0));
  group.run();
  EXPECT_EQ(group.output, expected);
}

TEST(SetPlacementLayer, FixedPlacementsAndSmallStagesAreRefusedWithAWayOut) {
  Group fixed(kSpec, 2, options_for("", 1));
  EXPECT_EQ(fixed.layers[0]->explanation().plan.placement_bytes, 0);
  fixed.expect_refused([](int) { return round_robin_placement(12, 2); },
                       "planned with a fixed placement: set slots_per_rank");

  PlanOptions options = changeable(7);
  options.staging_slots = 2;
  Group group(kSpec, 2, options);
  group.expect_refused([](int) { return round_robin_placement(12, 2); },
                       "brings 3 experts to a rank (new to it), 2 staging slots were planned");
  group.run();
  const auto expected = group.output;
  // In two steps it goes.
  group.change({{{0, 2, 4, 5, 6, 8}, {1, 3, 7, 9, 10, 11}}});
  group.change(round_robin_placement(12, 2));
  group.run();
  EXPECT_EQ(group.output, expected);
}

TEST(SetPlacementLayer, HeadroomIsPlannedAndCheckedWithTheOptions) {
  const auto refusal = [](PlanOptions options) -> std::string {
    try {
      const LayerSource source = make_layer(kSpec);
      options.max_tokens = 4;
      Layer::from_canonical(source.canonical, options);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
      return e.what();
    }
    return "accepted";
  };
  EXPECT_NE(refusal(changeable(11)).find("the plan has 11 slots a rank"), std::string::npos);
  EXPECT_NE(refusal(changeable(-1)).find("0 or more"), std::string::npos);
  PlanOptions options = options_for("", 1);
  options.staging_slots = 2;
  EXPECT_NE(refusal(options).find("need slots_per_rank"), std::string::npos);

  Group fixed(kSpec, 2, options_for("", 1));
  Group roomy(kSpec, 2, changeable(8));
  const PlanSummary& small = fixed.layers[0]->explanation().plan;
  const PlanSummary& large = roomy.layers[0]->explanation().plan;
  EXPECT_EQ(small.weights_bytes, large.weights_bytes);
  // 2 free slots, 8 staging slots and one to turn cycles through, of 6 experts' size each.
  EXPECT_GE(large.placement_bytes, small.weights_bytes * 11 / 6 - 4096);
  EXPECT_LE(large.placement_bytes, small.weights_bytes * 11 / 6 + 4096);
}

class CountingAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    ++calls;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* p, size_t) noexcept override { std::free(p); }
  std::atomic<int64_t> calls{0};
};

TEST(SetPlacementLayer, TakesNoMemoryThatWasNotPlanned) {
  CountingAllocator allocator;
  PlanOptions options = changeable(12);
  options.allocator = &allocator;
  {
    Group group(kSpec, 2, options);
    const int64_t before = allocator.calls.load();
    EXPECT_GT(before, 0);
    for (uint64_t seed = 1; seed < 5; ++seed) {
      group.change(random_placement(12, 2, 12, seed));
      group.run();
    }
    EXPECT_EQ(allocator.calls.load(), before);
  }
}

TEST(SetPlacementLayer, RowsKeepTheirBitsAmongReplicasWithRankSums) {
  for (const char* prepare : {"all2all", "allgather", "low_latency"}) {
    PlanOptions options = options_for("", 1);
    options.prepare = prepare;
    options.combine = Combine::rank_sums;
    options.slots_per_rank = 12;
    Group group(kSpec, 3, options, 6);
    group.change(random_placement(12, 3, 10, 4));
    group.run();
    const auto forward = group.output;
    const int64_t hidden = group.source.config.hidden;
    const int64_t rows = 18;
    std::vector<float> reversed(group.rows.size());
    for (int64_t t = 0; t < rows; ++t) {
      std::copy_n(group.rows.begin() + t * hidden, hidden,
                  reversed.begin() + (rows - 1 - t) * hidden);
    }
    group.rows = reversed;
    group.run();  // each row on another rank, at another place
    for (int64_t t = 0; t < rows; ++t) {
      EXPECT_TRUE(std::equal(forward.begin() + t * hidden, forward.begin() + (t + 1) * hidden,
                             group.output.begin() + (rows - 1 - t) * hidden))
          << prepare << ", row " << t;
    }
  }
}

}  // namespace
}  // namespace moekit::test
