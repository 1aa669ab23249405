// Everything between the public API and the GPU's kernels, with a fake plug-in in their place:
// plans for a GPU, weights on their way to it, calls with tensors on the host and on the device.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <optional>

#include "engine/synthetic.h"
#include "moekit/checkpoint.h"
#include "moekit/error.h"
#include "moekit/layer.h"
#include "moekit/machine.h"
#include "problem/error_bound.h"
#include "support/error_code.h"
#include "support/problems.h"
#include "support/run_layer.h"
#include "tensor/float_formats.h"
#include "tests/cpu/cuda_plugin/fake_plugin.h"

namespace moekit::test {
namespace {

std::vector<std::string> chains_of(const Explanation& explanation) {
  std::vector<std::string> chains;
  for (const PlanBucket& bucket : explanation.plan.buckets) chains.push_back(bucket.knobs);
  return chains;
}

Explanation explain(const std::string& spec, const PlanOptions& options, int64_t tokens) {
  return explain_plan(make_layer(spec), options, 1, tokens);
}

constexpr const char* kSmall = "E=8,k=2,H=64,I=96,tokens=8";

TEST_F(CudaPlugin, ThePlanIsForTheGpuThatIsHere) {
  const Explanation e = explain(kSmall, gpu_options(), 512);
  ASSERT_TRUE(e.chosen);
  EXPECT_EQ(e.plan.backend, "sm90");
  EXPECT_EQ(e.plan.prepare, "local");
  EXPECT_EQ(e.plan.summer, "experts");
  EXPECT_EQ(chains_of(e), (std::vector<std::string>{"chain=decode", "chain=decode", "chain=split",
                                                    "chain=split"}));
  // gate, up and down in bf16, each with a global, in steps of 128 bytes.
  EXPECT_EQ(e.plan.weights_bytes, 8 * (3 * 64 * 96 * 2 + 3 * 128));
  EXPECT_GE(e.plan.workspace_bytes, 512 * 64 * 4);
}

TEST_F(CudaPlugin, PlansOfFourAndEightBitsHoldPanels) {
  // Blocks of 64 x 64: one tile of two steps for gate and up, two tiles of one step for down, each
  // with a multiplier, in steps of 128 bytes.
  const std::string base = std::string(kSmall) + ",weights=";
  for (const auto& [format, block] :
       {std::pair{"mxfp4", 2048 + 128}, {"nvfp4", 2048 + 256}, {"mxfp8", 4096 + 128}}) {
    const Explanation e = explain(base + format, gpu_options(), 512);
    ASSERT_TRUE(e.chosen) << format;
    EXPECT_EQ(e.plan.backend, "sm90");
    EXPECT_EQ(e.plan.weight_layout, "cuda_panels");
    EXPECT_EQ(e.plan.weights_bytes, 8 * 3 * (2 * block + 128)) << format;
    EXPECT_EQ(chains_of(e), (std::vector<std::string>{"chain=decode", "chain=decode", "chain=split",
                                                      "chain=split"}));
    // The reference's images are the checkpoint's order.
    EXPECT_EQ(explain(base + format, gpu_options("cuda_ref"), 8).plan.weight_layout, "cuda_images");
  }
}

TEST_F(CudaPlugin, BatchInvarianceKeepsOneChain) {
  PlanOptions options = gpu_options();
  options.batch_invariant = true;
  EXPECT_EQ(chains_of(explain(kSmall, options, 8)),
            (std::vector<std::string>{"chain=split", "chain=split"}));
}

TEST_F(CudaPlugin, OtherGpusTakeOtherMembers) {
  fake().arch_number = 86;
  EXPECT_EQ(explain(kSmall, gpu_options(), 8).plan.backend, "cuda_decode");
  EXPECT_EQ(explain(kSmall, gpu_options(), 9).plan.backend, "cuda_ref");
  fake().arch_number = 75;
  EXPECT_FALSE(explain(kSmall, gpu_options(), 8).chosen);
}

TEST_F(CudaPlugin, WithoutAGpuOnlyANamedOneIsPlannedFor) {
  fake().num_gpus = 0;
  const Explanation none = explain(kSmall, gpu_options(), 8);
  EXPECT_FALSE(none.chosen);
  EXPECT_NE(refusal_of(none, "sm90").find("needs a GPU: none is visible"), std::string::npos);
  PlanOptions named = gpu_options();
  named.arch = "90a";
  EXPECT_EQ(explain(kSmall, named, 8).plan.backend, "sm90");
  named.arch = "120a";
  EXPECT_EQ(explain(kSmall, named, 9).plan.backend, "cuda_ref");
}

TEST_F(CudaPlugin, ANamedGpuIsForExplainOnly) {
  PlanOptions options = gpu_options();
  options.arch = "90a";
  options.max_tokens = 4;
  const LayerSource source = make_layer(kSmall);
  std::string text;
  EXPECT_EQ(code_of([&] { Layer::from_canonical(source.canonical, options); }, &text),
            ErrorCode::invalid_argument);
  EXPECT_NE(text.find("90a"), std::string::npos) << text;
  options.device.type = DeviceType::cpu;
  EXPECT_EQ(code_of([&] { explain_plan(source, options, 1, 4); }), ErrorCode::invalid_argument);
  options = gpu_options();
  options.device.index = 3;
  EXPECT_EQ(code_of([&] { explain_plan(source, options, 1, 4); }, &text),
            ErrorCode::invalid_argument);
  EXPECT_NE(text.find("shows 1"), std::string::npos) << text;
}

using Activations = std::optional<ActivationFormat>;

/// A layer on the fake GPU against the CPU's reference.
void expect_reference(const LayerSource& layer, const std::string& backend, int64_t tokens,
                      Activations activations = {}) {
  const std::vector<float> rows = make_rows(layer, tokens);
  PlanOptions on_cpu = options_for("ref");
  on_cpu.hidden_dtype = DType::bf16;
  on_cpu.activations = activations;
  const std::vector<float> reference = run_layer(layer, on_cpu, 1, rows);
  PlanOptions options = gpu_options(backend);
  options.activations = activations;
  const std::vector<float> got = run_layer(layer, options, 1, rows);
  MoeConfig config = layer.config;
  if (activations) {
    config.gate_up_input = config.down_input = {*activations};
    config.shared.gate_up_input = config.shared.down_input = {*activations};
  }
  EXPECT_LE(worst_row(got, reference, layer.config.hidden),
            gpu_row_error_bound(config, DType::bf16))
      << backend << " " << layer.model;
}

bool takes(const LayerSource& layer, const std::string& backend, int64_t tokens,
           Activations activations = {}) {
  PlanOptions options = gpu_options(backend);
  options.activations = activations;
  return explain_plan(layer, options, 1, tokens).chosen;
}

TEST_F(CudaPlugin, LayersHaveTheReferencesValues) {
  std::vector<std::string> specs = small_problems();
  for (const auto& more :
       {problems_of_every_weight_format(), problems_of_every_activation_format()})
    specs.insert(specs.end(), more.begin(), more.end());
  for (const char* more : {"E=8,k=2,H=64,I=96,tokens=8",
                           "E=6,k=3,H=256,I=160,tokens=8,weights=fp8_block,"
                           "activations=fp8_block,bias=1",
                           "E=4,k=2,H=64,I=64,tokens=8,act=swiglu_oai,bias=1,shared_I=32",
                           "E=4,k=2,H=96,I=64,latent=32,tokens=8,act=relu2",
                           "E=4,k=2,H=64,I=64,tokens=8,weights=nvfp4,activations=nvfp4",
                           "E=4,k=2,H=96,I=160,tokens=8,act=swiglu_oai,bias=1,weights=mxfp4",
                           "E=4,k=2,H=160,I=96,tokens=8,weights=nvfp4",
                           "E=4,k=2,H=96,I=64,tokens=8,act=relu2,weights=nvfp4",
                           "E=4,k=2,H=160,I=224,tokens=8,bias=down,weights=mxfp8",
                           "E=4,k=2,H=64,I=64,tokens=8,weights=mxfp8_e5m2,activations=mxfp8"})
    specs.push_back(more);
  int ran[3] = {};
  for (const std::string& spec : specs) {
    const LayerSource layer = make_layer(spec);
    const char* const backends[] = {"sm90", "cuda_decode", "cuda_ref"};
    for (int i = 0; i < 3; ++i) {
      if (!takes(layer, backends[i], 7)) continue;
      ++ran[i];
      expect_reference(layer, backends[i], 7);
    }
  }
  EXPECT_GE(ran[0], 8);
  EXPECT_GE(ran[1], 8);
  EXPECT_GE(ran[2], 10);
}

/// Runs each layer of tests/fixtures that `backend` takes, and returns their names.
std::vector<std::string> run_fixtures(const std::string& backend, Activations activations = {}) {
  std::vector<std::string> seen;
  for (const auto& entry : std::filesystem::directory_iterator(MOEKIT_FIXTURES)) {
    if (!entry.is_directory()) continue;
    LayerSource layer = open_source(entry.path(), -1);
    layer.model = entry.path().filename();
    if (layer.config.router.hash_routing || !takes(layer, backend, 5, activations)) continue;
    seen.push_back(layer.model);
    expect_reference(layer, backend, 5, activations);
  }
  return seen;
}

void expect_names(const std::vector<std::string>& seen,
                  std::initializer_list<const char*> expected) {
  for (const char* name : expected) {
    EXPECT_NE(std::find(seen.begin(), seen.end(), name), seen.end()) << name;
  }
}

TEST_F(CudaPlugin, CheckpointsInEveryStorageOrderArrive) {
  // Interleaved rows, transposed stacks, scales and globals of three tools.
  expect_names(run_fixtures("cuda_ref"),
               {"gptoss-bf16", "gptoss-mxfp4", "dbrx-bf16", "qwen3moe-ctfree-nvfp4a16",
                "qwen3moe-modelopt-mxfp8", "qwen3moe-hf-fp8-ue8m0", "jamba-f16"});
  expect_names(run_fixtures("sm90"), {"gptoss-bf16", "gptoss-mxfp4", "qwen3moe-ctfree-nvfp4a16",
                                      "qwen3moe-modelopt-w4a16nvfp4"});
}

TEST_F(CudaPlugin, CheckpointsOfFourAndEightBitsArriveInPanels) {
  // With rows in bf16, whatever the checkpoint asks.
  const std::initializer_list<const char*> names = {"gptoss-mxfp4",
                                                    "gptoss-ct-nvfp4a16",
                                                    "gptoss-modelopt-nvfp4",
                                                    "mixtral-ct-nvfp4",
                                                    "deepseekv3-ct-nvfp4",
                                                    "deepseekv3-modelopt-nvfp4",
                                                    "nemotronh-ct-nvfp4",
                                                    "nemotronh-modelopt-nvfp4",
                                                    "qwen3moe-ct-mxfp4",
                                                    "qwen3moe-ct-mxfp8",
                                                    "qwen3moe-ct-nvfp4",
                                                    "qwen3moe-ctfree-nvfp4a16",
                                                    "qwen3moe-modelopt-mxfp4",
                                                    "qwen3moe-modelopt-mxfp8",
                                                    "qwen3moe-modelopt-nvfp4",
                                                    "qwen3moe-modelopt-w4a16nvfp4"};
  for (const char* backend : {"sm90", "cuda_decode"}) {
    expect_names(run_fixtures(backend, ActivationFormat::bf16), names);
  }
}

/// A layer of kSmall on the fake GPU, and one call.
struct Call {
  PlanOptions options;
  Layer layer;
  std::vector<uint16_t> hidden, output;
  std::vector<int32_t> ids{0, 3, 7, -1, 2, 2};
  std::vector<float> weights{0.5f, 0.25f, 1.0f, 0.0f, 0.5f, 0.125f};

  static PlanOptions with_capacity(PlanOptions o) {
    o.max_tokens = 8;
    return o;
  }
  explicit Call(PlanOptions o = gpu_options(), const char* spec = kSmall)
      : options(with_capacity(std::move(o))),
        layer(Layer::from_canonical(make_layer(spec).canonical, options)),
        output(3 * 64, 0xffff) {
    for (float x : engine::make_hidden(3, 64, 5)) hidden.push_back(f32_to_bf16(x));
  }
  LayerArgs args(DeviceType type) {
    LayerArgs a;
    a.hidden = TensorView::contiguous(hidden.data(), DType::bf16, {3, 64});
    a.output = TensorView::contiguous(output.data(), DType::bf16, {3, 64});
    a.topk_ids = TensorView::contiguous(ids.data(), DType::i32, {3, 2});
    a.topk_weights = TensorView::contiguous(weights.data(), DType::f32, {3, 2});
    for (TensorView* v : {&a.hidden, &a.output, &a.topk_ids, &a.topk_weights})
      v->device.type = type;
    return a;
  }
};

TEST_F(CudaPlugin, EachExpertIsUploadedOnce) {
  Call call;
  EXPECT_EQ(fake().uploads, 8);
  EXPECT_EQ(fake().finishes, 1);
  EXPECT_EQ(fake().workspaces, 1);
  const auto more = call.layer.make_workspace();
  EXPECT_EQ(fake().workspaces, 2);
  call.layer.run(call.args(DeviceType::cpu), nullptr, more.get());
  EXPECT_EQ(fake().runs, 1);
  EXPECT_STREQ(fake().knobs, "chain=decode");
  EXPECT_STREQ(fake().row_type, "bf16");
  // f32 rows are rounded before they are copied.
  LayerArgs args = call.args(DeviceType::cpu);
  const std::vector<float> wide = engine::make_hidden(3, 64, 5);
  args.hidden = TensorView::contiguous(wide.data(), DType::f32, {3, 64});
  const std::vector<uint16_t> before = call.output;
  call.layer.run(args);
  EXPECT_STREQ(fake().row_type, "bf16");
  EXPECT_EQ(call.output, before);
}

TEST_F(CudaPlugin, TensorsOnTheDeviceGoStraightToTheKernels) {
  Call call;
  int here = 0;
  call.layer.run(call.args(DeviceType::cpu));
  const std::vector<uint16_t> host = call.output;
  call.output.assign(call.output.size(), 0xffff);
  call.layer.run(call.args(DeviceType::cuda), &here);
  EXPECT_EQ(call.output, host);
  EXPECT_EQ(fake().device_runs, 1);
  EXPECT_EQ(fake().stream, &here);
  EXPECT_STREQ(fake().knobs, "chain=decode");
  // In three steps as well, and with host tensors on a stream.
  PendingCall pending = call.layer.dispatch(call.args(DeviceType::cuda), nullptr);
  EXPECT_TRUE(pending.ready());
  pending.wait();
  EXPECT_EQ(fake().device_runs, 2);
  EXPECT_EQ(fake().stream, nullptr);
  call.layer.run(call.args(DeviceType::cpu), &here);
  EXPECT_EQ(fake().stream, &here);
  LayerArgs none = call.args(DeviceType::cuda);
  none.hidden.shape[0] = none.output.shape[0] = none.topk_ids.shape[0] =
      none.topk_weights.shape[0] = 0;
  call.layer.run(none);
  EXPECT_EQ(fake().device_runs, 2);
}

TEST_F(CudaPlugin, DeviceCallsSayWhatTheyCantDo) {
  Call call;
  std::string text;
  const auto refused = [&](ErrorCode code, const char* part,
                           const std::function<void(LayerArgs&)>& edit) {
    LayerArgs args = call.args(DeviceType::cuda);
    edit(args);
    EXPECT_EQ(code_of([&] { call.layer.run(args); }, &text), code) << part;
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  using enum ErrorCode;
  refused(invalid_argument, "topk_ids", [](LayerArgs& a) { a.topk_ids = a.topk_weights = {}; });
  refused(invalid_argument, "hidden", [](LayerArgs& a) { a.hidden.device.index = 1; });
  refused(invalid_argument, "output", [](LayerArgs& a) { a.output.device = {}; });
  refused(invalid_argument, "bf16", [](LayerArgs& a) { a.hidden.dtype = DType::f16; });
  refused(invalid_argument, "i32", [](LayerArgs& a) { a.topk_ids.dtype = DType::i64; });
  refused(invalid_argument, "contiguous", [](LayerArgs& a) { a.hidden.strides[0] = 65; });
  refused(invalid_argument, "tokens", [](LayerArgs& a) { a.hidden.shape[0] = 9; });
  refused(invalid_argument, "only result", [](LayerArgs& a) { a.out_topk_ids = a.topk_ids; });
  EXPECT_EQ(fake().device_runs, 0);
  Call shared(gpu_options(), "E=8,k=2,H=64,I=96,shared_I=32,tokens=8");
  EXPECT_EQ(code_of([&] { shared.layer.run(shared.args(DeviceType::cuda)); }, &text), unsupported);
  EXPECT_NE(text.find("shared experts"), std::string::npos) << text;
  EXPECT_NO_THROW(shared.layer.run(shared.args(DeviceType::cpu)));
  // The plan on the CPU takes neither.
  Call cpu(options_for("cpu"));
  int here = 0;
  EXPECT_EQ(code_of([&] { cpu.layer.run(cpu.args(DeviceType::cpu), &here); }), invalid_argument);
  EXPECT_EQ(code_of([&] { cpu.layer.run(cpu.args(DeviceType::cuda)); }), invalid_argument);
}

TEST_F(CudaPlugin, AFailedCallLeavesTheLayerUsable) {
  Call call;
  for (const DeviceType type : {DeviceType::cpu, DeviceType::cuda}) {
    fake().fail_runs = 1;
    std::string text;
    EXPECT_EQ(code_of([&] { call.layer.run(call.args(type)); }, &text), ErrorCode::cuda);
    EXPECT_NE(text.find("fell off the bus"), std::string::npos) << text;
    EXPECT_NO_THROW(call.layer.run(call.args(type)));
  }
}

TEST_F(CudaPlugin, DoctorNamesIt) {
  for (const ComponentReport& part : examine_machine(1, false).components) {
    if (part.name != "cuda plug-in") continue;
    EXPECT_TRUE(part.found);
    EXPECT_EQ(part.version, "fake CUDA");
    EXPECT_NE(part.detail.find("90a"), std::string::npos) << part.detail;
    return;
  }
  ADD_FAILURE() << "no component is called cuda plug-in";
}

}  // namespace
}  // namespace moekit::test
