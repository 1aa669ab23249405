#include "engine/quantized_hidden.h"

#include <cstring>

#include "base/check.h"

namespace moekit::engine {
namespace {

bool is_e4m3(const TensorView& v) { return v.dtype == DType::f8_e4m3; }
bool is_fp4(const TensorView& v) { return v.dtype == DType::f4_e2m1 || v.dtype == DType::u8; }

/// Scale tensors that a caller passes for `format`: dtype and count a row (0 = one for the whole
/// tensor).
struct ScaleShape {
  DType dtype = DType::f32;
  int64_t per_row = 1;
};

ScaleShape scale_shape(const RowFormat& format) {
  switch (format.format) {
    case ActivationFormat::fp8_tensor: return {DType::f32, 0};
    case ActivationFormat::fp8_block: return {DType::f32, ceil_div(format.width, 128)};
    case ActivationFormat::mxfp8:
    case ActivationFormat::mxfp4: return {DType::f8_e8m0, ceil_div(format.width, 32)};
    case ActivationFormat::nvfp4: return {DType::f8_e4m3, ceil_div(format.width, 16)};
    default: return {DType::f32, 1};
  }
}

/// Bytes between the starts of two rows of a [T, n] view.
int64_t row_bytes(const TensorView& v) { return v.strides[0] * bits_of(v.dtype) / 8; }

}  // namespace

bool is_quantized_hidden(const TensorView& hidden) {
  return hidden.dtype == DType::f8_e4m3 || hidden.dtype == DType::f4_e2m1 ||
         hidden.dtype == DType::u8;
}

void check_quantized_hidden(const LayerArgs& args, const RowFormat& format, int64_t num_tokens) {
  const TensorView& codes = args.hidden;
  const bool fp4 =
      format.format == ActivationFormat::mxfp4 || format.format == ActivationFormat::nvfp4;
  MOEKIT_CHECK_AS(ErrorCode::unsupported,
                  is_quantized(format.format) && (fp4 ? is_fp4(codes) : is_e4m3(codes)),
                  "hidden arrives as {} codes, but the experts of this layer read {}; pass f32, "
                  "bf16 or f16 rows",
                  to_string(codes.dtype), to_string(format.format));
  const int64_t stored = codes.dtype == DType::u8 ? format.code_bytes : format.width;
  MOEKIT_CHECK(codes.rank == 2 && codes.shape[0] == num_tokens && codes.shape[1] == stored &&
                   codes.strides[1] == 1,
               "quantized hidden must be [{}, {}] with unit stride along the last axis", num_tokens,
               stored);
  const ScaleShape expected = scale_shape(format);
  const TensorView& scales = args.hidden_scales;
  const bool dtype_fits = scales.dtype == expected.dtype ||
                          (expected.dtype == DType::f8_e8m0 && scales.dtype == DType::u8);
  MOEKIT_CHECK(!scales.empty() && dtype_fits, "hidden in {} needs scales of type {}, got {}",
               to_string(format.format), to_string(expected.dtype),
               scales.empty() ? "none" : to_string(scales.dtype));
  const int64_t count = expected.per_row == 0 ? 1 : num_tokens * expected.per_row;
  MOEKIT_CHECK(scales.num_elements() == count && scales.is_contiguous(),
               "hidden in {} needs {} contiguous scales ({} a row), got {}",
               to_string(format.format), count, expected.per_row, scales.num_elements());
  if (format.format != ActivationFormat::nvfp4) return;
  const TensorView& global = args.hidden_global;
  MOEKIT_CHECK(!global.empty() && global.dtype == DType::f32 && global.is_contiguous() &&
                   (global.num_elements() == 1 || global.num_elements() == num_tokens),
               "hidden in nvfp4 needs hidden_global: f32 [1] or [{}], a multiplier", num_tokens);
}

void gather_records(const LayerArgs& args, const RowFormat& format, int64_t num_tokens,
                    std::byte* records) {
  const auto* codes = static_cast<const std::byte*>(args.hidden.data);
  const auto* scales = static_cast<const std::byte*>(args.hidden_scales.data);
  const ScaleShape shape = scale_shape(format);
  const int64_t scale_bytes = shape.per_row * bytes_of(shape.dtype);
  const int64_t code_row = row_bytes(args.hidden);
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::byte* record = records + t * format.record_bytes;
    std::memset(record, 0, format.record_bytes);
    std::memcpy(record, codes + t * code_row, format.code_bytes);
    if (shape.per_row == 0) {
      std::memcpy(record + format.scale_offset, scales, sizeof(float));
    } else {
      std::memcpy(record + format.scale_offset, scales + t * scale_bytes, scale_bytes);
    }
    if (format.format == ActivationFormat::nvfp4) {
      const auto* global = static_cast<const float*>(args.hidden_global.data);
      const float value = args.hidden_global.num_elements() == 1 ? global[0] : global[t];
      std::memcpy(record + format.scale_offset + format.scale_bytes - sizeof(float), &value,
                  sizeof(float));
    }
  }
}

}  // namespace moekit::engine
