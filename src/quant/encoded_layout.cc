// EncodedLayout: sizes and views of the canonical storage of each weight format.
#include "base/check.h"
#include "base/math.h"
#include "quant/weight_codec.h"

namespace moekit::quant {
namespace {

struct GroupShape {
  int64_t rows;
  int64_t cols;
};

bool has_scales(WeightFormat f) {
  return f != WeightFormat::bf16 && f != WeightFormat::f16 && f != WeightFormat::f32;
}

bool is_integer(WeightFormat f) {
  return f == WeightFormat::int4_group || f == WeightFormat::int8_group ||
         f == WeightFormat::int4_channel || f == WeightFormat::int8_channel;
}

int code_bits(WeightFormat f) {
  switch (f) {
    case WeightFormat::f32: return 32;
    case WeightFormat::bf16:
    case WeightFormat::f16: return 16;
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4:
    case WeightFormat::int4_group:
    case WeightFormat::int4_channel: return 4;
    default: return 8;
  }
}

DType code_unit(WeightFormat f) {
  switch (f) {
    case WeightFormat::f32: return DType::f32;
    case WeightFormat::bf16: return DType::bf16;
    case WeightFormat::f16: return DType::f16;
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4: return DType::u8;
    case WeightFormat::mxfp8_e5m2: return DType::f8_e5m2;
    default: return is_integer(f) ? DType::i32 : DType::f8_e4m3;
  }
}

GroupShape group_shape(const WeightScheme& scheme) {
  switch (scheme.format) {
    case WeightFormat::fp8_block: return {128, 128};
    case WeightFormat::mxfp8:
    case WeightFormat::mxfp8_e5m2:
    case WeightFormat::mxfp4: return {1, 32};
    case WeightFormat::nvfp4: return {1, 16};
    case WeightFormat::int4_group:
    case WeightFormat::int8_group: return {1, scheme.group};
    case WeightFormat::fp8_channel:
    case WeightFormat::int4_channel:
    case WeightFormat::int8_channel: return {1, 0};
    default: return {0, 0};
  }
}

DType scale_unit_of(const WeightScheme& scheme, const EncodeOptions& options) {
  switch (scheme.format) {
    case WeightFormat::mxfp8:
    case WeightFormat::mxfp8_e5m2:
    case WeightFormat::mxfp4: return DType::f8_e8m0;
    case WeightFormat::nvfp4: return DType::f8_e4m3;
    default: return options.scale_dtype;
  }
}

void check(const WeightScheme& scheme, int64_t rows, int64_t cols, const EncodeOptions& options) {
  const WeightFormat f = scheme.format;
  MOEKIT_CHECK(rows > 0 && cols > 0, "a weight matrix needs rows and columns, got {} x {}", rows,
               cols);
  const bool grouped = f == WeightFormat::int4_group || f == WeightFormat::int8_group;
  MOEKIT_CHECK(!grouped || scheme.group > 0, "{} needs a positive group, got {}", to_string(f),
               scheme.group);
  MOEKIT_CHECK(!scheme.zero_points || is_integer(f), "{} has no zero points", to_string(f));
  if (scale_unit_of(scheme, options) != options.scale_dtype || !has_scales(f)) return;
  const DType d = options.scale_dtype;
  const bool plain = d == DType::f32 || d == DType::bf16 || d == DType::f16;
  MOEKIT_CHECK(plain || (d == DType::f8_e8m0 && !is_integer(f)),
               "scales of {} are stored as f32, bf16 or f16 (fp8: f8_e8m0 too), got {}",
               to_string(f), to_string(d));
}

}  // namespace

EncodedLayout EncodedLayout::of(const WeightScheme& scheme, int64_t rows, int64_t cols,
                                const EncodeOptions& options) {
  check(scheme, rows, cols, options);
  EncodedLayout l;
  l.scheme = scheme;
  l.options = options;
  l.rows = rows;
  l.cols = cols;
  const int64_t unit_bits = bits_of(code_unit(scheme.format));
  l.code_row_bytes =
      ceil_div(checked_mul(cols, code_bits(scheme.format), "weight row"), unit_bits) *
      (unit_bits / 8);
  l.scale_unit = scale_unit_of(scheme, options);
  if (has_scales(scheme.format)) {
    const GroupShape group = group_shape(scheme);
    l.row_group = group.rows;
    l.col_group = group.cols;
    l.scale_rows = group.rows == 0 ? 1 : ceil_div(rows, group.rows);
    l.scale_cols = group.cols == 0 ? 1 : ceil_div(cols, group.cols);
  }
  // Parts start on a cache line, so that every unit is aligned.
  l.scales_offset = round_up(checked_mul(rows, l.code_row_bytes, "weight matrix"), 64);
  const int64_t num_scales = l.scale_rows * l.scale_cols;
  l.zeros_offset = l.scales_offset + round_up(num_scales * bytes_of(l.scale_unit), 64);
  l.total_bytes = l.zeros_offset + (scheme.zero_points ? round_up(num_scales, 64) : 0);
  return l;
}

StoredMatrix EncodedLayout::view(const std::byte* storage) const {
  StoredMatrix m;
  m.rows = rows;
  m.cols = cols;
  m.scheme = scheme;
  const DType unit = code_unit(scheme.format);
  const int pack = bits_of(unit) / code_bits(scheme.format);
  m.codes = {storage,
             unit,
             pack == 1 ? PackAxis::none : PackAxis::cols,
             PackOrder::sequential,
             pack,
             code_row_bytes,
             bytes_of(unit)};
  if (scale_rows > 0) {
    const int64_t bytes = bytes_of(scale_unit);
    m.scales = {{storage + scales_offset, scale_unit, PackAxis::none, PackOrder::sequential, 1,
                 scale_cols * bytes, bytes},
                row_group,
                col_group};
  }
  if (scheme.zero_points) {
    m.zeros = {{storage + zeros_offset, DType::u8, PackAxis::none, PackOrder::sequential, 1,
                scale_cols, 1},
               row_group,
               col_group};
  } else if (is_integer(scheme.format)) {
    m.code_offset = 1 << (code_bits(scheme.format) - 1);
  }
  m.global_sense = options.global_sense;
  return m;
}

}  // namespace moekit::quant
