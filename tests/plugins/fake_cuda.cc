// A fake libmoekit_cuda.so: the interface of device/cuda_plugin.h with the exact chain in plain
// loops on the CPU. "Device memory" is host memory. What the tests learn from it holds for all that
// surrounds the kernels.
#include "tests/plugins/fake_cuda.h"

#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "base/check.h"
#include "device/cuda_plugin.h"
#include "device/gpu_tools.h"
#include "experts/gpu/expert_image.h"
#include "experts/ref/activation.h"
#include "moekit/version.h"
#include "quant/row_codec.h"
#include "quant/stored_codec.h"
#include "tensor/float_formats.h"
#include "tests/support/panel_values.h"

namespace moekit::experts::cuda {
namespace {

moekit_fake_cuda state{1, 90, 0, 0, 0, 0, 0, 0, -1, "", nullptr, "", 0, 0, 0, 0, 0.0};

float load(device::RowType type, const std::byte* row, int64_t i) {
  if (type == device::RowType::f32) return reinterpret_cast<const float*>(row)[i];
  return bf16_to_f32(reinterpret_cast<const uint16_t*>(row)[i]);
}

class Experts final : public device::DeviceExperts {
 public:
  explicit Experts(const device::ExpertsSpec& spec)
      : spec_(spec),
        image_(spec.config, spec.kernels),
        images_(static_cast<size_t>(spec.num_experts * image_.bytes)),
        decoded_(static_cast<size_t>(spec.num_experts)) {
    state.kernels = static_cast<int32_t>(spec.kernels);
  }
  void upload(int64_t expert, const std::byte* image) override {
    ++state.uploads;
    std::memcpy(images_.data() + expert * image_.bytes, image, static_cast<size_t>(image_.bytes));
    decoded_[static_cast<size_t>(expert)] = {};
  }
  void finish() override { ++state.finishes; }
  std::unique_ptr<device::ExpertsWorkspace> make_workspace() const override;

  void run(const device::ExpertsCall& call) const {
    const MoeConfig& c = spec_.config;
    const int64_t width = c.routed_width();
    for (int64_t t = 0; t < call.num_tokens; ++t) {
      const auto* row = static_cast<const std::byte*>(call.rows) + t * call.row_bytes;
      std::vector<float> x(static_cast<size_t>(width)), sum(x.size());
      for (int64_t i = 0; i < width; ++i) x[i] = load(call.row_type, row, i);
      quant::round_trip_row(c.gate_up_input, 1.0f, x.data(), width);
      for (int64_t j = 0; j < c.top_k; ++j) {
        const int32_t e = call.ids[t * c.top_k + j];
        if (e < 0 || e >= spec_.num_experts) continue;
        const std::vector<float> y = expert(e, x);
        for (int64_t i = 0; i < width; ++i) sum[i] += call.weights[t * c.top_k + j] * y[i];
      }
      for (int64_t i = 0; i < width; ++i) {
        sum[i] += static_cast<float>(state.off_by);
        if (call.out_type == device::RowType::f32) {
          static_cast<float*>(call.out)[t * width + i] = sum[i];
        } else {
          static_cast<uint16_t*>(call.out)[t * width + i] = f32_to_bf16(sum[i]);
        }
      }
    }
  }

 private:
  struct Matrices {
    std::vector<float> gate, up, down;
  };

  std::vector<float> expert(int32_t e, const std::vector<float>& x) const {
    const MoeConfig& c = spec_.config;
    const std::byte* at = images_.data() + e * image_.bytes;
    const Matrices& w = matrices(e, at);
    std::vector<float> gate;
    if (c.activation.gated) gate = product(at, image_.gate, w.gate, x);
    std::vector<float> h = product(at, image_.up, w.up, x);
    for (size_t n = 0; n < h.size(); ++n) {
      h[n] = ref::activate<float>(c.activation, gate.empty() ? 0.0f : gate[n], h[n]);
    }
    quant::round_trip_row(c.down_input, 1.0f, h.data(), c.inter);
    return product(at, image_.down, w.down, h);
  }

  /// Decoded once, not once a row.
  const Matrices& matrices(int32_t e, const std::byte* at) const {
    const std::lock_guard lock(mutex_);
    Matrices& w = decoded_[static_cast<size_t>(e)];
    if (w.up.empty()) {
      if (spec_.config.activation.gated) w.gate = decode(at, image_.gate, spec_.gate_up_global);
      w.up = decode(at, image_.up, spec_.gate_up_global);
      w.down = decode(at, image_.down, spec_.down_global);
    }
    return w;
  }

  static std::vector<float> product(const std::byte* at, const ImageMatrix& m,
                                    const std::vector<float>& weights,
                                    const std::vector<float>& x) {
    std::vector<float> y(static_cast<size_t>(m.layout.rows));
    const float* w = weights.data();
    for (size_t n = 0; n < y.size(); ++n, w += x.size()) {
      double sum = 0.0;
      if (m.bias.bytes > 0) sum = reinterpret_cast<const float*>(at + m.bias.offset)[n];
      for (size_t k = 0; k < x.size(); ++k) sum += double{w[k]} * x[k];
      y[n] = static_cast<float>(sum);
    }
    return y;
  }

  static std::vector<float> decode(const std::byte* at, const ImageMatrix& m, ScaleSense sense) {
    float global;
    std::memcpy(&global, at + m.global.offset, sizeof(global));
    const int64_t rows = m.layout.rows, columns = m.layout.cols;
    std::vector<float> weights(static_cast<size_t>(rows * columns));
    for (int64_t n = 0; n < rows; ++n) {
      float* const row = weights.data() + n * columns;
      if (m.panels) {
        expand_row(at + m.codes.offset, m, n, global, row);
      } else {
        decode_row(at, m, n, global, sense, row);
      }
    }
    return weights;
  }

  static void decode_row(const std::byte* at, const ImageMatrix& m, int64_t n, float global,
                         ScaleSense sense, float* w) {
    quant::EncodedLayout layout = m.layout;
    layout.scales_offset = m.scales.offset - m.codes.offset;
    StoredMatrix stored = layout.view(at + m.codes.offset);
    stored.global_sense = sense;
    stored.global = global;
    quant::decode_weights(stored, n, 0, stored.cols, w);
  }

  /// As the matrix kernels read panels; a multiplier is applied to weights instead of sums.
  static void expand_row(const std::byte* panels, const ImageMatrix& m, int64_t n, float multiplier,
                         float* w) {
    const int64_t columns = m.layout.cols;
    for (int64_t k = 0; k < columns; ++k) {
      w[k] = test::panel_value(*m.panels, panels, columns, n, k).as_bf16() * multiplier;
    }
  }

  device::ExpertsSpec spec_;
  ExpertImage image_;
  std::vector<std::byte> images_;
  mutable std::mutex mutex_;
  mutable std::vector<Matrices> decoded_;  // of experts that have been called
};

class Workspace final : public device::ExpertsWorkspace {
 public:
  Workspace(const Experts& experts, const device::ExpertsSpec& spec)
      : experts_(experts), spec_(spec) {
    ++state.workspaces;
  }
  void run(const device::ExpertsCall& call) override {
    ++(call.on_device ? state.device_runs : state.runs);
    state.knobs = call.knobs == device::kDecodeChain  ? "chain=decode"
                  : call.knobs == device::kSplitChain ? "chain=split"
                                                      : "other";
    state.stream = call.stream;
    state.row_type = call.row_type == device::RowType::f32 ? "f32" : "bf16";
    MOEKIT_CHECK(call.num_tokens <= spec_.max_tokens, "too many tokens");
    if (state.fail_runs > 0) {
      --state.fail_runs;
      fail(ErrorCode::cuda, "the fake GPU fell off the bus");
    }
    experts_.run(call);
    if (call.spans != nullptr) tell_steps(*call.spans);
  }

 private:
  /// Ten nanoseconds a step: less than the call that they are part of.
  static void tell_steps(std::vector<device::DeviceSpan>& spans) {
    using enum trace::Stage;
    spans.clear();
    double at = 0.0;
    for (const trace::Stage stage : {upload, index, gemm1, quantize, gemm2, sum, download}) {
      spans.push_back({stage, at, at + 0.01});
      at += 0.01;
    }
  }

  const Experts& experts_;
  device::ExpertsSpec spec_;
};

class Memory final : public device::DeviceMemory {
 public:
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {}
  void* data() const override { return const_cast<std::byte*>(bytes_.data()); }
  void upload(const void* host, int64_t bytes) override {
    MOEKIT_CHECK(bytes <= static_cast<int64_t>(bytes_.size()), "upload of too many bytes");
    std::memcpy(bytes_.data(), host, static_cast<size_t>(bytes));
  }
  void download(void* host, int64_t bytes) const override {
    MOEKIT_CHECK(bytes <= static_cast<int64_t>(bytes_.size()), "download of too many bytes");
    std::memcpy(host, bytes_.data(), static_cast<size_t>(bytes));
  }

 private:
  std::vector<std::byte> bytes_;
};

/// Times that nothing measures: launch i takes 1000 + i us, memory gives 1000 GB/s.
class Tools final : public device::GpuTools {
 public:
  std::unique_ptr<device::DeviceMemory> allocate(int, int64_t bytes) const override {
    ++state.allocations;
    return std::make_unique<Memory>(bytes);
  }
  int64_t free_bytes(int) const override {
    return state.free_bytes > 0 ? state.free_bytes : int64_t{1} << 30;
  }
  int64_t l2_bytes(int) const override { return int64_t{1} << 16; }
  std::vector<double> time_graph(int, device::Replays replays,
                                 FunctionRef<void(void* stream)> enqueue) const override {
    ++state.graphs;
    enqueue(&state);
    std::vector<double> times;
    for (int i = replays.timed - 1; i >= 0; --i) times.push_back(1000.0 + i);
    return times;
  }
  double read_gbs(int) const override {
    ++state.probes;
    return 1000.0;
  }
};

std::unique_ptr<device::ExpertsWorkspace> Experts::make_workspace() const {
  return std::make_unique<Workspace>(*this, spec_);
}

class Plugin final : public device::CudaPlugin {
 public:
  std::string library() const override { return "fake CUDA"; }
  std::string targets() const override { return "80,90a,100a,120a"; }
  int num_gpus() const override { return state.num_gpus; }
  device::GpuFacts gpu(int) const override {
    const int number = state.arch_number;
    return {"fake GPU", {number / 10, number % 10, number >= 90}, int64_t{1} << 30};
  }
  int64_t workspace_bytes(const device::ExpertsSpec& spec) const override {
    return spec.max_tokens * spec.config.routed_width() * 4;
  }
  std::unique_ptr<device::DeviceExperts> make_experts(
      const device::ExpertsSpec& spec) const override {
    return std::make_unique<Experts>(spec);
  }
  const device::GpuTools& tools() const override {
    static const Tools tools;
    return tools;
  }
};

}  // namespace
}  // namespace moekit::experts::cuda

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

FAKE_EXPORT moekit_fake_cuda* moekit_fake_cuda_state() { return &moekit::experts::cuda::state; }

FAKE_EXPORT const moekit::device::CudaPlugin* moekit_cuda_plugin(uint32_t interface,
                                                                 const char* version) {
  static const moekit::experts::cuda::Plugin plugin;
  const bool ours = interface == moekit::device::kCudaPluginInterface &&
                    std::strcmp(version, MOEKIT_VERSION) == 0;
  return ours ? &plugin : nullptr;
}
