// Nodes of a plan are those of its communicator, whichever ranks they have.
#include <gtest/gtest.h>

#include <numeric>

#include "comm/communicator.h"
#include "cpu/engine/layer_group.h"
#include "engine/plan.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

constexpr int kRanks = 6;

/// Ends of one group whose ranks lie on nodes 0, 1, 2, 0, 1, 2.
std::vector<CommunicatorHandle> spread_ends() {
  auto whole = comm::make_thread_group(kRanks, std::chrono::seconds(30), 3);
  std::vector<CommunicatorHandle> ends(kRanks);
  expect_none(on_ranks(kRanks, [&](int r) {
    const int key = r % 2 * 3 + r / 2;
    std::shared_ptr<comm::Communicator> end = whole[r]->split(0, key, {"test: split", 0});
    const int rank = end->rank();
    ends[rank].impl = std::move(end);
  }));
  return ends;
}

TEST(Nodes, AreTheCommunicatorsAndNeedNotBeContiguous) {
  const LayerSource source = make_layer("E=10,k=3,H=64,I=64");
  const int64_t tokens = 5, hidden = source.config.hidden;
  const std::vector<float> rows = make_rows(source, tokens * kRanks);
  PlanOptions options;
  options.backend = "cpu";
  options.max_tokens = tokens;
  const std::vector<float> alone = run_layer(source, options, 1, rows);
  for (const char* member : {"hierarchical", "push", "all2all"}) {
    options.prepare = member;
    auto ends = spread_ends();
    std::vector<float> output(rows.size(), -1.0f);
    expect_none(on_ranks(kRanks, [&](int r) {
      PlanOptions mine = options;
      mine.comm = ends[r];
      const Problem problem = engine::make_problem(*source.canonical, mine);
      EXPECT_EQ(problem.nodes.num_nodes(), 3);
      for (int peer = 0; peer < kRanks; ++peer) EXPECT_EQ(problem.nodes.node_of(peer), peer % 3);
      const Layer layer = Layer::from_canonical(source.canonical, mine);
      LayerArgs args;
      float* in = const_cast<float*>(rows.data()) + r * tokens * hidden;
      args.hidden = TensorView::contiguous(in, DType::f32, {tokens, hidden});
      args.output =
          TensorView::contiguous(output.data() + r * tokens * hidden, DType::f32, {tokens, hidden});
      for (int call = 0; call < 3; ++call) layer.run(args);
    }));
    EXPECT_EQ(output, alone) << member;
  }
}

TEST(Nodes, AGroupOfOneNodeMayBeSpreadForATrial) {
  const LayerSource source = make_layer("E=10,k=3,H=64,I=64");
  const auto ends = make_thread_ranks(5);
  PlanOptions options;
  options.max_tokens = 1;
  options.comm = ends[0];
  EXPECT_EQ(engine::make_problem(*source.canonical, options).nodes.num_nodes(), 1);
  options.num_nodes = 2;
  EXPECT_EQ(engine::make_problem(*source.canonical, options).nodes.node_of(3), 1);
  options.num_nodes = 6;
  EXPECT_THROW(engine::make_problem(*source.canonical, options), Error);
}

}  // namespace
}  // namespace moekit::test
