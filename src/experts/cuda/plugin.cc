// libmoekit_cuda.so: GPUs and layers of experts on them, for device/cuda_library.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "device/cuda/device.h"
#include "device/cuda/tools.h"
#include "device/cuda_plugin.h"
#include "experts/cuda/decode_layer.h"
#include "experts/cuda/ref_layer.h"
#include "experts/cuda/split_layer.h"
#include "experts/cuda/stage_clock.h"
#include "experts/gpu/expert_image.h"
#include "kernels/common/limits.h"
#include "moekit/version.h"

namespace moekit::experts::cuda {
namespace {

using device::check_cuda;
using device::DeviceBuffer;
using device::ExpertKernels;
using device::ExpertsCall;
using device::ExpertsSpec;
using device::OnDevice;
using trace::Stage;
namespace rows = kernels::smxx_moe;

rows::RowType type_of(device::RowType type) {
  return type == device::RowType::f32 ? rows::RowType::f32 : rows::RowType::bf16;
}

SplitLayerSpec layer_spec(const ExpertsSpec& spec, int64_t max_tokens, int num_sms) {
  const MoeConfig& c = spec.config;
  SplitLayerSpec s;
  const auto format = operand_format(c.gate_up_weights.format);
  MOEKIT_CHECK_AS(ErrorCode::internal, format.has_value(), "no matrix kernel reads {} weights",
                  to_string(c.gate_up_weights.format));
  s.format = *format;
  s.num_experts = static_cast<int32_t>(spec.num_experts);
  s.top_k = static_cast<int32_t>(c.top_k);
  s.hidden = static_cast<int32_t>(c.routed_width());
  s.inter = static_cast<int32_t>(c.inter);
  s.activation = c.activation;
  s.max_tokens = max_tokens;
  s.num_sms = num_sms;
  return s;
}

RefLayerSpec ref_spec(const ExpertsSpec& spec) {
  return {spec.config, spec.num_experts, spec.max_tokens};
}

/// Most tokens that decode takes of this layer; 0: none.
int64_t decode_tokens(const ExpertsSpec& spec) {
  int64_t tokens = std::min<int64_t>(spec.max_tokens, kernels::kDecodeLimits.max_tokens);
  while (tokens > 0 && DecodeLayer::refusal(layer_spec(spec, tokens, 1)) != nullptr) --tokens;
  return tokens;
}

/// Where a call's data lie in a workspace.
struct Regions {
  Region rows, ids, weights, out;  // copies of host memory
  // Of each chain its own: the split chain leaves words there from call to call.
  Region layer, few;
  WorkspaceLayout layout;

  explicit Regions(const ExpertsSpec& spec) {
    const MoeConfig& c = spec.config;
    const int64_t elements = checked_mul(spec.max_tokens, c.routed_width(), "rows");
    rows = layout.add(elements, 4);
    ids = layout.add(checked_mul(spec.max_tokens, c.top_k, "slots"), 4);
    weights = layout.add(spec.max_tokens * c.top_k, 4);
    out = layout.add(elements, 4);
    if (spec.kernels == ExpertKernels::reference) {
      layer = layout.add(RefLayer::workspace_bytes(ref_spec(spec)), 1);
      return;
    }
    if (const int64_t tokens = decode_tokens(spec); tokens > 0) {
      few = layout.add(DecodeLayer::workspace_bytes(layer_spec(spec, tokens, 1)), 1);
    }
    if (spec.kernels == ExpertKernels::sm90) {
      layer = layout.add(SplitLayer::workspace_bytes(layer_spec(spec, spec.max_tokens, 1)), 1);
    }
  }
};

struct LayerWeights {
  SplitLayerWeights matrices;
  RefLayerWeights reference;
};

class Workspace final : public device::ExpertsWorkspace {
 public:
  /// With the device current.
  Workspace(const ExpertsSpec& spec, const LayerWeights& weights)
      : spec_(spec), regions_(spec), memory_(regions_.layout.total()) {
    const int num_sms = device::properties(spec.device).num_sms;
    void* scratch = at<void>(regions_.layer);
    if (spec.kernels == ExpertKernels::reference) {
      reference_.emplace(ref_spec(spec), weights.reference, scratch);
      return;
    }
    few_ = decode_tokens(spec);
    if (few_ > 0) {
      decode_.emplace(layer_spec(spec, few_, num_sms), weights.matrices, at<void>(regions_.few));
    }
    if (spec.kernels == ExpertKernels::sm90) {
      split_.emplace(layer_spec(spec, spec.max_tokens, num_sms), weights.matrices, scratch);
      // It clears words of the workspace on the default stream, with which others do not wait.
      check_cuda(cudaStreamSynchronize(nullptr), "making a workspace");
    }
  }

  void run(const ExpertsCall& call) override {
    MOEKIT_CHECK(call.num_tokens >= 0 && call.num_tokens <= spec_.max_tokens,
                 "a call of {} tokens on a layer planned for {}", call.num_tokens,
                 spec_.max_tokens);
    if (call.num_tokens == 0) return;
    const OnDevice on(spec_.device);
    auto* stream = static_cast<cudaStream_t>(call.stream);
    if (call.on_device) return enqueue(call, stream, nullptr);
    if (stream == nullptr) stream = stream_.get();
    StageClock* const clock = call.spans != nullptr ? &clock_ : nullptr;
    if (clock != nullptr) clock->start(stream);
    const int64_t width = spec_.config.routed_width();
    const auto row = static_cast<size_t>(width * (call.row_type == device::RowType::f32 ? 4 : 2));
    const auto tokens = static_cast<size_t>(call.num_tokens);
    const size_t slots = tokens * static_cast<size_t>(spec_.config.top_k) * 4;
    const size_t out =
        tokens * static_cast<size_t>(width * (call.out_type == device::RowType::f32 ? 4 : 2));
    check_cuda(cudaMemcpy2DAsync(at<void>(regions_.rows), row, call.rows,
                                 static_cast<size_t>(call.row_bytes), row, tokens,
                                 cudaMemcpyHostToDevice, stream),
               "copy of rows to the device");
    check_cuda(
        cudaMemcpyAsync(at<void>(regions_.ids), call.ids, slots, cudaMemcpyHostToDevice, stream),
        "copy of ids to the device");
    check_cuda(cudaMemcpyAsync(at<void>(regions_.weights), call.weights, slots,
                               cudaMemcpyHostToDevice, stream),
               "copy of weights to the device");
    mark(clock, Stage::upload);
    ExpertsCall copied = call;
    copied.rows = at<void>(regions_.rows);
    copied.ids = at<int32_t>(regions_.ids);
    copied.weights = at<float>(regions_.weights);
    copied.out = at<void>(regions_.out);
    enqueue(copied, stream, clock);
    check_cuda(cudaMemcpyAsync(call.out, copied.out, out, cudaMemcpyDeviceToHost, stream),
               "copy of rows from the device");
    mark(clock, Stage::download);
    check_cuda(cudaStreamSynchronize(stream), "experts on the device");
    if (clock != nullptr) clock->read(*call.spans);
  }

 private:
  template <typename T>
  T* at(const Region& region) const {
    return region.in<T>(memory_.as<std::byte>());
  }

  void enqueue(const ExpertsCall& call, cudaStream_t stream, StageClock* clock) const {
    const rows::RowType in = type_of(call.row_type), out = type_of(call.out_type);
    if (reference_) {
      reference_->run(call.rows, in, call.ids, call.weights, call.num_tokens, call.out, out, stream,
                      clock);
      return;
    }
    const bool few = decode_ && call.knobs == device::kDecodeChain && in == rows::RowType::bf16 &&
                     call.num_tokens <= few_;
    if (few) {
      decode_->run(call.rows, call.ids, call.weights, call.num_tokens, nullptr, call.out, stream,
                   out, clock);
      return;
    }
    MOEKIT_CHECK_AS(ErrorCode::unsupported, split_.has_value(),
                    "decode takes bf16 rows of at most {} tokens, got {} tokens", few_,
                    call.num_tokens);
    split_->run(call.rows, call.ids, call.weights, call.num_tokens, nullptr, call.out, stream,
                {in, out}, clock);
  }

  ExpertsSpec spec_;
  Regions regions_;
  DeviceBuffer memory_;
  device::Stream stream_;
  StageClock clock_;
  int64_t few_ = 0;
  std::optional<RefLayer> reference_;
  std::optional<DecodeLayer> decode_;
  std::optional<SplitLayer> split_;
};

class Experts final : public device::DeviceExperts {
 public:
  explicit Experts(const ExpertsSpec& spec) : spec_(spec), image_(spec.config, spec.kernels) {
    const OnDevice on(spec.device);
    images_ = DeviceBuffer(checked_mul(spec.num_experts, image_.bytes, "packed experts"));
    for (int i = 0; i < 3; ++i) {
      biases_[i] = DeviceBuffer(spec.num_experts * matrix_of(i).bias.bytes);
      globals_[i] = DeviceBuffer(spec.num_experts * matrix_of(i).global.bytes);
    }
  }

  void upload(int64_t expert, const std::byte* image) override {
    const OnDevice on(spec_.device);
    check_cuda(cudaMemcpy(images_.as<std::byte>() + expert * image_.bytes, image,
                          static_cast<size_t>(image_.bytes), cudaMemcpyHostToDevice),
               "copy of an expert to the device");
  }

  /// Biases and globals (multipliers in panels) of all experts side by side, as kernels want them.
  void finish() override {
    const OnDevice on(spec_.device);
    for (int i = 0; i < 3; ++i) {
      gather(matrix_of(i).bias, biases_[i]);
      gather(matrix_of(i).global, globals_[i]);
    }
    check_cuda(cudaDeviceSynchronize(), "preparing weights");
  }

  std::unique_ptr<device::ExpertsWorkspace> make_workspace() const override {
    const OnDevice on(spec_.device);
    return std::make_unique<Workspace>(spec_, LayerWeights{matrices(), reference()});
  }

 private:
  void gather(const Region& part, const DeviceBuffer& to) const {
    if (part.bytes == 0 || spec_.num_experts == 0) return;
    const auto bytes = static_cast<size_t>(part.bytes);
    check_cuda(cudaMemcpy2D(to.data(), bytes, at(part), static_cast<size_t>(image_.bytes), bytes,
                            static_cast<size_t>(spec_.num_experts), cudaMemcpyDeviceToDevice),
               "preparing weights");
  }

  /// Gate, up, down.
  const ImageMatrix& matrix_of(int i) const {
    return i == 0 ? image_.gate : i == 1 ? image_.up : image_.down;
  }
  std::byte* at(const Region& region) const { return images_.as<std::byte>() + region.offset; }
  const float* bias(int i) const { return biases_[i].as<float>(); }

  /// Of gate (1st) and up (2nd), or of one matrix alone.
  kernels::WeightView view(int first_idx, int second_idx) const {
    const ImageMatrix& first = matrix_of(first_idx);
    const ImageMatrix& second = matrix_of(second_idx);
    kernels::WeightView v;
    v.base = at(first.codes);
    v.expert_bytes = image_.bytes;
    v.half_bytes = second.codes.offset - first.codes.offset;
    if (first.panels) {
      v.multipliers = globals_[first_idx].as<float>();
      v.up_multipliers = globals_[second_idx].as<float>();
      return v;
    }
    v.row_bytes = first.layout.code_row_bytes;
    v.scales = reinterpret_cast<const float*>(at(first.scales));
    v.scale_expert = image_.bytes / 4;
    v.scale_half = (second.scales.offset - first.scales.offset) / 4;
    v.scale_row = first.layout.scale_cols;
    return v;
  }
  SplitLayerWeights matrices() const {
    const bool gated = spec_.config.activation.gated;
    SplitLayerWeights w;
    w.gate_up = view(gated ? 0 : 1, 1);
    w.down = view(2, 2);
    w.gate_bias = gated ? bias(0) : nullptr;
    w.up_bias = bias(1);
    w.down_bias = bias(2);
    return w;
  }

  rows::ExpertMatrices matrix(const ImageMatrix& m, int i, ScaleSense sense) const {
    rows::ExpertMatrices r;
    r.scheme = m.layout.scheme;
    r.rows = m.layout.rows;
    r.cols = m.layout.cols;
    r.codes = at(m.codes);
    r.expert_code_bytes = image_.bytes;
    r.scales = at(m.scales);
    r.expert_scale_bytes = image_.bytes;
    r.globals = globals_[i].as<float>();
    r.global_sense = sense;
    r.bias = bias(i);
    return r;
  }
  RefLayerWeights reference() const {
    return {matrix(image_.gate, 0, spec_.gate_up_global),
            matrix(image_.up, 1, spec_.gate_up_global), matrix(image_.down, 2, spec_.down_global)};
  }

  ExpertsSpec spec_;
  ExpertImage image_;
  DeviceBuffer images_;                  // one image an expert
  DeviceBuffer biases_[3], globals_[3];  // gate, up, down
};

class Plugin final : public device::CudaPlugin {
 public:
  std::string library() const override {
    return fmt::format("CUDA {}.{}", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  std::string targets() const override { return MOEKIT_CUDA_TARGETS; }
  int num_gpus() const override { return device::device_count(); }
  device::GpuFacts gpu(int index) const override {
    const device::Properties p = device::properties(index);
    return {p.name, p.arch, p.memory_bytes};
  }
  int64_t workspace_bytes(const ExpertsSpec& spec) const override {
    return Regions(spec).layout.total();
  }
  std::unique_ptr<device::DeviceExperts> make_experts(const ExpertsSpec& spec) const override {
    return std::make_unique<Experts>(spec);
  }
  const device::GpuTools& tools() const override { return device::cuda_tools(); }
};

}  // namespace
}  // namespace moekit::experts::cuda

extern "C" __attribute__((visibility("default"))) const moekit::device::CudaPlugin*
moekit_cuda_plugin(uint32_t interface, const char* version) {
  using moekit::experts::cuda::Plugin;
  static const Plugin plugin;
  const bool ours =
      interface == moekit::device::kCudaPluginInterface && std::string(version) == MOEKIT_VERSION;
  return ours ? &plugin : nullptr;
}
