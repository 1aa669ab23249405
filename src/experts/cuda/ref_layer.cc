#include "experts/cuda/ref_layer.h"

#include <algorithm>

#include "base/check.h"
#include "device/cuda/device.h"
#include "experts/cuda/stage_clock.h"
#include "quant/row_format.h"

namespace moekit::experts::cuda {

namespace rows = kernels::smxx_moe;
using device::check_cuda;
using trace::Stage;

namespace {

constexpr int64_t kPiece = 512;  // tokens

RowFormat format_of(const ActivationScheme& scheme, int64_t width) {
  return RowFormat::of(scheme.format, width);
}

int64_t bytes_of(rows::RowType type) { return type == rows::RowType::f32 ? 4 : 2; }

}  // namespace

RefLayer::Regions::Regions(const RefLayerSpec& spec) {
  const MoeConfig& c = spec.config;
  const int64_t tokens = std::min(spec.max_tokens, kPiece);
  const int64_t slots = tokens * c.top_k;
  const RowFormat in = format_of(c.gate_up_input, c.routed_width());
  const RowFormat inter = format_of(c.down_input, c.inter);
  codes = layout.add(std::max(tokens * in.code_bytes, slots * inter.code_bytes), 1);
  scales = layout.add(
      std::max(tokens * round_up(in.scale_bytes, 4), slots * round_up(inter.scale_bytes, 4)), 1);
  x = layout.add(tokens * c.routed_width(), 4);
  gate_up = layout.add(slots * c.inter * (c.activation.gated ? 2 : 1), 4);
  act = layout.add(slots * c.inter, 4);
  h = layout.add(slots * c.inter, 4);
  y = layout.add(checked_mul(slots, c.routed_width(), "slot rows"), 4);
}

int64_t RefLayer::workspace_bytes(const RefLayerSpec& spec) { return Regions(spec).layout.total(); }

RefLayer::RefLayer(const RefLayerSpec& spec, const RefLayerWeights& weights, void* workspace)
    : spec_(spec),
      weights_(weights),
      regions_(spec),
      workspace_(static_cast<std::byte*>(workspace)) {
  const rows::ExpertMatrices* matrices[] = {&weights.up, &weights.down, &weights.gate};
  for (int i = 0; i < (spec.config.activation.gated ? 3 : 2); ++i) {
    const char* reason = rows::reference_refusal(*matrices[i]);
    MOEKIT_CHECK_AS(ErrorCode::unsupported, reason == nullptr, "reference layer: {}", reason);
  }
}

/// What a GEMM reads of the rows: quantized and decoded again, f32.
void RefLayer::read_rows(const void* from, rows::RowType type, int64_t num_rows, int64_t width,
                         const ActivationScheme& scheme, float* out, cudaStream_t stream) const {
  const bool quantized = is_quantized(scheme.format);
  rows::QuantizedRows q;
  q.scheme = scheme;
  q.width = width;
  if (quantized) {
    const RowFormat format = format_of(scheme, width);
    q.codes = regions_.codes.in<void>(workspace_);
    q.row_bytes = format.code_bytes;
    q.scales = regions_.scales.in<void>(workspace_);
    q.scale_row_bytes = round_up(format.scale_bytes, 4);
    check_cuda(
        rows::quantize_rows(from, type, width * bytes_of(type), num_rows, nullptr, q, stream),
        "quantize kernel");
  } else {
    // Rows of a plain type are decoded as what they are.
    q.scheme.format = type == rows::RowType::f32 ? ActivationFormat::f32 : ActivationFormat::bf16;
    q.codes = const_cast<void*>(from);
    q.row_bytes = width * bytes_of(type);
  }
  check_cuda(rows::dequantize_rows(q, num_rows, out, stream), "dequantize kernel");
}

void RefLayer::run_piece(const void* from, rows::RowType row_type, const int32_t* ids,
                         const float* weights, int64_t num_tokens, void* out,
                         rows::RowType out_type, cudaStream_t stream, StageClock* clock) const {
  const MoeConfig& c = spec_.config;
  const int64_t width = c.routed_width();
  const int64_t slots = num_tokens * c.top_k;
  const auto top_k = static_cast<int32_t>(c.top_k);
  const auto experts = static_cast<int32_t>(spec_.num_experts);
  const bool gated = c.activation.gated;
  auto* x = regions_.x.in<float>(workspace_);
  auto* gate_up = regions_.gate_up.in<float>(workspace_);
  auto* act = regions_.act.in<void>(workspace_);
  auto* h = regions_.h.in<float>(workspace_);
  auto* y = regions_.y.in<float>(workspace_);
  read_rows(from, row_type, num_tokens, width, c.gate_up_input, x, stream);
  mark(clock, Stage::quantize);
  const int64_t stride = gated ? 2 * c.inter : c.inter;
  auto product = [&](const rows::ExpertMatrices& m, const float* in, int32_t per_row, float* to,
                     int64_t to_stride) {
    check_cuda(rows::reference_product(in, per_row, ids, slots, experts, m, to, to_stride, stream),
               "reference product");
  };
  if (gated) product(weights_.gate, x, top_k, gate_up, stride);
  product(weights_.up, x, top_k, gate_up + (gated ? c.inter : 0), stride);
  const rows::RowType act_type =
      c.down_input.format == ActivationFormat::bf16 ? rows::RowType::bf16 : rows::RowType::f32;
  check_cuda(rows::activate_rows(gate_up, slots, c.inter, c.activation, act_type, act, stream),
             "activation kernel");
  mark(clock, Stage::gemm1);
  read_rows(act, act_type, slots, c.inter, c.down_input, h, stream);
  mark(clock, Stage::quantize);
  product(weights_.down, h, 1, y, width);
  mark(clock, Stage::gemm2);
  check_cuda(rows::combine_rows(y, rows::RowType::f32, ids, weights, num_tokens, nullptr, top_k,
                                experts, width, out_type, out, stream),
             "combine kernel");
  mark(clock, Stage::sum);
}

void RefLayer::run(const void* from, rows::RowType row_type, const int32_t* ids,
                   const float* weights, int64_t num_tokens, void* out, rows::RowType out_type,
                   cudaStream_t stream, StageClock* clock) const {
  const int64_t width = spec_.config.routed_width();
  const int64_t top_k = spec_.config.top_k;
  for (int64_t first = 0; first < num_tokens; first += kPiece) {
    run_piece(static_cast<const std::byte*>(from) + first * width * bytes_of(row_type), row_type,
              ids + first * top_k, weights + first * top_k, std::min(kPiece, num_tokens - first),
              static_cast<std::byte*>(out) + first * width * bytes_of(out_type), out_type, stream,
              clock);
  }
}

}  // namespace moekit::experts::cuda
