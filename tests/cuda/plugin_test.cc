// The plug-in on a real GPU through the public API: every member that takes a layer against the
// CPU's reference, and tensors on the device against tensors on the host.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/check.h"
#include "device/cuda/tools.h"
#include "moekit/bench.h"
#include "moekit/layer.h"
#include "moekit/trace.h"
#include "problem/error_bound.h"
#include "support/run_layer.h"
#include "tests/cuda/gpu.h"

namespace moekit::testing {
namespace {

class PluginTest : public ::testing::Test {
 protected:
  /// A variable that is set names the plug-in of a program that was moved.
  static void SetUpTestSuite() { setenv("MOEKIT_CUDA_PLUGIN", MOEKIT_CUDA_PLUGIN_FILE, 0); }
};

PlanOptions gpu_options(const std::string& backend) {
  PlanOptions options = test::options_for(backend);
  options.device.type = DeviceType::cuda;
  options.combine_dtype = DType::bf16;
  options.batch_invariant = false;
  options.hidden_dtype = DType::bf16;
  return options;
}

TEST_F(PluginTest, MembersHaveTheReferencesValues) {
  MOEKIT_NEEDS_GPU(80);
  const char* const specs[] = {
      "E=8,k=2,H=64,I=96,tokens=8",
      "E=8,k=2,H=256,I=160,tokens=8,bias=1",
      "E=6,k=3,H=256,I=384,tokens=8,weights=fp8_block,activations=fp8_block",
      "E=6,k=2,H=160,I=288,tokens=8,weights=fp8_block,activations=fp8_block,bias=1",
      "E=4,k=2,H=64,I=64,tokens=8,act=swiglu_oai,bias=1,shared_I=32",
      "E=4,k=2,H=96,I=64,latent=32,tokens=8,act=relu2",
      "E=4,k=2,H=64,I=64,tokens=8,weights=nvfp4,activations=nvfp4",
      "E=4,k=2,H=96,I=64,tokens=8,weights=mxfp4",
      "E=8,k=4,H=224,I=160,tokens=8,weights=mxfp4,act=swiglu_oai,bias=1",
      "E=4,k=2,H=2880,I=160,tokens=8,weights=mxfp4,act=swiglu_oai,bias=1",
      "E=6,k=2,H=256,I=384,tokens=8,weights=nvfp4",
      "E=6,k=2,H=160,I=96,tokens=8,weights=nvfp4,act=relu2",
      "E=6,k=3,H=96,I=352,tokens=8,weights=nvfp4,act=gelu_tanh@4,bias=down",
      "E=6,k=2,H=256,I=384,tokens=8,weights=mxfp8",
      "E=6,k=3,H=288,I=32,tokens=8,weights=mxfp8,bias=1",
      "E=4,k=2,H=64,I=64,tokens=8,weights=mxfp8_e5m2,activations=mxfp8",
      "E=4,k=2,H=64,I=48,tokens=8,weights=fp8_channel,activations=fp8_token",
      "E=4,k=2,H=64,I=48,tokens=8,weights=f32,activations=f32",
  };
  int ran = 0;
  for (const char* spec : specs) {
    const LayerSource layer = test::make_layer(spec);
    PlanOptions on_cpu = test::options_for("ref");
    on_cpu.hidden_dtype = DType::bf16;
    for (const int64_t tokens : {0, 1, 7, 700}) {
      const std::vector<float> rows = test::make_rows(layer, tokens);
      const std::vector<float> reference = test::run_layer(layer, on_cpu, 1, rows);
      for (const char* backend : {"sm90", "cuda_decode", "cuda_ref"}) {
        const PlanOptions options = gpu_options(backend);
        if (!explain_plan(layer, options, 1, std::max<int64_t>(tokens, 1)).chosen) continue;
        ++ran;
        const std::vector<float> got = test::run_layer(layer, options, 1, rows);
        ASSERT_EQ(got.size(), reference.size());
        if (tokens == 0) continue;
        EXPECT_LE(test::worst_row(got, reference, layer.config.hidden),
                  gpu_row_error_bound(layer.config, DType::bf16))
            << backend << " " << spec << ", " << tokens << " tokens";
      }
    }
  }
  EXPECT_GT(ran, 80);
}

TEST_F(PluginTest, TensorsOnTheDeviceHaveTheHostsValues) {
  MOEKIT_NEEDS_GPU(80);
  const int64_t tokens = 5, hidden = 128, top_k = 2;
  for (const auto& [backend, format] : {std::pair{"sm90", "bf16"},
                                        {"cuda_decode", "bf16"},
                                        {"cuda_ref", "bf16"},
                                        {"sm90", "mxfp4"},
                                        {"cuda_decode", "nvfp4"},
                                        {"sm90", "mxfp8"}}) {
    const LayerSource source =
        test::make_layer(std::string("E=8,k=2,H=128,I=96,tokens=8,weights=") + format);
    PlanOptions options = gpu_options(backend);
    options.max_tokens = 8;
    if (!explain_plan(source, options, 1, 8).chosen) continue;
    const Layer layer = Layer::from_canonical(source.canonical, options);
    Random random(5);
    const std::vector<uint16_t> x = random_bf16(tokens * hidden, 1.0f, random);
    const std::vector<int32_t> ids{0, 3, 7, -1, 2, 2, 5, 6, 1, 4};
    const std::vector<float> weights{0.5f,   0.25f, 1.0f, 0.0f,  0.5f,
                                     0.125f, 1.0f,  0.5f, 0.25f, 2.0f};
    std::vector<uint16_t> host(x.size());
    LayerArgs args;
    args.hidden = TensorView::contiguous(x.data(), DType::bf16, {tokens, hidden});
    args.output = TensorView::contiguous(host.data(), DType::bf16, {tokens, hidden});
    args.topk_ids = TensorView::contiguous(ids.data(), DType::i32, {tokens, top_k});
    args.topk_weights = TensorView::contiguous(weights.data(), DType::f32, {tokens, top_k});
    layer.run(args);
    const DeviceArray<uint16_t> dx(x), out(x.size());
    const DeviceArray<int32_t> dids(ids);
    const DeviceArray<float> dweights(weights);
    args.hidden.data = dx.data();
    args.output.data = out.data();
    args.topk_ids.data = dids.data();
    args.topk_weights.data = dweights.data();
    for (TensorView* v : {&args.hidden, &args.output, &args.topk_ids, &args.topk_weights})
      v->device.type = DeviceType::cuda;
    const device::Stream stream;
    layer.run(args, stream.get());
    stream.synchronize();
    EXPECT_EQ(out.get(), host) << backend << " " << format;
  }
}

/// The chain for few tokens and the one for any number take turns in one workspace.
TEST_F(PluginTest, CallsOfAnySizeFollowEachOther) {
  MOEKIT_NEEDS_GPU(90);
  const int64_t hidden = 256, top_k = 2, most = 96;
  for (const char* format : {"bf16", "mxfp4"}) {
    const LayerSource source =
        test::make_layer(std::string("E=8,k=2,H=256,I=160,tokens=8,weights=") + format);
    PlanOptions options = gpu_options("sm90");
    options.max_tokens = most;
    options.batch_invariant = false;
    PlanOptions on_cpu = test::options_for("ref");
    on_cpu.hidden_dtype = DType::bf16;
    on_cpu.max_tokens = most;
    const Layer layer = Layer::from_canonical(source.canonical, options);
    const Layer reference = Layer::from_canonical(source.canonical, on_cpu);
    Random random(9);
    const std::vector<uint16_t> x = random_bf16(most * hidden, 1.0f, random);
    std::vector<int32_t> ids(most * top_k);
    for (auto& id : ids) id = static_cast<int32_t>(random.below(8));
    const std::vector<float> weights(ids.size(), 0.5f);
    for (const int64_t tokens : {3, 96, 8, 40, 1, 96}) {
      LayerArgs args;
      args.hidden = TensorView::contiguous(x.data(), DType::bf16, {tokens, hidden});
      args.topk_ids = TensorView::contiguous(ids.data(), DType::i32, {tokens, top_k});
      args.topk_weights = TensorView::contiguous(weights.data(), DType::f32, {tokens, top_k});
      std::vector<float> got(tokens * hidden), expected(got.size());
      args.output = TensorView::contiguous(got.data(), DType::f32, {tokens, hidden});
      layer.run(args);
      args.output = TensorView::contiguous(expected.data(), DType::f32, {tokens, hidden});
      reference.run(args);
      EXPECT_LE(test::worst_row(got, expected, hidden),
                gpu_row_error_bound(source.config, DType::bf16))
          << format << ", " << tokens << " tokens";
    }
  }
}

TEST_F(PluginTest, GraphsReplayWhatTheyCapture) {
  MOEKIT_NEEDS_GPU(80);
  const device::GpuTools& tools = device::cuda_tools();
  const std::vector<int32_t> host{1, 2, 3, 4};
  const auto from = tools.allocate(0, 16), to = tools.allocate(0, 16);
  from->upload(host.data(), 16);
  int captured = 0;
  const auto enqueue = [&](void* stream) {
    ++captured;
    device::check_cuda(cudaMemcpyAsync(to->data(), from->data(), 16, cudaMemcpyDeviceToDevice,
                                       static_cast<cudaStream_t>(stream)),
                       "copy");
  };
  const std::vector<double> times = tools.time_graph(0, {.untimed = 2, .timed = 7}, enqueue);
  EXPECT_EQ(captured, 1);
  ASSERT_EQ(times.size(), 7u);
  EXPECT_GT(*std::min_element(times.begin(), times.end()), 0.0);
  std::vector<int32_t> got(4);
  to->download(got.data(), 16);
  EXPECT_EQ(got, host);
  // A capture that fails leaves the device usable.
  const auto broken = [](void*) { fail(ErrorCode::internal, "on purpose"); };
  EXPECT_THROW(tools.time_graph(0, {}, broken), Error);
  EXPECT_EQ(tools.time_graph(0, {.untimed = 0, .timed = 1}, enqueue).size(), 1u);
  EXPECT_GT(tools.free_bytes(0), 0);
  EXPECT_GT(tools.l2_bytes(0), 0);
  EXPECT_GT(tools.read_gbs(0), 0.0);
}

TEST_F(PluginTest, EveryMemberIsBenched) {
  MOEKIT_NEEDS_GPU(80);
  int ran = 0;
  for (const char* spec :
       {"E=8,k=2,H=128,I=128", "E=8,k=2,H=256,I=128,weights=fp8_block,activations=fp8_block",
        "E=4,k=2,H=96,I=64,weights=mxfp4"}) {
    for (const char* backend : {"sm90", "cuda_decode", "cuda_ref"}) {
      BenchRequest request;
      request.source = test::make_layer(spec);
      request.options = gpu_options(backend);
      request.tokens = {1, 8};
      if (!explain_plan(request.source, request.options, 1, 8).chosen) continue;
      run_bench(request, [&](const BenchPoint& p) {
        ++ran;
        EXPECT_EQ(p.repeat, 25) << backend << " " << spec;
        EXPECT_LE(p.p5_us, p.median_us);
        EXPECT_LE(p.median_us, p.p95_us);
        EXPECT_GT(p.p5_us, 0.0);
        EXPECT_GT(p.floor_us, p.gpu->launch_us);
        EXPECT_GT(p.gpu->rel_rms, 0.0);
      });
    }
  }
  EXPECT_GE(ran, 2 * 3);
}

TEST_F(PluginTest, StepsOfACallFollowEachOther) {
  MOEKIT_NEEDS_GPU(80);
  const LayerSource source =
      test::make_layer("E=8,k=2,H=256,I=128,weights=fp8_block,activations=fp8_block");
  for (const char* backend : {"sm90", "cuda_decode", "cuda_ref"}) {
    for (const int64_t tokens : {8, 64, 700}) {
      PlanOptions options = gpu_options(backend);
      options.trace = Trace(1024);
      if (!explain_plan(source, options, 1, tokens).chosen) continue;
      const RankedLayer layer(source, options, 1, tokens);
      const OwnedTensor hidden = random_hidden(tokens, 256, 3);
      RankedInputs in;
      in.hidden = hidden.view;
      RankedOutputs plain, traced;
      layer.run(in, plain);
      options.trace.start();
      layer.run(in, traced, 2);
      options.trace.stop();
      EXPECT_EQ(traced.output, plain.output) << backend;
      std::vector<std::string> steps;
      double on_gpu = 0, experts = 0;
      for (const StageTime& time : options.trace.summary()) {
        if (time.stage == "experts") experts = time.total_us;
        if (!time.on_gpu) continue;
        steps.push_back(time.stage);
        on_gpu += time.total_us;
        EXPECT_GT(time.total_us, 0.0) << time.stage;
      }
      // Decode's products quantize their own rows; sm90 may take it for eight tokens.
      const bool quantizes = std::find(steps.begin(), steps.end(), "quantize") != steps.end();
      if (std::string_view(backend) == "cuda_decode") {
        EXPECT_FALSE(quantizes);
      } else if (std::string_view(backend) == "cuda_ref" || tokens > 8) {
        EXPECT_TRUE(quantizes) << backend;
      }
      for (const char* step :
           {"copy to device", "gemm1", "gemm2", "sum slots", "copy from device"}) {
        EXPECT_NE(std::find(steps.begin(), steps.end(), step), steps.end())
            << backend << " " << step;
      }
      EXPECT_LE(on_gpu, experts) << backend;
    }
  }
}

}  // namespace
}  // namespace moekit::testing
