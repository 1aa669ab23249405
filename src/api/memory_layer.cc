#include "api/memory_layer.h"

#include <string>

#include "api/announced.h"
#include "base/check.h"
#include "base/math.h"

namespace moekit::api {
namespace {

/// What a weight format's tensors look like: code types and codes a unit.
struct FormatTraits {
  bool (*codes)(DType);
  int pack;           ///< codes a stored unit when the unit is a byte or word
  int64_t row_group;  ///< of the scales; 0 = whole axis
  int64_t col_group;
  bool has_scales;
  bool integers = false;
};

FormatTraits traits_of(const WeightScheme& scheme) {
  auto e4m3 = [](DType t) { return t == DType::f8_e4m3 || t == DType::u8; };
  auto e5m2 = [](DType t) { return t == DType::f8_e5m2 || t == DType::u8; };
  auto fp4 = [](DType t) { return t == DType::f4_e2m1 || t == DType::u8; };
  auto int8 = [](DType t) { return t == DType::i8 || t == DType::u8; };
  auto int4 = [](DType t) { return t == DType::u8; };
  const int64_t group = scheme.group;
  switch (scheme.format) {
    case WeightFormat::bf16: return {[](DType t) { return t == DType::bf16; }, 1, 0, 0, false};
    case WeightFormat::f16: return {[](DType t) { return t == DType::f16; }, 1, 0, 0, false};
    case WeightFormat::f32: return {[](DType t) { return t == DType::f32; }, 1, 0, 0, false};
    case WeightFormat::fp8_tensor: return {e4m3, 1, 0, 0, true};
    case WeightFormat::fp8_channel: return {e4m3, 1, 1, 0, true};
    case WeightFormat::fp8_block: return {e4m3, 1, 128, 128, true};
    case WeightFormat::mxfp8: return {e4m3, 1, 1, 32, true};
    case WeightFormat::mxfp8_e5m2: return {e5m2, 1, 1, 32, true};
    case WeightFormat::mxfp4: return {fp4, 2, 1, 32, true};
    case WeightFormat::nvfp4: return {fp4, 2, 1, 16, true};
    case WeightFormat::int4_group: return {int4, 2, 1, group, true, true};
    case WeightFormat::int8_group: return {int8, 1, 1, group, true, true};
    case WeightFormat::int4_channel: return {int4, 2, 1, 0, true, true};
    case WeightFormat::int8_channel: return {int8, 1, 1, 0, true, true};
  }
  return {int8, 1, 0, 0, true, true};
}

const std::byte* bytes(const TensorView& v) { return static_cast<const std::byte*>(v.data); }

/// One logical matrix out of a tensor: where it starts and how its axes run.
struct Slice {
  std::string name;
  int64_t rows = 0, cols = 0;  ///< logical
  int64_t stored_rows = 0;     ///< of the tensor's output axis (2I when stacked)
  int64_t row_first = 0, row_step = 1;
  int64_t expert = -1;  ///< leading index, or -1 for a tensor per expert
  int64_t num_experts = 0;
  bool transposed = false;  ///< output axis last
};

float scalar(const TensorView& v, const Slice& slice, const char* what, float otherwise) {
  if (v.empty()) return otherwise;
  const bool per_expert = slice.expert >= 0 && v.num_elements() == slice.num_experts;
  MOEKIT_CHECK(
      v.dtype == DType::f32 && (v.num_elements() == 1 || per_expert),
      "{}: {} must be one f32 (or one an expert for stacked weights), got {} elements of {}",
      slice.name, what, v.num_elements(), to_string(v.dtype));
  const int64_t index = per_expert && v.rank > 0 ? slice.expert * v.strides[0] : 0;
  return static_cast<const float*>(v.data)[index];
}

/// Codes or scales as a grid. `rows` and `cols` count stored elements of the tensor in the slice's
/// logical orientation.
CodeGrid grid(const TensorView& v, const Slice& slice, const char* what, int pack, int64_t rows,
              int64_t cols) {
  const int lead = slice.expert >= 0 ? 1 : 0;
  const bool packed_bytes = pack > 1 && v.dtype == DType::u8;
  const int64_t stored_cols = packed_bytes ? ceil_div(cols, pack) : cols;
  const int row_axis = lead + (slice.transposed ? 1 : 0);
  const int col_axis = lead + (slice.transposed ? 0 : 1);
  const bool column_vector = v.rank == lead + 1 && cols == 1;  // scales [N] for [N, 1]
  const bool single =
      v.num_elements() == (lead != 0 ? slice.num_experts : 1) && rows == 1 && cols == 1;
  const bool fits =
      single || (column_vector && v.shape[lead] == rows) ||
      (v.rank == lead + 2 && v.shape[row_axis] == rows && v.shape[col_axis] == stored_cols);
  MOEKIT_CHECK(
      v.data != nullptr && fits && (lead == 0 || v.rank == 0 || v.shape[0] == slice.num_experts),
      "{}: {} must be {}[{}, {}], got rank {} [{}, {}, {}]", slice.name, what,
      lead != 0 ? "[E] x " : "", slice.transposed ? stored_cols : rows,
      slice.transposed ? rows : stored_cols, v.rank, v.shape[0], v.shape[1], v.shape[2]);
  const int64_t unit_bits = packed_bytes ? 8 : bits_of(v.dtype);
  CodeGrid g;
  g.unit = v.dtype == DType::f4_e2m1 ? DType::u8 : v.dtype;
  g.pack = pack;
  g.pack_axis = pack > 1 ? PackAxis::cols : PackAxis::none;
  g.data = bytes(v);
  if (lead != 0 && v.rank > 0) g.data += slice.expert * v.strides[0] * unit_bits / 8;
  if (single) return g;
  g.row_stride = v.strides[column_vector ? lead : row_axis] * unit_bits / 8;
  if (!column_vector) {
    // A packed f4 view strides over elements, the grid over bytes of two.
    g.col_stride =
        v.dtype == DType::f4_e2m1 ? v.strides[col_axis] : v.strides[col_axis] * unit_bits / 8;
    MOEKIT_CHECK(
        v.dtype != DType::f4_e2m1 || (v.strides[col_axis] == 1 && v.strides[row_axis] % 2 == 0),
        "{}: f4 codes must be packed along the last axis in whole bytes", slice.name);
  }
  return g;
}

StoredMatrix matrix(const MatrixTensors& tensors, const WeightScheme& scheme, const Slice& slice,
                    ScaleSense sense) {
  const FormatTraits traits = traits_of(scheme);
  MOEKIT_CHECK(!tensors.codes.empty(), "{}: the weight tensor is missing", slice.name);
  MOEKIT_CHECK(traits.codes(tensors.codes.dtype), "{}: {} codes can't be {}", slice.name,
               to_string(scheme.format), to_string(tensors.codes.dtype));
  StoredMatrix m;
  m.rows = slice.rows;
  m.cols = slice.cols;
  m.scheme = scheme;
  m.row_first = slice.row_first;
  m.row_step = slice.row_step;
  m.codes = grid(tensors.codes, slice, "the weight", traits.pack, slice.stored_rows, slice.cols);
  if (scheme.format == WeightFormat::int4_group || scheme.format == WeightFormat::int4_channel) {
    m.code_offset = scheme.zero_points ? 0 : 8;
  } else if (tensors.codes.dtype == DType::u8 && traits.pack == 1 &&
             (scheme.format == WeightFormat::int8_group ||
              scheme.format == WeightFormat::int8_channel)) {
    m.code_offset = scheme.zero_points ? 0 : 128;
  }
  MOEKIT_CHECK(traits.has_scales != tensors.scales.empty(), "{}: {} {} scales", slice.name,
               to_string(scheme.format), traits.has_scales ? "needs" : "takes no");
  MOEKIT_CHECK(traits.integers || !scheme.zero_points, "{}: {} has no zero points", slice.name,
               to_string(scheme.format));
  MOEKIT_CHECK(scheme.zero_points != tensors.zeros.empty(), "{}: {} {} zero points", slice.name,
               to_string(scheme.format),
               scheme.zero_points ? "with zero_points needs its" : "without zero_points takes no");
  if (traits.has_scales) {
    auto groups = [](int64_t size, int64_t group) {
      return group == 0 ? 1 : ceil_div(size, group);
    };
    m.scales.row_group = traits.row_group;
    m.scales.col_group = traits.col_group;
    const int64_t rows = groups(slice.stored_rows, traits.row_group);
    const int64_t cols = groups(slice.cols, traits.col_group);
    m.scales.values = grid(tensors.scales, slice, "scales", 1, rows, cols);
    if (m.scales.values.unit == DType::u8) {
      m.scales.values.unit = scheme.format == WeightFormat::nvfp4 ? DType::f8_e4m3 : DType::f8_e8m0;
    }
    if (scheme.zero_points) {
      m.zeros.row_group = traits.row_group;
      m.zeros.col_group = traits.col_group;
      m.zeros.values = grid(tensors.zeros, slice, "zero points", 1, rows, cols);
    }
  }
  m.global = scalar(tensors.global, slice, "global", 1.0f);
  MOEKIT_CHECK((scheme.format == WeightFormat::nvfp4) != tensors.global.empty(),
               "{}: {} {} fp32 global scale", slice.name, to_string(scheme.format),
               scheme.format == WeightFormat::nvfp4 ? "needs its" : "takes no");
  m.global_sense = sense;
  m.input_scale = scalar(tensors.input_scale, slice, "input_scale", 1.0f);
  return m;
}

StoredVector bias(const TensorView& v, const Slice& slice) {
  if (v.empty()) return {};
  const int lead = slice.expert >= 0 ? 1 : 0;
  MOEKIT_CHECK(v.rank == lead + 1 && v.shape[lead] == slice.stored_rows && v.strides[lead] == 1,
               "{}: the bias must be {}[{}] with unit stride", slice.name,
               lead != 0 ? "[E] x " : "", slice.stored_rows);
  StoredVector out;
  out.data = bytes(v) + (lead != 0 ? slice.expert * v.strides[0] * bytes_of(v.dtype) : 0);
  out.dtype = v.dtype;
  out.size = slice.rows;
  out.first = slice.row_first;
  out.step = slice.row_step;
  return out;
}

StoredMatrix dense(const TensorView& v, const char* name, int64_t rows, int64_t cols) {
  const WeightFormat format = v.dtype == DType::f32   ? WeightFormat::f32
                              : v.dtype == DType::f16 ? WeightFormat::f16
                                                      : WeightFormat::bf16;
  MatrixTensors tensors;
  tensors.codes = v;
  return matrix(tensors, {format}, {.name = name, .rows = rows, .cols = cols, .stored_rows = rows},
                ScaleSense::multiplier);
}

StoredVector vector(const TensorView& v, const char* name, int64_t size) {
  return bias(v, {.name = name, .rows = size, .stored_rows = size});
}

void add_stacked(const MoeConfig& c, const LayerTensors& t, CanonicalLayer& layer) {
  const int64_t width = c.routed_width();
  const int64_t halves = c.activation.gated ? 2 : 1;
  MOEKIT_CHECK(t.stacked_order == StackedOrder::gate_up ||
                   t.stacked_order == StackedOrder::up_gate ||
                   t.stacked_order == StackedOrder::interleaved,
               "unknown order of stacked rows: {}", static_cast<int>(t.stacked_order));
  for (int64_t e = 0; e < c.num_experts; ++e) {
    Slice up{.name = fmt::format("gate_up_stacked[{}]", e),
             .rows = c.inter,
             .cols = width,
             .stored_rows = halves * c.inter,
             .expert = e,
             .num_experts = c.num_experts,
             .transposed = t.transposed};
    Slice gate = up;
    if (c.activation.gated) {
      const bool interleaved = t.stacked_order == StackedOrder::interleaved;
      gate.row_step = up.row_step = interleaved ? 2 : 1;
      up.row_first = interleaved ? 1 : t.stacked_order == StackedOrder::gate_up ? c.inter : 0;
      gate.row_first = interleaved ? 0 : t.stacked_order == StackedOrder::gate_up ? 0 : c.inter;
    }
    StoredExpert& expert = layer.experts[e];
    if (c.activation.gated) {
      expert.gate = matrix(t.gate_up_stacked, c.gate_up_weights, gate, t.global_sense);
      expert.gate_bias = bias(t.gate_up_stacked.bias, gate);
    }
    expert.up = matrix(t.gate_up_stacked, c.gate_up_weights, up, t.global_sense);
    expert.up_bias = bias(t.gate_up_stacked.bias, up);
    const Slice down{.name = fmt::format("down_stacked[{}]", e),
                     .rows = width,
                     .cols = c.inter,
                     .stored_rows = width,
                     .expert = e,
                     .num_experts = c.num_experts,
                     .transposed = t.transposed};
    expert.down = matrix(t.down_stacked, c.down_weights, down, t.global_sense);
    expert.down_bias = bias(t.down_stacked.bias, down);
  }
}

StoredExpert expert_from(const MatrixTensors* gate, const MatrixTensors& up,
                         const MatrixTensors& down, const std::string& name, int64_t width,
                         int64_t inter, WeightScheme gate_up_scheme, WeightScheme down_scheme,
                         ScaleSense sense) {
  StoredExpert expert;
  const Slice in{.name = name + ".up", .rows = inter, .cols = width, .stored_rows = inter};
  const Slice out{.name = name + ".down", .rows = width, .cols = inter, .stored_rows = width};
  if (gate != nullptr) {
    Slice gate_slice = in;
    gate_slice.name = name + ".gate";
    expert.gate = matrix(*gate, gate_up_scheme, gate_slice, sense);
    expert.gate_bias = bias(gate->bias, gate_slice);
  }
  expert.up = matrix(up, gate_up_scheme, in, sense);
  expert.up_bias = bias(up.bias, in);
  expert.down = matrix(down, down_scheme, out, sense);
  expert.down_bias = bias(down.bias, out);
  return expert;
}

void add_per_expert(const MoeConfig& c, const LayerTensors& t, CanonicalLayer& layer) {
  const size_t count = static_cast<size_t>(c.num_experts);
  MOEKIT_CHECK(t.up.size() == count && t.down.size() == count &&
                   t.gate.size() == (c.activation.gated ? count : 0),
               "expected {} gate, {} up and {} down matrices, got {}, {} and {}",
               c.activation.gated ? count : 0, count, count, t.gate.size(), t.up.size(),
               t.down.size());
  for (size_t e = 0; e < count; ++e) {
    layer.experts[e] = expert_from(c.activation.gated ? &t.gate[e] : nullptr, t.up[e], t.down[e],
                                   fmt::format("expert {}", e), c.routed_width(), c.inter,
                                   c.gate_up_weights, c.down_weights, t.global_sense);
  }
}

void check_config(const MoeConfig& c) {
  MOEKIT_CHECK(
      c.num_experts > 0 && c.hidden > 0 && c.inter > 0 && c.latent >= 0 && c.shared.inter >= 0,
      "num_experts, hidden and inter must be positive, latent and shared.inter 0 or more; got {}, "
      "{}, {}, {}, {}",
      c.num_experts, c.hidden, c.inter, c.latent, c.shared.inter);
  MOEKIT_CHECK(c.num_experts <= (1 << 24) && c.hidden <= (1 << 24) && c.inter <= (1 << 24),
               "sizes beyond 2^24 are refused: num_experts {}, hidden {}, inter {}", c.num_experts,
               c.hidden, c.inter);
  MOEKIT_CHECK(c.top_k > 0 && c.top_k <= c.num_experts,
               "top_k must lie in [1, num_experts = {}], got {}", c.num_experts, c.top_k);
}

}  // namespace

StoredMatrix matrix_from_tensors(const MatrixTensors& tensors, const WeightScheme& scheme,
                                 int64_t rows, int64_t cols, ScaleSense global_sense) {
  return matrix(tensors, scheme,
                {.name = "matrix", .rows = rows, .cols = cols, .stored_rows = rows}, global_sense);
}

std::shared_ptr<const CanonicalLayer> layer_from_tensors(const MoeConfig& config,
                                                         const LayerTensors& tensors) {
  check_config(config);
  check_announced(config, tensors);
  auto layer = std::make_shared<CanonicalLayer>();
  layer->config = config;
  layer->family = "custom";
  const MoeConfig& c = layer->config;
  layer->experts.resize(static_cast<size_t>(c.num_experts));
  const bool stacked = !tensors.gate_up_stacked.codes.empty();
  MOEKIT_CHECK(
      stacked ? tensors.gate.empty() && tensors.up.empty() && tensors.down.empty()
              : tensors.down_stacked.codes.empty(),
      "weights come stacked (gate_up_stacked and down_stacked) or per expert (gate, up and "
      "down), not both");
  if (stacked) {
    add_stacked(c, tensors, *layer);
  } else {
    add_per_expert(c, tensors, *layer);
  }
  if (!tensors.router_weight.empty()) {
    layer->router.weight = dense(tensors.router_weight, "router_weight", c.num_experts, c.hidden);
  }
  layer->router.logit_bias = vector(tensors.router_bias, "router_bias", c.num_experts);
  layer->router.selection_bias = vector(tensors.selection_bias, "selection_bias", c.num_experts);
  if (c.shared.inter > 0) {
    layer->shared = expert_from(c.activation.gated ? &tensors.shared_gate_proj : nullptr,
                                tensors.shared_up_proj, tensors.shared_down_proj, "shared expert",
                                c.hidden, c.shared.inter, c.shared.gate_up_weights,
                                c.shared.down_weights, tensors.global_sense);
    if (c.shared.sigmoid_gate)
      layer->shared_gate = dense(tensors.shared_gate, "shared_gate", 1, c.hidden);
  }
  if (c.latent > 0) {
    layer->latent_in = dense(tensors.latent_in, "latent_in", c.latent, c.hidden);
    layer->latent_out = dense(tensors.latent_out, "latent_out", c.hidden, c.latent);
  }
  return layer;
}

}  // namespace moekit::api
