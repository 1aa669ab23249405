// bench and profile on a GPU, with a fake plug-in whose times nobody measures: launch i of a graph
// takes 1000 + i us, memory gives 1000 GB/s.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "moekit/bench.h"
#include "moekit/error.h"
#include "moekit/trace.h"
#include "support/error_code.h"
#include "tests/cpu/cuda_plugin/fake_plugin.h"

namespace moekit::test {
namespace {

constexpr const char* kSmall = "E=8,k=2,H=64,I=96,tokens=8";
constexpr double kExpertBytes = 3 * 64 * 96 * 2;

BenchRequest request_of(const std::string& spec, std::vector<int64_t> tokens) {
  BenchRequest request;
  request.source = make_layer(spec);
  request.options = gpu_options();
  request.tokens = std::move(tokens);
  return request;
}

std::vector<BenchPoint> points_of(const BenchRequest& request) {
  std::vector<BenchPoint> points;
  run_bench(request, [&](const BenchPoint& p) { points.push_back(p); });
  return points;
}

TEST_F(CudaPlugin, BenchTimesOneGraphAPoint) {
  const std::vector<BenchPoint> points = points_of(request_of(kSmall, {1, 8, 24}));
  ASSERT_EQ(points.size(), 3u);
  // As many copies as are ever made: eight of them were less than an L2 of a real GPU.
  EXPECT_EQ(fake().uploads, 32 * 8);
  EXPECT_EQ(fake().workspaces, 32);
  EXPECT_EQ(fake().graphs, 3);
  EXPECT_EQ(fake().probes, 3);
  EXPECT_EQ(fake().device_runs, 3 * (32 + 32));  // each call once untimed, once captured
  EXPECT_EQ(fake().runs, 0);
  EXPECT_EQ(fake().stream, &fake());
  EXPECT_EQ(fake().allocations, 3 * 32 * 4);
  for (const BenchPoint& p : points) {
    ASSERT_TRUE(p.gpu);
    EXPECT_EQ(p.gpu->device, "fake GPU");
    EXPECT_EQ(p.gpu->calls, 32);
    EXPECT_EQ(p.gpu->copies, 32);
    EXPECT_EQ(p.gpu->knobs, p.tokens <= 8 ? "chain=decode" : "chain=split");
    EXPECT_EQ(p.plan.backend, "sm90");
    EXPECT_EQ(p.repeat, 25);
    EXPECT_DOUBLE_EQ(p.median_us, 1012.0 / 32);
    EXPECT_DOUBLE_EQ(p.p5_us, 1001.0 / 32);
    EXPECT_DOUBLE_EQ(p.p95_us, 1023.0 / 32);
    EXPECT_EQ(p.weights_bytes, p.active_experts * kExpertBytes);
    EXPECT_EQ(p.activations_bytes, static_cast<double>(p.tokens * 64 * (2 + 2)));
    EXPECT_EQ(p.flops, static_cast<double>(p.tokens * 2 * 3 * 2 * 64 * 96));
    EXPECT_EQ(p.probe.bandwidth_gbs, 1000.0);
    EXPECT_EQ(p.probe.matrix_tflops, 780.0);
    EXPECT_NE(p.probe.matrix_source.find("assumed for 90a"), std::string::npos);
    EXPECT_DOUBLE_EQ(p.floor_us, 3.0 + p.total_bytes() / 1e6);
    EXPECT_GT(p.gpu->rel_rms, 0.0);
    EXPECT_LT(p.gpu->rel_rms, 0.01);
    EXPECT_TRUE(p.cold);
  }
  // Call i takes copy i, so that each copy's experts are those of one call.
  EXPECT_EQ(points[0].active_experts, 2.0);
  EXPECT_EQ(static_cast<double>(points[0].working_set_bytes), 32 * 2 * kExpertBytes);
}

TEST_F(CudaPlugin, BenchTakesTheCopiesThatFit) {
  const BenchRequest request = request_of(kSmall, {1});
  const Explanation plan = explain_plan(request.source, request.options, 1, 1);
  const int64_t one = plan.plan.weights_bytes + 1 * 64 * 4;  // and the fake's workspace
  fake().free_bytes = 4 * one;
  const BenchPoint three = points_of(request).front();
  EXPECT_EQ(three.gpu->copies, 3);  // 0.85 of what is free
  EXPECT_EQ(three.gpu->calls, 16);
  EXPECT_DOUBLE_EQ(three.median_us, 1012.0 / 16);
  EXPECT_EQ(fake().uploads, 3 * 8);
  fake().free_bytes = one - 1;
  std::string text;
  EXPECT_EQ(code_of([&] { points_of(request); }, &text), ErrorCode::out_of_memory);
  EXPECT_NE(text.find(std::to_string(one - 1) + " are free"), std::string::npos) << text;
  EXPECT_EQ(fake().uploads, 3 * 8);
}

TEST_F(CudaPlugin, BenchOfOneCopyThatTheCacheHoldsIsNotCold) {
  BenchRequest request = request_of("E=2,k=1,H=32,I=32,tokens=1", {1});
  fake().free_bytes = 2 * 3 * 32 * 32 * 2 + 8192;
  const BenchPoint p = points_of(request).front();
  EXPECT_EQ(p.gpu->copies, 1);
  EXPECT_FALSE(p.cold);
  EXPECT_LT(p.working_set_bytes, p.gpu->cache_bytes);
}

TEST_F(CudaPlugin, BenchDoesNotTimeWrongRows) {
  fake().off_by = 0.5;
  std::string text;
  EXPECT_EQ(code_of([&] { points_of(request_of(kSmall, {4})); }, &text), ErrorCode::internal);
  EXPECT_NE(text.find("sm90 at 4 tokens"), std::string::npos) << text;
  EXPECT_EQ(fake().graphs, 0);
}

TEST_F(CudaPlugin, BenchTakesEveryFormatThatAMemberTakes) {
  for (const char* spec :
       {"E=4,k=2,H=64,I=64,weights=nvfp4,activations=nvfp4", "E=4,k=2,H=96,I=64,weights=mxfp4",
        "E=4,k=2,H=64,I=64,weights=f32,activations=f32",
        "E=4,k=2,H=128,I=128,weights=fp8_block,activations=fp8_block,bias=1",
        "E=4,k=2,H=64,I=64,act=swiglu_oai,bias=1,shared_I=32"}) {
    const BenchPoint p = points_of(request_of(spec, {5})).front();
    EXPECT_DOUBLE_EQ(p.median_us, 1012.0 / p.gpu->calls) << spec;
    EXPECT_GT(p.gpu->rel_rms, 0.0) << spec;
  }
  // Rows come out of the latent space's projection: f32 where the experts quantize them themselves.
  const char* const latent = "E=4,k=2,H=96,I=64,latent=32,act=relu2";
  const BenchPoint bf16 = points_of(request_of(latent, {5})).front();
  EXPECT_EQ(bf16.activations_bytes, 5 * 32 * (2 + 2));
  EXPECT_EQ(bf16.gpu->rel_rms, -1.0);
  EXPECT_STREQ(fake().row_type, "bf16");
  const BenchPoint fp8 =
      points_of(request_of(std::string(latent) + ",weights=fp8_channel,activations=fp8_token", {5}))
          .front();
  EXPECT_EQ(fp8.activations_bytes, 5 * 32 * (4 + 2));
  EXPECT_STREQ(fake().row_type, "f32");
}

TEST_F(CudaPlugin, RatesOfMatrixUnitsAreAssumedAndSaySo) {
  const auto probe_of = [](int arch, const std::string& formats) {
    fake().arch_number = arch;
    return points_of(request_of("E=4,k=2,H=128,I=128" + formats, {1})).front();
  };
  const std::string fp8 = ",weights=fp8_block,activations=fp8_block";
  EXPECT_EQ(probe_of(90, fp8).probe.matrix_tflops, 1400.0);
  EXPECT_EQ(probe_of(90, ",weights=mxfp4").probe.matrix_tflops, 780.0);
  EXPECT_EQ(probe_of(100, "").probe.matrix_tflops, 2250.0);
  EXPECT_EQ(probe_of(80, fp8).probe.matrix_tflops, 312.0);
  for (const BenchPoint& none : {probe_of(86, ""), probe_of(90, ",weights=f32,activations=f32")}) {
    EXPECT_EQ(none.probe.matrix_tflops, 0.0);
    EXPECT_NE(none.probe.matrix_source.find("no rate is assumed"), std::string::npos);
    EXPECT_DOUBLE_EQ(none.floor_us, 3.0 + none.total_bytes() / 1e6);
  }
}

TEST_F(CudaPlugin, BenchSaysWhatItCannotTime) {
  using enum ErrorCode;
  std::string text;
  const auto refused = [&](ErrorCode code, const char* part, auto&& edit) {
    BenchRequest request = request_of(kSmall, {1});
    edit(request);
    EXPECT_EQ(code_of([&] { points_of(request); }, &text), code) << part;
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  refused(unsupported, "leave --include out", [](BenchRequest& r) { r.include_router = true; });
  refused(unsupported, "leave --include out", [](BenchRequest& r) { r.include_shared = true; });
  refused(unsupported, "got 2 ranks", [](BenchRequest& r) { r.num_ranks = 2; });
  refused(unsupported, "the exchange alone", [](BenchRequest& r) {
    r.num_ranks = 2;
    r.exchange_only = true;
  });
  refused(invalid_argument, "90a", [](BenchRequest& r) { r.options.arch = "90a"; });
  refused(unsupported, "int4_group", [](BenchRequest& r) {
    r.source = make_layer("E=4,k=2,H=64,I=64,weights=int4_g32");
    r.options.backend = "sm90";
  });
  EXPECT_EQ(fake().graphs, 0);
  EXPECT_EQ(fake().uploads, 0);
}

/// A peer with our own rows, by way of the reference.
class GraphPeer : public BenchPeer {
 public:
  GraphPeer(LayerSource source, bool has_graphs, double dense)
      : source_(std::move(source)), has_graphs_(has_graphs), dense_(dense) {}
  std::string name() const override { return "graphs"; }
  void open(const PeerLayer& layer) override { device = layer.device; }
  void add_expert(int64_t, const PeerExpert&) override {}
  void set_copies(int count) override { copies = count; }
  void set_calls(std::span<const PeerCall> calls) override {
    calls_.assign(calls.begin(), calls.end());
  }
  void run(std::span<float> output) override {
    PlanOptions options = options_for("ref");
    options.hidden_dtype = DType::bf16;
    const PeerCall& call = calls_.front();
    RankedInputs in;
    in.hidden = call.hidden;
    in.topk_ids = call.topk_ids;
    in.topk_weights = call.topk_weights;
    RankedOutputs out;
    RankedLayer(source_, options, 1, call.hidden.shape[0]).run(in, out);
    std::copy(out.output.begin(), out.output.end(), output.begin());
  }
  std::vector<double> time(std::span<const PeerTurn>) override {
    ADD_FAILURE() << "a GPU is not timed call by call";
    return {1.0};
  }
  std::vector<double> time_graph(std::span<const PeerTurn> graph, int untimed, int timed) override {
    turns.assign(graph.begin(), graph.end());
    EXPECT_EQ(untimed, 3);
    EXPECT_EQ(timed, 25);
    if (!has_graphs_) return {};
    return {70.0, 50.0, 60.0};
  }
  double dense_tflops(bool fp8) override {
    asked_fp8 = fp8;
    if (dense_ < 0) throw Error(ErrorCode::unsupported, "no such product");
    return dense_;
  }
  PeerIdentity identity() const override { return {"1.0", "bf16", "reference"}; }

  Device device;
  int copies = 0;
  std::vector<PeerTurn> turns;
  std::optional<bool> asked_fp8;

 private:
  LayerSource source_;
  bool has_graphs_;
  double dense_;
  std::vector<PeerCall> calls_;
};

TEST_F(CudaPlugin, PeersAreTimedInGraphsToo) {
  BenchRequest request = request_of(kSmall, {3});
  const auto good = std::make_shared<GraphPeer>(request.source, true, 0.01);
  const auto slow = std::make_shared<GraphPeer>(request.source, false, 7.0);
  request.peers = {good, slow};
  const BenchPoint p = points_of(request).front();
  ASSERT_EQ(p.peers.size(), 2u);
  EXPECT_EQ(p.peers[0].reason, "");
  EXPECT_EQ(p.peers[0].median_us, 60.0);
  EXPECT_EQ(p.peers[0].p5_us, 50.0);
  EXPECT_EQ(p.peers[0].repeat, 3);
  EXPECT_LT(p.peers[0].rel_rms, 5.0 / 256);
  EXPECT_NE(p.peers[1].reason.find("does not run on a GPU"), std::string::npos);
  EXPECT_EQ(good->device.type, DeviceType::cuda);
  EXPECT_EQ(good->copies, p.gpu->copies);
  ASSERT_EQ(static_cast<int>(good->turns.size()), p.gpu->calls);
  for (int i = 0; i < p.gpu->calls; ++i) {
    EXPECT_EQ(good->turns[static_cast<size_t>(i)].call, i);
    EXPECT_EQ(good->turns[static_cast<size_t>(i)].copy, i % p.gpu->copies);
  }
  // The first one's rate is the roof of products, which here take longer than the bytes.
  EXPECT_EQ(p.probe.matrix_tflops, 0.01);
  EXPECT_NE(p.probe.matrix_source.find("graphs bf16 8192^3"), std::string::npos);
  EXPECT_DOUBLE_EQ(p.floor_us, p.flops / 1e4);
  EXPECT_EQ(good->asked_fp8, false);
  EXPECT_EQ(slow->asked_fp8, std::nullopt);
}

TEST_F(CudaPlugin, APeerWithoutADenseRateLeavesTheAssumption) {
  BenchRequest request =
      request_of("E=4,k=2,H=128,I=128,weights=fp8_block,activations=fp8_block", {1});
  const auto peer = std::make_shared<GraphPeer>(request.source, true, -1.0);
  request.peers = {peer};
  const BenchPoint p = points_of(request).front();
  EXPECT_EQ(peer->asked_fp8, true);
  EXPECT_EQ(p.probe.matrix_tflops, 1400.0);
}

TEST_F(CudaPlugin, ProfilesShowTheStepsOfTheGpu) {
  PlanOptions options = gpu_options();
  options.trace = Trace(256);
  const LayerSource source = make_layer(kSmall);
  const RankedLayer layer(source, options, 1, 4);
  const OwnedTensor hidden = random_hidden(4, 64, 3);
  RankedInputs in;
  in.hidden = hidden.view;
  RankedOutputs out;
  layer.run(in, out);  // not recorded
  options.trace.start();
  layer.run(in, out, 3);
  options.trace.stop();
  std::vector<std::string> on_gpu;
  for (const StageTime& time : options.trace.summary()) {
    if (!time.on_gpu) continue;
    on_gpu.push_back(time.stage);
    EXPECT_TRUE(time.nested);
    EXPECT_EQ(time.spans, 3);
    EXPECT_NEAR(time.total_us, 0.03, 1e-9);
  }
  EXPECT_EQ(on_gpu, (std::vector<std::string>{"copy to device", "index", "quantize", "gemm1",
                                              "gemm2", "sum slots", "copy from device"}));
  const nlohmann::json trace = nlohmann::json::parse(options.trace.to_json());
  int track = -1;
  double begin = -1, end = -1;
  int inside = 0;
  for (const auto& e : trace["traceEvents"]) {
    if (e["name"] == "thread_name" && e["args"]["name"] == "GPU") track = e["tid"].get<int>();
    if (e["name"] == "experts" && begin < 0) {
      begin = e["ts"].get<double>();
      end = begin + e["dur"].get<double>();
    }
  }
  ASSERT_GT(track, 0);
  for (const auto& e : trace["traceEvents"]) {
    if (e["ph"] != "X" || e["tid"] != track) continue;
    EXPECT_EQ(e["args"]["tokens"], 4);
    const double at = e["ts"].get<double>();
    // Microseconds with three digits: what rounding may move an edge by.
    inside += at >= begin - 0.002 && at + e["dur"].get<double>() <= end + 0.002;
  }
  EXPECT_EQ(inside, 7);
  // Without a trace nobody asks for steps, and calls on the CPU have no such track.
  PlanOptions on_cpu = options_for("cpu");
  on_cpu.trace = Trace(256);
  const RankedLayer other(source, on_cpu, 1, 4);
  on_cpu.trace.start();
  other.run(in, out);
  on_cpu.trace.stop();
  EXPECT_EQ(on_cpu.trace.to_json().find("\"GPU\""), std::string::npos);
}

}  // namespace
}  // namespace moekit::test
