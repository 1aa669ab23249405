// The experts of a whole layer on a GPU against plain double loops here: the split layer and the
// decode layer in bf16, fp8 and weight panels, and the reference chain.
#include <algorithm>
#include <limits>
#include <memory>

#include "experts/cuda/decode_layer.h"
#include "experts/cuda/split_layer.h"
#include "experts/ref/activation.h"
#include "problem/error_bound.h"
#include "quant/row_codec.h"
#include "tests/cuda/gpu.h"
#include "tests/cuda/panels.h"

namespace moekit::testing {
namespace {

namespace gemm = kernels::sm90_grouped_gemm;
namespace rows = kernels::smxx_moe;
using experts::cuda::DecodeLayer;
using experts::cuda::SplitLayer;
using experts::cuda::SplitLayerSpec;
using experts::cuda::SplitLayerWeights;
using experts::cuda::TaskForm;

enum class Order { gate_up, interleaved };

struct LayerCase {
  std::string name;
  gemm::Format format = gemm::Format::bf16;
  int64_t tokens = 0;
  int32_t top_k = 2, experts = 4, hidden = 64, inter = 64;
  ActivationSpec activation{};
  int hot = 0;  // percent of slots that go to expert 1
  bool bias = false;
  Order order = Order::gate_up;
};

/// A layer's data on the host: stored bits and their values.
struct HostLayer {
  std::vector<uint16_t> x, gate_up, down;  // bf16 bits
  std::vector<uint8_t> gate_up8, down8;    // e4m3 codes, or panels
  std::vector<float> gate_up_scales, down_scales;
  std::vector<PanelMatrix> gate_up_matrices, down_matrices;  // panels: [experts][halves], [experts]
  std::vector<float> multipliers, up_multipliers, down_multipliers;
  std::vector<float> gate_bias, up_bias, down_bias;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

int64_t halves(const LayerCase& c) { return c.activation.gated ? 2 : 1; }
int64_t blocks(int64_t n) { return (n + 127) / 128; }
bool fp8(const LayerCase& c) { return c.format == gemm::Format::fp8_block; }
bool panels(const LayerCase& c) { return kernels::in_panels(c.format); }

/// The forms that a format has, `plain` first.
std::vector<TaskForm> forms(gemm::Format format) {
  std::vector<TaskForm> list{TaskForm::plain, TaskForm::shared};
  if (gemm::has_short_tasks(format)) list.push_back(TaskForm::few);
  return list;
}

/// Stored row of row n of half h (0 gate, 1 up; without a gate 0 is up).
int64_t stored_row(const LayerCase& c, int64_t h, int64_t n) {
  if (!c.activation.gated) return n;
  switch (c.order) {
    case Order::gate_up: return h * c.inter + n;
    case Order::interleaved: return 2 * n + h;
  }
  return 0;
}

void make_panels(const LayerCase& c, Random& random, HostLayer& l) {
  auto pack = [](const std::vector<PanelMatrix>& matrices, std::vector<uint8_t>& to) {
    const PanelMatrix& first = matrices.front();
    const int64_t bytes = kernels::panel_matrix_bytes(first.format, first.rows, first.depth);
    to.resize(matrices.size() * bytes);
    for (size_t i = 0; i < matrices.size(); ++i) matrices[i].pack(to.data() + i * bytes);
  };
  for (int32_t e = 0; e < c.experts; ++e) {
    for (int64_t h = 0; h < halves(c); ++h) {
      l.gate_up_matrices.emplace_back(c.format, c.inter, c.hidden, random);
      (h == 0 ? l.multipliers : l.up_multipliers).push_back(l.gate_up_matrices.back().multiplier());
    }
    l.down_matrices.emplace_back(c.format, c.hidden, c.inter, random);
    l.down_multipliers.push_back(l.down_matrices.back().multiplier());
  }
  pack(l.gate_up_matrices, l.gate_up8);
  pack(l.down_matrices, l.down8);
}

HostLayer make_layer(const LayerCase& c) {
  HostLayer l;
  Random random(c.tokens * 31 + c.inter);
  l.x = random_bf16(c.tokens * c.hidden, 1.0f, random);
  const int64_t up_count = c.experts * halves(c) * c.inter * c.hidden;
  const int64_t down_count = int64_t{c.experts} * c.hidden * c.inter;
  if (panels(c)) {
    make_panels(c, random, l);
  } else if (fp8(c)) {
    auto codes = [&](int64_t n) {
      std::vector<uint8_t> v(n);
      for (auto& b : v) b = f32_to_e4m3(100.0f * random.normal());
      return v;
    };
    auto scales = [&](int64_t n, int64_t depth) {
      std::vector<float> v(n);
      for (auto& s : v)
        s = (0.5f + random.uniform()) * 0.01f / std::sqrt(static_cast<float>(depth));
      return v;
    };
    l.gate_up8 = codes(up_count);
    l.down8 = codes(down_count);
    l.gate_up_scales = scales(c.experts * halves(c) * blocks(c.inter) * blocks(c.hidden), c.hidden);
    l.down_scales = scales(c.experts * blocks(c.hidden) * blocks(c.inter), c.inter);
  } else {
    l.gate_up = random_bf16(up_count, 1.0f / std::sqrt(static_cast<float>(c.hidden)), random);
    l.down = random_bf16(down_count, 1.0f / std::sqrt(static_cast<float>(c.inter)), random);
  }
  if (c.bias) {
    auto bias = [&](int64_t n) {
      std::vector<float> v(n);
      for (auto& b : v) b = 0.5f * random.normal();
      return v;
    };
    if (c.activation.gated) l.gate_bias = bias(c.experts * c.inter);
    l.up_bias = bias(c.experts * c.inter);
    l.down_bias = bias(int64_t{c.experts} * c.hidden);
  }
  l.ids.resize(c.tokens * c.top_k);
  for (auto& id : l.ids) {
    const int64_t draw = random.below(100);
    id = draw < c.hot ? 1 : static_cast<int32_t>(random.below(c.experts));
    if (id == 2) id = 0;  // expert 2 stays empty
    if (draw >= 97) id = -1;
  }
  l.weights.resize(l.ids.size());
  for (auto& w : l.weights) w = random.uniform() + 0.1f;
  return l;
}

/// Decoded weight of gate_up (h, n, k) and down (n, k) of an expert.
struct Values {
  const LayerCase& c;
  const HostLayer& l;
  float up(int64_t e, int64_t h, int64_t n, int64_t k) const {
    if (panels(c)) return l.gate_up_matrices[e * halves(c) + h].values[n * c.hidden + k];
    const int64_t i = (e * halves(c) * c.inter + stored_row(c, h, n)) * c.hidden + k;
    if (!fp8(c)) return bf16_to_f32(l.gate_up[i]);
    const int64_t b =
        ((e * halves(c) + h) * blocks(c.inter) + n / 128) * blocks(c.hidden) + k / 128;
    return e4m3_to_f32(l.gate_up8[i]) * l.gate_up_scales[b];
  }
  float down(int64_t e, int64_t n, int64_t k) const {
    if (panels(c)) return l.down_matrices[e].values[n * c.inter + k];
    const int64_t i = (e * c.hidden + n) * c.inter + k;
    if (!fp8(c)) return bf16_to_f32(l.down[i]);
    return e4m3_to_f32(l.down8[i]) *
           l.down_scales[(e * blocks(c.hidden) + n / 128) * blocks(c.inter) + k / 128];
  }
};

/// The exact chain in double, [tokens, hidden], only for `sample` tokens (others stay NaN).
std::vector<double> expected_output(const LayerCase& c, const HostLayer& l, int64_t stride) {
  const Values v{c, l};
  ActivationScheme scheme;
  scheme.format = fp8(c) ? ActivationFormat::fp8_block : ActivationFormat::bf16;
  std::vector<double> out(c.tokens * c.hidden, std::nan(""));
  std::vector<float> x(c.hidden), h(c.inter);
  for (int64_t t = 0; t < c.tokens; t += stride) {
    double* row = out.data() + t * c.hidden;
    std::fill_n(row, c.hidden, 0.0);
    for (int64_t k = 0; k < c.hidden; ++k) x[k] = bf16_to_f32(l.x[t * c.hidden + k]);
    quant::round_trip_row(scheme, 1.0f, x.data(), c.hidden);
    for (int32_t j = 0; j < c.top_k; ++j) {
      const int32_t e = l.ids[t * c.top_k + j];
      if (e < 0) continue;
      for (int64_t n = 0; n < c.inter; ++n) {
        double gate = 0.0, up = 0.0;
        const int64_t up_half = c.activation.gated ? 1 : 0;
        for (int64_t k = 0; k < c.hidden; ++k) {
          if (c.activation.gated) gate += double{x[k]} * v.up(e, 0, n, k);
          up += double{x[k]} * v.up(e, up_half, n, k);
        }
        if (c.bias) {
          if (c.activation.gated) gate += l.gate_bias[e * c.inter + n];
          up += l.up_bias[e * c.inter + n];
        }
        h[n] = static_cast<float>(experts::ref::activate<double>(c.activation, gate, up));
      }
      quant::round_trip_row(scheme, 1.0f, h.data(), c.inter);
      for (int64_t n = 0; n < c.hidden; ++n) {
        double y = c.bias ? l.down_bias[int64_t{e} * c.hidden + n] : 0.0;
        for (int64_t k = 0; k < c.inter; ++k) y += double{h[k]} * v.down(e, n, k);
        row[n] += y * l.weights[t * c.top_k + j];
      }
    }
  }
  return out;
}

/// ||got - expected|| / ||expected||: of the worst sampled row, and of all sampled rows together.
struct RowErrors {
  double worst = 0.0;
  double all = 0.0;
};
RowErrors row_errors(const std::vector<float>& got, const std::vector<double>& expected,
                     int64_t width) {
  RowErrors result;
  double total_error = 0.0, total_norm = 0.0;
  for (size_t r = 0; r < got.size() / width; ++r) {
    double error = 0.0, norm = 0.0;
    if (std::isnan(expected[r * width])) continue;
    for (int64_t i = 0; i < width; ++i) {
      const double d = double{got[r * width + i]} - expected[r * width + i];
      error += d * d;
      norm += expected[r * width + i] * expected[r * width + i];
    }
    if (std::isnan(error)) return {error, error};
    total_error += error;
    total_norm += norm;
    result.worst = std::max(result.worst, norm > 0 ? std::sqrt(error / norm) : error);
  }
  result.all = std::sqrt(total_norm > 0 ? total_error / total_norm : total_error);
  return result;
}

/// Weights, routing and x of a case on the device, and layers over them.
struct DeviceLayer {
  LayerCase c;
  DeviceArray<uint16_t> x, gate_up, down;
  DeviceArray<uint8_t> gate_up8, down8;
  DeviceArray<float> gate_up_scales, down_scales, gate_bias, up_bias, down_bias, weights;
  DeviceArray<float> multipliers, up_multipliers, down_multipliers;
  DeviceArray<int32_t> ids;
  DeviceArray<uint16_t> out;
  std::unique_ptr<DeviceArray<uint8_t>> workspace;
  SplitLayerSpec spec;
  std::unique_ptr<SplitLayer> layer;
  std::unique_ptr<DecodeLayer> decode;

  DeviceLayer(const LayerCase& layer_case, const HostLayer& l, TaskForm form, bool overlap)
      : c(layer_case),
        x(l.x),
        gate_up(l.gate_up),
        down(l.down),
        gate_up8(l.gate_up8),
        down8(l.down8),
        gate_up_scales(l.gate_up_scales),
        down_scales(l.down_scales),
        gate_bias(l.gate_bias),
        up_bias(l.up_bias),
        down_bias(l.down_bias),
        weights(l.weights),
        multipliers(l.multipliers),
        up_multipliers(l.up_multipliers),
        down_multipliers(l.down_multipliers),
        ids(l.ids),
        out(l.x.size()) {
    spec.format = c.format;
    spec.num_experts = c.experts;
    spec.top_k = c.top_k;
    spec.hidden = c.hidden;
    spec.inter = c.inter;
    spec.activation = c.activation;
    spec.max_tokens = c.tokens;
    spec.num_sms = device::properties(0).num_sms;
    spec.form = form;
    spec.overlap = overlap;
    workspace = std::make_unique<DeviceArray<uint8_t>>(
        std::max(SplitLayer::workspace_bytes(spec), DecodeLayer::workspace_bytes(spec)));
  }
  /// The one layer or the other, in the same workspace.
  void use_split() { layer = std::make_unique<SplitLayer>(spec, views(), workspace->data()); }
  void use_decode(int num_sms) {
    spec.num_sms = num_sms;
    decode = std::make_unique<DecodeLayer>(spec, views(), workspace->data());
  }

  SplitLayerWeights views() const {
    SplitLayerWeights w = panels(c) ? panel_views() : row_views();
    if (c.bias) {
      w.gate_bias = gate_bias.data();
      w.up_bias = up_bias.data();
      w.down_bias = down_bias.data();
    }
    return w;
  }
  SplitLayerWeights panel_views() const {
    SplitLayerWeights w;
    const int64_t bytes = kernels::panel_matrix_bytes(c.format, c.inter, c.hidden);
    w.gate_up.base = gate_up8.data();
    w.gate_up.expert_bytes = halves(c) * bytes;
    w.gate_up.half_bytes = c.activation.gated ? bytes : 0;
    w.gate_up.multipliers = multipliers.data();
    w.gate_up.up_multipliers = c.activation.gated ? up_multipliers.data() : nullptr;
    w.down.base = down8.data();
    w.down.expert_bytes = kernels::panel_matrix_bytes(c.format, c.hidden, c.inter);
    w.down.multipliers = down_multipliers.data();
    return w;
  }
  SplitLayerWeights row_views() const {
    const int64_t bytes = fp8(c) ? 1 : 2;
    SplitLayerWeights w;
    const auto* base = fp8(c) ? gate_up8.data() : reinterpret_cast<const uint8_t*>(gate_up.data());
    w.gate_up.row_bytes = c.hidden * bytes;
    w.gate_up.expert_bytes = halves(c) * c.inter * c.hidden * bytes;
    if (c.activation.gated) {
      w.gate_up.half_bytes = int64_t{c.inter} * c.hidden * bytes;
      if (c.order == Order::interleaved) {
        w.gate_up.half_bytes = c.hidden * bytes;
        w.gate_up.row_bytes = 2 * c.hidden * bytes;
      }
    }
    w.gate_up.base = base;
    w.gate_up.scales = gate_up_scales.data();
    w.gate_up.scale_row = blocks(c.hidden);
    w.gate_up.scale_half = blocks(c.inter) * blocks(c.hidden);
    w.gate_up.scale_expert = halves(c) * w.gate_up.scale_half;
    w.down.base = fp8(c) ? down8.data() : reinterpret_cast<const uint8_t*>(down.data());
    w.down.row_bytes = c.inter * bytes;
    w.down.expert_bytes = int64_t{c.hidden} * c.inter * bytes;
    w.down.scales = down_scales.data();
    w.down.scale_row = blocks(c.inter);
    w.down.scale_expert = blocks(c.hidden) * blocks(c.inter);
    return w;
  }

  void enqueue(cudaStream_t stream) const {
    layer->run(x.data(), ids.data(), weights.data(), c.tokens, nullptr, out.data(), stream);
  }
  std::vector<float> result() const {
    const auto bits = out.get();
    std::vector<float> v(bits.size());
    for (size_t i = 0; i < v.size(); ++i) v[i] = bf16_to_f32(bits[i]);
    return v;
  }
};

/// Any row: the bound of the exact chain (problem/error_bound.h), twice for the tensor cores' fp8
/// sums (13 fraction bits below the largest product of an instruction, so h differs by about 2^-12
/// where fp32 sums differ by 2^-20), and the roundings of slot rows and result to bf16 (2^-9 at
/// most each). Weights in panels are exact in bf16; their multipliers are one more rounding of fp32
/// each, which the bound's constants cover.
double worst_bound(const LayerCase& c) {
  MoeConfig config;
  config.hidden = c.hidden;
  config.inter = c.inter;
  config.down_input.format = fp8(c) ? ActivationFormat::fp8_block : ActivationFormat::bf16;
  return (fp8(c) ? 2.0 : 1.0) * row_error_bound(config) + 0x1p-8;
}
/// All rows together: bf16 roundings of h, slot rows and result (0.3 * 2^-8 each in rms); in fp8,
/// codes that flip: h differs by up to 2^-11, so 2^-11 / 2^-3 of them do, each by 0.6 * 2^-3 of its
/// value: 5e-3, doubled because the values of a row are heavy-tailed.
double mean_bound(const LayerCase& c) { return fp8(c) ? 1.2e-2 : 4e-3; }

void expect_close(const LayerCase& c, const std::vector<float>& got,
                  const std::vector<double>& expected) {
  const RowErrors errors = row_errors(got, expected, c.hidden);
  EXPECT_LE(errors.worst, worst_bound(c));
  EXPECT_LE(errors.all, mean_bound(c));
}

ActivationSpec act(ActivationKind kind, bool gated = true,
                   float limit = std::numeric_limits<float>::infinity()) {
  ActivationSpec a;
  a.kind = kind;
  a.gated = gated;
  a.limit = limit;
  return a;
}

void add_panel_cases(const std::string& name, gemm::Format format, std::vector<LayerCase>& list) {
  using enum ActivationKind;
  const LayerCase cases[] = {
      {"_one_token", format, 1, 2, 4, 64, 64},
      {"_odd_widths", format, 37, 2, 5, 96, 160},
      {"_ragged", format, 210, 4, 8, 256, 288, {}, 0, true},
      {"_hot", format, 530, 2, 4, 192, 224, {}, 85},
      {"_swiglu_oai", format, 140, 2, 6, 160, 352, act(swiglu_oai, true, 7.0f), 20, true},
      {"_relu2_no_gate", format, 300, 2, 4, 352, 416, act(relu2, false), 30, true},
      {"_larger", format, 260, 4, 8, 1024, 768},
      {"_gptoss_depth", format, 24, 2, 4, 2880, 480},
      {"_many_rows", format, 1500, 2, 5, 192, 352, {}, 40, true},
      {"_many_rows_no_gate", format, 1200, 2, 4, 96, 160, act(relu2, false), 50, true},
  };
  for (LayerCase c : cases) {
    c.name = name + c.name;
    list.push_back(c);
  }
}

std::vector<LayerCase> layer_cases() {
  using enum ActivationKind;
  constexpr auto kBf16 = gemm::Format::bf16;
  constexpr auto kFp8 = gemm::Format::fp8_block;
  std::vector<LayerCase> list{
      {"bf16_one_token", kBf16, 1, 2, 4, 64, 64},
      {"bf16_small", kBf16, 37, 2, 5, 96, 160},
      {"bf16_ragged", kBf16, 210, 4, 8, 256, 288, {}, 0, true},
      {"bf16_hot", kBf16, 530, 2, 4, 192, 224, {}, 85},
      {"bf16_tiles", kBf16, 700, 3, 5, 512, 640},
      {"bf16_many_rows", kBf16, 5000, 2, 4, 64, 96, {}, 60},
      {"bf16_interleaved", kBf16, 140, 2, 6, 160, 352, act(swiglu_oai, true, 7.0f), 20, true,
       Order::interleaved},
      {"bf16_gelu", kBf16, 90, 2, 4, 64, 96, act(gelu)},
      {"bf16_gelu_tanh", kBf16, 90, 2, 4, 64, 96, act(gelu_tanh)},
      {"bf16_silu_clamped", kBf16, 90, 2, 4, 64, 96, act(silu, true, 0.5f)},
      {"bf16_relu2_no_gate", kBf16, 300, 2, 4, 128, 416, act(relu2, false), 30, true},
      {"bf16_silu_no_gate", kBf16, 77, 1, 4, 64, 512, act(silu, false)},
      {"bf16_gptoss_depth", kBf16, 24, 2, 4, 2880, 480},
      {"fp8_one_token", kFp8, 1, 2, 4, 128, 128},
      {"fp8_small", kFp8, 37, 2, 5, 160, 288},
      {"fp8_ragged", kFp8, 210, 4, 8, 256, 384, {}, 0, true},
      {"fp8_hot", kFp8, 530, 2, 4, 384, 256, {}, 85},
      {"fp8_tiles", kFp8, 700, 3, 5, 512, 640},
      {"fp8_swiglu_oai", kFp8, 140, 2, 6, 160, 352, act(swiglu_oai, true, 7.0f), 20, true,
       Order::interleaved},
  };
  add_panel_cases("mxfp4", gemm::Format::mxfp4, list);
  add_panel_cases("nvfp4", gemm::Format::nvfp4, list);
  add_panel_cases("mxfp8", gemm::Format::mxfp8, list);
  return list;
}

class LayerTest : public ::testing::TestWithParam<LayerCase> {};

TEST_P(LayerTest, AgreesWithDoubleLoops) {
  MOEKIT_NEEDS_GPU(90);
  const LayerCase& c = GetParam();
  const HostLayer host = make_layer(c);
  // About 2e8 multiplications a case: large ones check every n-th token.
  const int64_t cost = c.top_k * 3 * int64_t{c.hidden} * c.inter;
  const int64_t stride = std::max<int64_t>(1, c.tokens * cost / 200000000);
  const auto expected = expected_output(c, host, stride);
  std::vector<float> first;
  for (const TaskForm form : forms(c.format)) {
    for (const bool overlap : {false, true}) {
      DeviceLayer device(c, host, form, overlap);
      device.use_split();
      device.enqueue(nullptr);
      const auto got = device.result();
      expect_close(c, got, expected);
      EXPECT_TRUE(std::none_of(got.begin(), got.end(), [](float v) { return v != v; }));
      // Knobs change speed only.
      if (first.empty()) first = got;
      EXPECT_EQ(std::memcmp(first.data(), got.data(), got.size() * 4), 0)
          << static_cast<int>(form) << overlap;
    }
  }
}

std::vector<LayerCase> decode_cases() {
  using enum ActivationKind;
  constexpr auto kFp8 = gemm::Format::fp8_block;
  std::vector<LayerCase> list, all = layer_cases();
  // What the split layer does not take, and fp8 rows whose last block has 32, 64 or 96 columns.
  for (const LayerCase& c : {
           LayerCase{"fp8_no_gate", kFp8, 0, 2, 4, 352, 416, act(silu, false), 30, true},
           LayerCase{"fp8_tails", kFp8, 0, 3, 5, 1056, 1120, {}, 40, true, Order::interleaved},
           LayerCase{"fp8_less_than_a_block", kFp8, 0, 2, 4, 96, 32},
           LayerCase{"fp8_gptoss_depth", kFp8, 0, 2, 4, 2880, 480, act(gelu_tanh), 0, true},
           LayerCase{"fp8_long_rows", kFp8, 0, 2, 4, 7168, 96},
           LayerCase{"fp8_many_experts", kFp8, 0, 8, 64, 160, 352},
       }) {
    all.push_back(c);
  }
  // The same shapes, few tokens: shared experts, absent ones, more tokens an expert than a pass
  // takes.
  for (const LayerCase& c : all) {
    for (const int64_t tokens : {1, 3, 8}) {
      LayerCase few = c;
      few.tokens = tokens;
      few.name = c.name + "_" + std::to_string(tokens);
      list.push_back(few);
    }
  }
  return list;
}

class DecodeTest : public ::testing::TestWithParam<LayerCase> {};

TEST_P(DecodeTest, AgreesWithDoubleLoops) {
  MOEKIT_NEEDS_GPU(90);
  const LayerCase& c = GetParam();
  const HostLayer host = make_layer(c);
  const auto expected = expected_output(c, host, 1);
  // On the whole GPU warps share units; on three multiprocessors each warp has several. Where
  // blocks have one strip of 16 columns each, or two, down adds up its slots itself.
  for (const int num_sms : {device::properties(0).num_sms, 3, c.hidden / 16, c.hidden / 32}) {
    std::vector<float> first;
    for (const bool overlap : {false, true}) {
      DeviceLayer device(c, host, TaskForm::automatic, overlap);
      ASSERT_EQ(DecodeLayer::refusal(device.spec), nullptr);
      device.use_decode(num_sms);
      for (int round = 0; round < 2; ++round) {
        device.decode->run(device.x.data(), device.ids.data(), device.weights.data(), c.tokens,
                           nullptr, device.out.data(), nullptr);
        const auto got = device.result();
        expect_close(c, got, expected);
        if (first.empty()) first = got;
        EXPECT_EQ(std::memcmp(first.data(), got.data(), got.size() * 4), 0) << overlap << round;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DecodeTest, ::testing::ValuesIn(decode_cases()),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Cases, LayerTest, ::testing::ValuesIn(layer_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(Layer, GraphReplayFollowsTheRouting) {
  MOEKIT_NEEDS_GPU(90);
  for (const auto format :
       {gemm::Format::bf16, gemm::Format::fp8_block, gemm::Format::mxfp4, gemm::Format::nvfp4}) {
    LayerCase c{"graph", format, 150, 2, 6, 128, 256};
    const HostLayer host = make_layer(c);
    DeviceLayer device(c, host, forms(format).back(), true);
    device.use_split();
    device::Stream stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    device::check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal),
                       "capture");
    device.enqueue(stream.get());
    device::check_cuda(cudaStreamEndCapture(stream.get(), &graph), "capture");
    device::check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    for (const int hot : {0, 100, 40}) {
      LayerCase other = c;
      other.hot = hot;
      HostLayer routed = host;
      routed.ids = make_layer(other).ids;
      device.ids.set(routed.ids);
      device::check_cuda(cudaGraphLaunch(exec, stream.get()), "graph");
      stream.synchronize();
      expect_close(c, device.result(), expected_output(c, routed, 1));
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
}

TEST(Layer, RowAloneHasTheBitsOfTheRowInABatch) {
  MOEKIT_NEEDS_GPU(90);
  for (const auto format : {gemm::Format::bf16, gemm::Format::mxfp4, gemm::Format::mxfp8}) {
    LayerCase c{"rows", format, 300, 2, 4, 128, 256};
    const HostLayer host = make_layer(c);
    std::vector<float> all;
    for (const TaskForm form : forms(format)) {
      DeviceLayer batch(c, host, form, true);
      batch.use_split();
      batch.enqueue(nullptr);
      const auto rows = batch.result();
      if (all.empty()) all = rows;
      EXPECT_EQ(std::memcmp(rows.data(), all.data(), rows.size() * 4), 0) << static_cast<int>(form);
    }
    for (const int64_t t : {0, 17, 299}) {
      LayerCase one = c;
      one.tokens = 1;
      HostLayer single = host;
      single.x.assign(host.x.begin() + t * c.hidden, host.x.begin() + (t + 1) * c.hidden);
      single.ids.assign(host.ids.begin() + t * c.top_k, host.ids.begin() + (t + 1) * c.top_k);
      single.weights.assign(host.weights.begin() + t * c.top_k,
                            host.weights.begin() + (t + 1) * c.top_k);
      DeviceLayer alone(one, single, TaskForm::plain, false);
      alone.use_split();
      alone.enqueue(nullptr);
      const auto row = alone.result();
      EXPECT_EQ(std::memcmp(row.data(), all.data() + t * c.hidden, row.size() * 4), 0) << t;
    }
  }
}

TEST(ReferenceProduct, DecodesEveryCoveredFormat) {
  MOEKIT_NEEDS_GPU(80);
  struct Format {
    WeightFormat format;
    int64_t code_bits, scale_count, scale_bytes;
  };
  const int64_t experts = 3, n = 160, k = 288, slots = 9;
  const Format formats[] = {
      {WeightFormat::bf16, 16, 0, 0},          {WeightFormat::f32, 32, 0, 0},
      {WeightFormat::fp8_tensor, 8, 1, 4},     {WeightFormat::fp8_channel, 8, n, 4},
      {WeightFormat::fp8_block, 8, 2 * 3, 4},  {WeightFormat::mxfp8, 8, n * k / 32, 1},
      {WeightFormat::mxfp4, 4, n * k / 32, 1}, {WeightFormat::nvfp4, 4, n * k / 16, 1},
  };
  for (const Format& f : formats) {
    Random random(static_cast<uint64_t>(f.format));
    const int64_t code_bytes = n * k * f.code_bits / 8;
    std::vector<uint8_t> codes(experts * code_bytes),
        scales(experts * f.scale_count * f.scale_bytes + 4);
    for (int64_t i = 0; i < experts * n * k; ++i) {
      const float v = random.normal();
      if (f.code_bits == 32) std::memcpy(&codes[i * 4], &v, 4);
      if (f.code_bits == 16)
        codes[2 * i] = f32_to_bf16(v) & 255, codes[2 * i + 1] = f32_to_bf16(v) >> 8;
      if (f.code_bits == 8) codes[i] = f32_to_e4m3(v);
      if (f.code_bits == 4) codes[i / 2] |= static_cast<uint8_t>(f32_to_e2m1(v) << (i % 2 * 4));
    }
    for (int64_t i = 0; i < experts * f.scale_count; ++i) {
      const float s = 0.25f + random.uniform();
      if (f.scale_bytes == 4) std::memcpy(&scales[i * 4], &s, 4);
      if (f.scale_bytes == 1) {
        scales[i] = f.format == WeightFormat::nvfp4 ? f32_to_e4m3(s)
                                                    : static_cast<uint8_t>(120 + random.below(10));
      }
    }
    const std::vector<float> globals{0.5f, 2.0f, 3.0f}, bias(experts * n, 0.125f);
    auto value = [&](int64_t e, int64_t r, int64_t c) -> double {
      const uint8_t* code = codes.data() + e * code_bytes;
      const uint8_t* scale = scales.data() + e * f.scale_count * f.scale_bytes;
      const int64_t i = r * k + c;
      auto f32_at = [](const uint8_t* p, int64_t j) {
        float v;
        std::memcpy(&v, p + j * 4, 4);
        return double{v};
      };
      const double e2m1 = e2m1_to_f32(code[i * f.code_bits / 8] >> (i % 2 * 4) & 15);
      switch (f.format) {
        case WeightFormat::bf16:
          return bf16_to_f32(static_cast<uint16_t>(code[2 * i] | code[2 * i + 1] << 8));
        case WeightFormat::f32: return f32_at(code, i);
        case WeightFormat::fp8_tensor: return e4m3_to_f32(code[i]) * f32_at(scale, 0);
        case WeightFormat::fp8_channel: return e4m3_to_f32(code[i]) * f32_at(scale, r);
        case WeightFormat::fp8_block:
          return e4m3_to_f32(code[i]) * f32_at(scale, r / 128 * 3 + c / 128);
        case WeightFormat::mxfp8: return e4m3_to_f32(code[i]) * double{e8m0_to_f32(scale[i / 32])};
        case WeightFormat::mxfp4: return e2m1 * double{e8m0_to_f32(scale[i / 32])};
        case WeightFormat::nvfp4: return e2m1 * e4m3_to_f32(scale[i / 16]) / globals[e];
        default: return 0.0;
      }
    };
    std::vector<float> in(slots / 3 * k);
    for (auto& v : in) v = random.normal();
    const std::vector<int32_t> ids{0, 1, 2, 2, -1, 0, 1, 7, 0};
    DeviceArray<uint8_t> device_codes(codes), device_scales(scales);
    DeviceArray<float> device_globals(globals), device_bias(bias), device_in(in);
    DeviceArray<float> out(std::vector<float>(slots * n, -77.0f));
    DeviceArray<int32_t> device_ids(ids);
    rows::ExpertMatrices m;
    m.scheme.format = f.format;
    m.rows = n;
    m.cols = k;
    m.codes = device_codes.data();
    m.expert_code_bytes = code_bytes;
    m.scales = device_scales.data();
    m.expert_scale_bytes = f.scale_count * f.scale_bytes;
    m.globals = device_globals.data();
    m.global_sense = ScaleSense::divisor;
    m.bias = device_bias.data();
    ASSERT_EQ(rows::reference_refusal(m), nullptr);
    device::check_cuda(rows::reference_product(device_in.data(), 3, device_ids.data(), slots,
                                               experts, m, out.data(), n, nullptr),
                       "reference product");
    const auto got = out.get();
    for (int64_t s = 0; s < slots; ++s) {
      for (int64_t r = 0; r < n; ++r) {
        if (ids[s] < 0 || ids[s] >= experts) {
          ASSERT_EQ(got[s * n + r], -77.0f);
          continue;
        }
        double sum = 0.125, size = 0.125;
        for (int64_t c = 0; c < k; ++c) {
          const double product = double{in[s / 3 * k + c]} * value(ids[s], r, c);
          sum += product;
          size += std::fabs(product);
        }
        // fp32 sums of k terms in any order: k/32 + 5 roundings of at most the running size.
        ASSERT_NEAR(got[s * n + r], sum, size * 16 * 0x1p-24)
            << to_string(f.format) << " " << s << " " << r;
      }
    }
  }
}

}  // namespace
}  // namespace moekit::testing
