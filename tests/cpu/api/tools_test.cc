// The tools behind the program: ranks as threads, comparison of rows, SPECs, routings of benches,
// the log.
#include "moekit/tools.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>

#include "api/bench_routing.h"
#include "base/log.h"
#include "moekit/bench.h"
#include "moekit/error.h"
#include "moekit/problems.h"
#include "support/error_code.h"

namespace moekit {
namespace {

using test::code_of;

constexpr const char* kSmall = "E=8,k=3,H=64,I=32,shared_I=16,act=silu,weights=bf16";

LayerSource small_source() { return synthetic_source(parse_problem(kSmall), 5, 1); }

PlanOptions one_thread() {
  PlanOptions options;
  options.num_threads = 1;
  options.hidden_dtype = DType::bf16;
  return options;
}

TEST(RankedLayer, SameBitsForEveryRankCount) {
  const LayerSource source = small_source();
  const OwnedTensor hidden = random_hidden(7, 64, 1);
  RankedOutputs one, many;
  RankedLayer(source, one_thread(), 1, 7).run({.hidden = hidden.view}, one);
  for (int ranks : {2, 3, 8, 13}) {
    RankedLayer(source, one_thread(), ranks, 7).run({.hidden = hidden.view}, many, 2, 1);
    EXPECT_EQ(one.output, many.output) << ranks << " ranks";
    EXPECT_EQ(one.topk_ids, many.topk_ids);
    EXPECT_EQ(one.router_logits, many.router_logits);
    EXPECT_EQ(many.time_us.size(), 2u);
  }
}

TEST(RankedLayer, ARankThatFailsIsNamedAndNobodyHangs) {
  const LayerSource source = small_source();
  const RankedLayer layer(source, one_thread(), 4, 8);
  const OwnedTensor hidden = random_hidden(8, 64, 1);
  std::vector<int32_t> ids(24);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 8);
  ids[5 * 3 + 1] = 8;  // token 5 lies on rank 2
  const std::vector<float> weights(24, 0.25f);
  RankedInputs inputs{.hidden = hidden.view};
  inputs.topk_ids = TensorView::contiguous(ids.data(), DType::i32, {8, 3});
  inputs.topk_weights = TensorView::contiguous(weights.data(), DType::f32, {8, 3});
  RankedOutputs outputs;
  try {
    layer.run(inputs, outputs);
    FAIL() << "an id beyond the experts was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("rank 2"), std::string::npos) << e.what();
  }
}

TEST(RankedLayer, RefusesRanksAndTokensOutOfRange) {
  const LayerSource source = small_source();
  for (int ranks : {0, -1, 1025}) {
    EXPECT_EQ(code_of([&] { RankedLayer(source, one_thread(), ranks, 4); }),
              ErrorCode::invalid_argument);
  }
  const RankedLayer layer(source, one_thread(), 1, 4);
  const OwnedTensor hidden = random_hidden(5, 64, 1);
  RankedOutputs outputs;
  EXPECT_EQ(code_of([&] { layer.run({.hidden = hidden.view}, outputs); }),
            ErrorCode::invalid_argument);
}

TEST(Compare, CountsRowByRowInDoublePrecision) {
  const std::vector<float> reference = {3, 4, 0, 0, 1, 0};
  const std::vector<float> same = reference;
  const Errors none = compare(same.data(), reference.data(), 3, 2);
  EXPECT_EQ(none.max_abs, 0);
  EXPECT_EQ(none.worst_row_rms, 0);
  const std::vector<float> off = {3, 4.5f, 0, 0, 1, 0.25f};
  const Errors errors = compare(off.data(), reference.data(), 3, 2);
  EXPECT_EQ(errors.max_abs, 0.5);
  EXPECT_EQ(errors.worst_row, 2);
  EXPECT_DOUBLE_EQ(errors.worst_row_rms, 0.25);
  EXPECT_DOUBLE_EQ(errors.rel_rms, std::sqrt(0.25 + 0.0625) / std::sqrt(26.0));
}

TEST(Compare, AnExactZeroRowAllowsNoError) {
  const std::vector<float> zero = {0, 0}, tiny = {0, 1e-30f};
  EXPECT_TRUE(std::isinf(compare(tiny.data(), zero.data(), 1, 2).worst_row_rms));
}

TEST(Compare, ValuesThatAreNotFiniteMustBeTheSame) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> reference = {nan, inf, -inf, 1};
  EXPECT_EQ(compare(reference.data(), reference.data(), 1, 4).nonfinite_mismatches, 0);
  const std::vector<float> other = {1, nan, inf, inf};
  EXPECT_EQ(compare(other.data(), reference.data(), 1, 4).nonfinite_mismatches, 4);
  EXPECT_EQ(compare(reference.data(), reference.data(), 1, 4).nonfinite_row, -1);
  EXPECT_EQ(compare(other.data(), reference.data(), 2, 2).nonfinite_row, 0);
}

TEST(Stats, CountsWhatIsNotFiniteApart) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const OutputStats stats = stats_of({3, -4, nan, inf, -inf});
  EXPECT_EQ(stats.nan_count, 1);
  EXPECT_EQ(stats.inf_count, 2);
  EXPECT_EQ(stats.max_abs, 4);
  EXPECT_DOUBLE_EQ(stats.rms, std::sqrt(12.5));
}

TEST(CheckLayer, HoldsEveryMemberToTheReference) {
  const LayerSource source = small_source();
  const OwnedTensor hidden = random_hidden(5, 64, 2);
  for (DType combine : {DType::f32, DType::bf16}) {
    PlanOptions options = one_thread();
    options.activations = ActivationFormat::f32;
    options.combine_dtype = combine;
    const auto results = check_layer(source, options, 2, {.hidden = hidden.view}, {});
    int supported = 0;
    for (const CheckResult& result : results) {
      supported += result.supported;
      EXPECT_EQ(result.supported, result.reasons.empty()) << result.backend;
      if (!result.supported) continue;
      EXPECT_TRUE(result.passed) << result.backend << ' ' << result.errors.worst_row_rms;
    }
    EXPECT_GE(supported, 2);
  }
}

TEST(CheckLayer, JudgesGoldenRows) {
  const LayerSource source = small_source();
  const OwnedTensor hidden = random_hidden(5, 64, 2);
  PlanOptions options = one_thread();
  options.backend = "ref";
  RankedOutputs outputs;
  RankedLayer(source, options, 1, 5).run({.hidden = hidden.view}, outputs);
  const TensorView golden = TensorView::contiguous(outputs.output.data(), DType::f32, {5, 64});
  auto passed = [&] {
    return check_layer(source, options, 1, {.hidden = hidden.view}, golden).at(0).passed;
  };
  EXPECT_TRUE(passed());
  for (int i = 0; i < 64; ++i) outputs.output[2 * 64 + static_cast<size_t>(i)] *= 1.1f;
  EXPECT_FALSE(passed());
}

TEST(Problems, TextAndValuesAgree) {
  LayerProblem problem = parse_problem("mixtral-8x7b:weights=nvfp4,tokens=32,routing=zipf:1.5");
  EXPECT_EQ(problem.tokens, 32);
  EXPECT_EQ(parse_problem(spec_of(problem)).config.gate_up_weights, problem.config.gate_up_weights);
  problem.routing = "/some/file.npy";
  EXPECT_EQ(spec_of(problem).find("file"), std::string::npos);
  for (const auto& [name, spec] : list_problems()) {
    EXPECT_EQ(spec_of(parse_problem(spec)), spec) << name;
  }
}

TEST(ExplainPlan, StatesTheBytesOfTheLayerThatRuns) {
  const std::string shape = "E=8,k=3,H=128,I=64,act=silu";
  for (const char* rest : {",weights=bf16", ",weights=nvfp4", ",weights=mxfp4,shared_I=32",
                           ",weights=int4_g32", ",weights=fp8_block",
                           ",weights=int8_channel,latent=64", ",weights=nvfp4,activations=nvfp4"}) {
    const LayerProblem problem = parse_problem(shape + rest);
    const LayerSource made = synthetic_source(problem, 5, 1);
    for (const int ranks : {1, 2}) {
      const PlanSummary planned = explain_plan(hollow_source(problem), one_thread(), ranks, 4).plan;
      const RankedLayer layer(made, one_thread(), ranks, 4 * ranks);
      const PlanSummary& real = layer.explanation().plan;
      EXPECT_EQ(planned.weights_bytes, real.weights_bytes) << rest;
      EXPECT_EQ(planned.workspace_bytes, real.workspace_bytes) << rest;
      EXPECT_EQ(planned.wire_bytes, real.wire_bytes) << rest;
    }
  }
}

TEST(BenchRoutings, OneRankStaysOnItsExperts) {
  const api::RoutingShape shape{16, 2, 8, {1, 4, 6}};
  for (const auto& routing : api::make_routings("one_rank", shape, 3, 4)) {
    EXPECT_EQ(routing.ids.size(), 32u);
    for (int32_t id : routing.ids) EXPECT_TRUE(id == 1 || id == 4 || id == 6) << id;
  }
  EXPECT_EQ(api::count_active({3, -1, 3, 0}, 8), 2);
  EXPECT_EQ(code_of([&] { api::make_routings("/no/such/file.npy", shape, 3, 4); }),
            ErrorCode::invalid_argument);
}

TEST(Bench, PointsAreConsistent) {
  BenchRequest request;
  request.source = small_source();
  request.options = one_thread();
  request.tokens = {1, 4};
  request.min_seconds = 0;
  std::vector<BenchPoint> points;
  run_bench(request, [&](const BenchPoint& p) { points.push_back(p); });
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(points[1].flops, 4 * 3 * 3 * 2.0 * 64 * 32);
  for (const BenchPoint& p : points) {
    EXPECT_GE(p.repeat, 5);
    EXPECT_LE(p.p5_us, p.median_us);
    EXPECT_LE(p.median_us, p.p95_us);
    EXPECT_GT(p.floor_us, 0);
    EXPECT_EQ(p.weights_bytes, p.active_experts * 3 * 64 * 32 * 2);
  }
}

TEST(Log, IsSilentUntilAskedAndKeepsTheFile) {
  EXPECT_FALSE(log::enabled(log::Level::warning));
  const auto path = std::filesystem::temp_directory_path() / "moekit_tools_test.log";
  std::filesystem::remove(path);
  configure_log({.console = LogLevel::off, .file = path.string()});
  log::debug("packed {} experts", 8);
  configure_log({});
  log::debug("nobody listens");
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_NE(text.find("packed 8 experts"), std::string::npos);
  EXPECT_EQ(text.find("nobody"), std::string::npos);
  std::filesystem::remove(path);
  EXPECT_EQ(code_of([] { configure_log({.console = LogLevel::off, .file = "/nowhere/x.log"}); }),
            ErrorCode::invalid_argument);
  EXPECT_FALSE(std::filesystem::exists("/nowhere"));
}

}  // namespace
}  // namespace moekit
