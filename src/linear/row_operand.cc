#include "linear/row_operand.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/math.h"
#include "quant/block.h"
#include "quant/fp8.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"
#include "quant/row_codec.h"
#include "tensor/float_formats.h"
#include "tensor/float_tables.h"

namespace moekit::linear {

ProductPlan ProductPlan::of(CpuIsa isa, const PanelSpec& spec, const ActivationScheme& input) {
  ProductPlan plan;
  plan.input = input;
  plan.segment = segment_of(spec, input.format);
  plan.sums = spec.zeros;
  // Quantized inputs are exact in bf16: codes of at most 4 significant bits times block scales of
  // at most 4. f16 and f32 weights are not, nor are f32 block scales, which permuted values take
  // in.
  const bool takes_scales = spec.is_sorted() && input.format == ActivationFormat::fp8_block;
  const bool pairs = input.format != ActivationFormat::f32 && spec.code != Code::f16 &&
                     spec.code != Code::f32 && !takes_scales;
  plan.kernels = &linear::kernels(isa, pairs);
  if (plan.kernels->pairs) {
    plan.store = StoreAs::bf16;
  } else if (input.format == ActivationFormat::bf16) {
    plan.store = StoreAs::f32_of_bf16;
  }
  plan.code = spec.code;
  plan.k_padded = spec.k_padded();
  plan.panel_bytes = spec.panel_bytes();
  plan.scale_offset = spec.scale_offset();
  plan.zero_offset = spec.zero_offset();
  plan.terms_offset = spec.column_scale_offset();
  plan.panel.last_k = plan.k_padded;
  plan.panel.half_bytes = spec.half_bytes();
  plan.panel.group = spec.group;
  plan.panel.segment = static_cast<int32_t>(plan.segment);
  plan.panel.scale = spec.scale;
  return plan;
}

int64_t operand_stride(int64_t cols) { return round_up(cols, kBlockK) * 4 + 64; }

int64_t operand_extras(int64_t cols, ActivationFormat input, bool sums) {
  int64_t floats = input == ActivationFormat::fp8_block ? ceil_div(cols, int64_t{128}) : 0;
  if (sums) floats += round_up(cols, kBlockK) / 16;
  return round_up(floats, 16);
}

namespace {

/// A row's values and a zero behind them, which places without a column take.
int64_t values_bytes(int64_t cols) { return round_up((cols + 1) * 4, 64); }

}  // namespace

int64_t prepare_scratch_bytes(int64_t cols, int64_t places) {
  return values_bytes(cols) + round_up(places * 4, 64);
}

namespace {

/// Values of a record without what goes to the epilogue or the segments.
void decode_record(const RowFormat& f, const std::byte* record, float* x, RowOperand& row,
                   float* extras) {
  const auto* codes = reinterpret_cast<const uint8_t*>(record);
  const auto* scales = reinterpret_cast<const uint8_t*>(record + f.scale_offset);
  switch (f.format) {
    case ActivationFormat::f32:
    case ActivationFormat::bf16: return;
    case ActivationFormat::fp8_tensor:
    case ActivationFormat::fp8_token:
      for (int64_t i = 0; i < f.width; ++i) x[i] = kE4m3Values[codes[i]];
      std::memcpy(&row.scale, scales, 4);
      return;
    case ActivationFormat::fp8_block:
      for (int64_t i = 0; i < f.width; ++i) x[i] = kE4m3Values[codes[i]];
      std::memcpy(extras, scales, static_cast<size_t>(f.scale_bytes));
      row.block_scales = extras;
      return;
    case ActivationFormat::mxfp8:
      for (int64_t i = 0; i < f.width; ++i) {
        x[i] = kE4m3Values[codes[i]] * e8m0_to_f32(scales[i / 32]);
      }
      return;
    case ActivationFormat::mxfp4:
      for (int64_t i = 0; i < f.width; ++i) {
        x[i] = kE2m1Values[codes[i / 2] >> (i % 2 * 4) & 15] * e8m0_to_f32(scales[i / 32]);
      }
      return;
    case ActivationFormat::nvfp4:
      for (int64_t i = 0; i < f.width; ++i) {
        x[i] = kE2m1Values[codes[i / 2] >> (i % 2 * 4) & 15] * kE4m3Values[scales[i / 16]];
      }
      std::memcpy(&row.scale, record + f.scale_offset + f.scale_bytes - 4, 4);
      return;
  }
}

/// One block under an e8m0 scale: the values that its codes and scale stand for, exact in bf16.
void quantize_mx_block(const Kernels& k, quant::MxElement element, float* x, int64_t n) {
  const uint8_t scale = quant::mx_scale(k.abs_max(x, n), element);
  const float factor = e8m0_to_f32(scale);
  if (scale == 255) {
    std::fill_n(x, n, factor);  // 0 * NaN
    return;
  }
  (element == quant::MxElement::e4m3 ? k.round_e4m3 : k.round_e2m1)(x, n, factor);
  k.scale_values(x, n, factor);
}

/// One block of nvfp4: code values times block scale; the global stays apart.
void quantize_nvfp4_block(const Kernels& k, ScaleSense sense, float global, float* x, int64_t n) {
  const float amax = k.abs_max(x, n);
  if (quant::is_nan(amax) || quant::is_nan(global)) {
    std::fill_n(x, n, quant::quiet_nan());
    return;
  }
  float scale;
  if (sense == ScaleSense::divisor) {
    scale = kE4m3Values[f32_to_e4m3(amax / quant::kE2m1Max * global)];
    if (scale == 0.0f) scale = 0.125f;
    k.scale_values(x, n, global / scale);
    k.round_e2m1(x, n, 1.0f);
  } else {
    scale = kE4m3Values[f32_to_e4m3(amax / quant::kE2m1Max / global)];
    k.round_e2m1(x, n, scale == 0.0f ? std::numeric_limits<float>::infinity() : scale * global);
  }
  k.scale_values(x, n, scale);
}

/// What encode_row and decode_record make of x, without the codes in between. Scalar arithmetic of
/// the scales is the codec's own; tests hold the two to the same bits.
void quantize_values(const Kernels& k, const ActivationScheme& scheme, float static_scale, float* x,
                     int64_t n, RowOperand& row, float* extras) {
  const auto fp8 = [&](float* values, int64_t count, float scale) {
    if (quant::is_nan(scale)) {
      std::fill_n(values, count, 0.0f);
    } else {
      k.round_e4m3(values, count, scale);
    }
  };
  switch (scheme.format) {
    case ActivationFormat::f32:
    case ActivationFormat::bf16: return;
    case ActivationFormat::fp8_tensor:
      row.scale = quant::multiplier_of(scheme.sense, static_scale);
      fp8(x, n, row.scale);
      return;
    case ActivationFormat::fp8_token:
      row.scale = quant::fp8_scale(k.abs_max(x, n), scheme.ue8m0_scale);
      fp8(x, n, row.scale);
      return;
    case ActivationFormat::fp8_block:
      for (int64_t i = 0; i < n; i += 128) {
        const int64_t count = std::min<int64_t>(128, n - i);
        extras[i / 128] = quant::fp8_scale(k.abs_max(x + i, count), scheme.ue8m0_scale);
        fp8(x + i, count, extras[i / 128]);
      }
      row.block_scales = extras;
      return;
    case ActivationFormat::mxfp8:
    case ActivationFormat::mxfp4: {
      const auto element = scheme.format == ActivationFormat::mxfp8 ? quant::MxElement::e4m3
                                                                    : quant::MxElement::e2m1;
      for (int64_t i = 0; i < n; i += 32) {
        quantize_mx_block(k, element, x + i, std::min<int64_t>(32, n - i));
      }
      return;
    }
    case ActivationFormat::nvfp4: {
      const ScaleSense sense = scheme.static_scale ? scheme.sense : ScaleSense::multiplier;
      const float global =
          scheme.static_scale ? static_scale : quant::nvfp4_global(k.abs_max(x, n));
      row.scale = quant::multiplier_of(sense, global);
      for (int64_t i = 0; i < n; i += 16) {
        quantize_nvfp4_block(k, sense, global, x + i, std::min<int64_t>(16, n - i));
      }
      return;
    }
  }
}

bool is_plain(ActivationFormat f) {
  return f == ActivationFormat::f32 || f == ActivationFormat::bf16;
}

}  // namespace

RowOperand prepare_row(const ProductPlan& plan, const RowRecord& record, std::byte* operand,
                       float* extras, std::byte* scratch) {
  const Kernels& k = *plan.kernels;
  const int64_t n = record.format->width;
  auto* x = reinterpret_cast<float*>(scratch);
  RowOperand row;
  row.x = operand;
  const ActivationFormat arrived = record.format->format;
  if (arrived == ActivationFormat::f32) {
    k.load_f32(reinterpret_cast<const float*>(record.data), record.weight, n, x);
  } else if (arrived == ActivationFormat::bf16) {
    k.load_bf16(reinterpret_cast<const uint16_t*>(record.data), record.weight, n, x);
  } else if (arrived == plan.input.format) {
    decode_record(*record.format, record.data, x, row, extras);
  } else {  // the wire's own format: values like any others
    quant::decode_row(*record.format, record.data, x);
    k.scale_values(x, n, record.weight);
  }
  if (arrived != plan.input.format && !is_plain(plan.input.format)) {
    quantize_values(k, plan.input, record.static_scale, x, n, row, extras);
  }
  int64_t count = n;
  if (record.order != nullptr) {
    if (row.block_scales != nullptr) {
      for (int64_t i = 0; i < n; ++i) x[i] *= row.block_scales[i / 128];
      row.block_scales = nullptr;
    }
    x[n] = 0.0f;
    auto* permuted = reinterpret_cast<float*>(scratch + values_bytes(n));
    k.permute(x, record.order, record.places, permuted);
    x = permuted;
    count = record.places;
  }
  const int64_t padded = round_up(count, kBlockK);
  k.store_operand(x, count, padded, plan.store, operand);
  if (plan.sums) {
    float* sums = extras;
    if (plan.input.format == ActivationFormat::fp8_block) sums += ceil_div(n, int64_t{128});
    k.segment_sums(operand, plan.store, padded, plan.segment, sums);
    row.segment_sums = sums;
  }
  return row;
}

}  // namespace moekit::linear
