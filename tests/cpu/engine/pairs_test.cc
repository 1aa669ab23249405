// Every prepare member x every experts member x ranks x cases of routing, through the public path:
// the bits of the same experts with rows that stay on one rank; and every wire format over every
// member.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "experts/experts.h"
#include "moekit/communicator.h"
#include "moekit/layer.h"
#include "prepare/prepare_finalize.h"
#include "problem/error_bound.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

constexpr int64_t kExperts = 6, kTopK = 3, kTokens = 13;
const std::string kSpec = "E=6,k=3,H=96,I=64,weights=fp8_block,tokens=13";

/// Ids and weights of one call over all ranks.
struct Case {
  std::string name;
  int64_t tokens = kTokens;
  std::function<int32_t(int64_t token, int64_t slot)> id;
};

std::vector<Case> cases() {
  const auto spread = [](int64_t t, int64_t j) {
    return static_cast<int32_t>((5 * t + 2 * j) % 6);
  };
  return {
      {"no tokens", 0, spread},
      {"one token", 1, spread},
      {"odd", kTokens, spread},
      {"one hot expert", kTokens,
       [](int64_t t, int64_t j) { return static_cast<int32_t>(j == 0 ? 4 : (t + 3 * j) % 4); }},
      {"all to the first experts", kTokens,
       [](int64_t, int64_t j) { return static_cast<int32_t>(j == 2 ? -1 : j); }},
      {"no experts for most", kTokens,
       [](int64_t t, int64_t j) { return static_cast<int32_t>((t + j) % 3 == 0 ? t % 6 : -1); }},
      {"duplicates", kTokens,
       [](int64_t t, int64_t j) { return static_cast<int32_t>(j == 1 ? t % 6 : (t + 2) % 6); }},
  };
}

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;

  explicit Routed(const Case& c) {
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t j = 0; j < kTopK; ++j) {
        ids.push_back(c.id(t, j));
        weights.push_back(0.1f + 0.07f * static_cast<float>((t * 7 + j * 3) % 11));
      }
    }
    ids.reserve(1);
    weights.reserve(1);
  }
};

/// One planned layer on some ranks.
class Pair {
 public:
  Pair(const LayerSource& source, const PlanOptions& options, int ranks)
      : config_(source.config), layer_(source, options, ranks, kTokens) {}

  std::vector<float> run(const Case& c) const {
    const Routed routed(c);
    std::vector<float> rows = engine_rows(c.tokens);
    RankedInputs inputs;
    inputs.hidden = TensorView::contiguous(rows.data(), DType::f32, {c.tokens, config_.hidden});
    inputs.topk_ids = TensorView::contiguous(routed.ids.data(), DType::i32, {c.tokens, kTopK});
    inputs.topk_weights =
        TensorView::contiguous(routed.weights.data(), DType::f32, {c.tokens, kTopK});
    RankedOutputs outputs;
    layer_.run(inputs, outputs, 2);
    return outputs.output;
  }
  const PlanSummary& plan() const { return layer_.explanation().plan; }

 private:
  std::vector<float> engine_rows(int64_t tokens) const {
    std::vector<float> rows(static_cast<size_t>(tokens * config_.hidden) + 1);
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = static_cast<float>(static_cast<int64_t>(i * 37 % 255) - 127) / 64.0f;
    }
    return rows;
  }

  MoeConfig config_;
  RankedLayer layer_;
};

std::vector<std::string> members_over_ranks() {
  std::vector<std::string> names;
  for (const prepare::PrepareFinalize* member : prepare::registry()) {
    const std::string name(member->name());
    if (name != "local" && name != "local_batched") names.push_back(name);
  }
  return names;
}

PlanOptions pair_options(const std::string& prepare, const std::string& backend) {
  PlanOptions options = options_for(backend, 1);
  options.prepare = prepare;
  return options;
}

bool is_batched(const std::string& name) { return name.find("batched") != std::string::npos; }
bool is_batched_prepare(const std::string& name) {
  return is_batched(name) || name == "low_latency";
}

/// A placement in which every other expert has a second home.
std::string replica_file(int ranks) {
  const std::string path = testing::TempDir() + "/moekit_replicas_" + std::to_string(ranks) + "_" +
                           std::to_string(::getpid()) + ".json";
  std::ofstream file(path);
  file << "{\"experts_of_rank\": [";
  for (int r = 0; r < ranks; ++r) {
    file << (r == 0 ? "[" : ", [");
    bool first = true;
    for (int64_t e = 0; e < kExperts; ++e) {
      const bool second = ranks > 1 && e % 2 == 0 && (e + 1) % ranks == r;
      if (e % ranks != r && !second) continue;
      file << (first ? "" : ", ") << e;
      first = false;
    }
    file << "]";
  }
  file << "]}";
  return path;
}

class PairsTest : public testing::TestWithParam<std::string> {};

TEST_P(PairsTest, SlotsHaveTheBitsOfOneRank) {
  const LayerSource source = make_layer(kSpec);
  for (const experts::Experts* experts : experts::registry()) {
    const std::string backend(experts->name());
    PlanOptions options = pair_options(GetParam(), backend);
    if (backend == "sm90" || backend.starts_with("cuda_")) continue;  // not on this device
    if (is_batched(backend) != is_batched_prepare(GetParam())) {
      const Explanation refused = explain_plan(source, options, 2, 8);
      EXPECT_FALSE(refused.chosen) << backend;
      EXPECT_NE(refusal_of(refused, backend).find("rows"), std::string::npos) << backend;
      continue;
    }
    const Pair alone(source, pair_options(is_batched(backend) ? "local_batched" : "local", backend),
                     1);
    for (int ranks : {1, 2, 3, 4, 7}) {
      for (const std::string& placement : {std::string("linear"), replica_file(ranks)}) {
        options.placement = placement;
        options.num_nodes = ranks > 3 ? 2 : 1;
        const Pair pair(source, options, ranks);
        ASSERT_EQ(pair.plan().prepare, GetParam());
        for (const Case& c : cases()) {
          EXPECT_EQ(pair.run(c), alone.run(c))
              << backend << ", " << ranks << " ranks, " << placement << ", " << c.name;
        }
      }
    }
  }
}

TEST_P(PairsTest, RankSumsRepeatAndStayWithinTheBound) {
  const LayerSource source = make_layer(kSpec);
  for (const char* name : {"cpu", "ref", "cpu_batched", "ref_batched"}) {
    if (is_batched(name) != is_batched_prepare(GetParam())) continue;
    const Pair reference(source, pair_options("local", "ref"), 1);
    for (DType dtype : {DType::f32, DType::bf16}) {
      PlanOptions options = pair_options(GetParam(), name);
      options.combine = Combine::rank_sums;
      options.combine_dtype = dtype;
      for (int ranks : {2, 4, 7}) {
        options.num_nodes = ranks > 3 ? 2 : 1;
        const Pair pair(source, options, ranks), again(source, options, ranks);
        for (const Case& c : cases()) {
          const std::vector<float> out = pair.run(c);
          EXPECT_EQ(out, again.run(c)) << name << ", " << ranks << " ranks, " << c.name;
          if (c.tokens == 0) continue;
          EXPECT_LE(worst_row(out, reference.run(c), source.config.hidden),
                    row_error_bound(source.config, dtype))
              << name << ", " << ranks << " ranks, " << c.name;
        }
      }
    }
  }
}

TEST_P(PairsTest, EveryWireFormatHasTheBitsOfOneRank) {
  // fp8_block experts: rows come to them quantized, or in another format that they quantize again.
  for (const char* activations : {"bf16", "fp8_block"}) {
    const LayerSource source = make_layer(kSpec + ",activations=" + activations);
    for (const Wire wire : {Wire::automatic, Wire::f32, Wire::bf16, Wire::fp8_token,
                            Wire::fp8_block, Wire::mxfp8, Wire::nvfp4}) {
      const bool batched = is_batched_prepare(GetParam());
      PlanOptions one =
          pair_options(batched ? "local_batched" : "local", batched ? "cpu_batched" : "cpu");
      PlanOptions many = pair_options(GetParam(), one.backend);
      one.wire = many.wire = wire;
      const Pair alone(source, one, 1), pair(source, many, 3);
      const Case odd = cases()[2];
      EXPECT_EQ(pair.run(odd), alone.run(odd)) << activations << ", " << pair.plan().wire_format;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Prepare, PairsTest, testing::ValuesIn(members_over_ranks()),
                         [](const auto& info) { return info.param; });

TEST(PushedLayer, TwoCallsInFlightOnTwoWorkspaces) {
  const LayerSource source = make_layer(kSpec);
  for (const char* prepare : {"push", "low_latency"}) {
    const std::string backend = std::string(prepare) == "push" ? "cpu" : "cpu_batched";
    const Case odd = cases()[2], hot = cases()[3];
    std::vector<CommunicatorHandle> ends = make_thread_ranks(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        PlanOptions options = pair_options(prepare, backend);
        options.comm = ends[static_cast<size_t>(rank)];
        options.max_tokens = 8;
        const Layer layer = Layer::from_canonical(source.canonical, options);
        EXPECT_GT(layer.explanation().plan.heap_bytes, 0);
        auto first = layer.make_workspace(), second = layer.make_workspace();
        EXPECT_GE(first->bytes(),
                  layer.explanation().plan.workspace_bytes + layer.explanation().plan.heap_bytes);
        const int64_t hidden = source.config.hidden, tokens = rank == 1 ? 0 : 4;
        std::vector<float> rows(static_cast<size_t>(tokens * hidden) + 1, 0.25f * (rank + 1));
        std::vector<float> a(rows.size()), b(rows.size()), a_alone(rows.size()),
            b_alone(rows.size());
        const Routed odd_routed(odd), hot_routed(hot);
        const auto args = [&](const Routed& routed, std::vector<float>& out) {
          LayerArgs args;
          args.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, hidden});
          args.output = TensorView::contiguous(out.data(), DType::f32, {tokens, hidden});
          args.topk_ids = TensorView::contiguous(routed.ids.data(), DType::i32, {tokens, kTopK});
          args.topk_weights =
              TensorView::contiguous(routed.weights.data(), DType::f32, {tokens, kTopK});
          return args;
        };
        layer.run(args(odd_routed, a_alone));
        layer.run(args(hot_routed, b_alone));
        for (int round = 0; round < 3; ++round) {
          std::fill(a.begin(), a.end(), -1.0f);
          std::fill(b.begin(), b.end(), -1.0f);
          a.back() = b.back() = 0.0f;
          PendingCall x = layer.dispatch(args(odd_routed, a), nullptr, first.get());
          PendingCall y = layer.dispatch(args(hot_routed, b), nullptr, second.get());
          y.experts();
          x.experts();
          y.combine();
          x.combine();
          EXPECT_EQ(a, a_alone) << prepare << ", rank " << rank;
          EXPECT_EQ(b, b_alone) << prepare << ", rank " << rank;
        }
      });
    }
    for (std::thread& t : threads) t.join();
  }
}

TEST(PushedLayer, CapacityThatGivesARankNothingIsRefusedWithAReason) {
  const LayerSource source = make_layer(kSpec);
  PlanOptions options = pair_options("push", "cpu");
  options.capacity = CapacityMode::drop;
  options.capacity_rows = 3;
  const Explanation explanation = explain_plan(source, options, 4, 8);
  EXPECT_FALSE(explanation.chosen);
  EXPECT_NE(refusal_of(explanation, "push").find("equal share"), std::string::npos)
      << refusal_of(explanation, "push");
  options.capacity_rows = 4;
  EXPECT_TRUE(explain_plan(source, options, 4, 8).chosen);
}

}  // namespace
}  // namespace moekit::test
