#include "quant/stored_codec.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "tensor/float_formats.h"
#include "tensor/float_tables.h"

namespace moekit::quant {
namespace {

/// What a code means.
enum class CodeKind : uint8_t { f32, bf16, f16, e4m3, e5m2, e2m1, integer };

CodeKind kind_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::f32: return CodeKind::f32;
    case WeightFormat::bf16: return CodeKind::bf16;
    case WeightFormat::f16: return CodeKind::f16;
    case WeightFormat::fp8_tensor:
    case WeightFormat::fp8_channel:
    case WeightFormat::fp8_block:
    case WeightFormat::mxfp8: return CodeKind::e4m3;
    case WeightFormat::mxfp8_e5m2: return CodeKind::e5m2;
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4: return CodeKind::e2m1;
    case WeightFormat::int4_group:
    case WeightFormat::int8_group:
    case WeightFormat::int4_channel:
    case WeightFormat::int8_channel: return CodeKind::integer;
  }
  fail(ErrorCode::internal, "weight format {} has no codec", static_cast<int>(format));
}

/// Bits of one storage unit: whole bytes, also where the unit is called f4_e2m1 (two codes a byte).
int unit_bits_of(const CodeGrid& grid) { return std::max(8, bits_of(grid.unit)); }

/// One unit, little-endian, zero-extended. Mapped files give no alignment.
uint32_t load_unit(const std::byte* at, int bytes) {
  uint32_t word = 0;
  std::memcpy(&word, at, static_cast<size_t>(bytes));
  return word;
}

uint16_t load_u16(const std::byte* at) {
  uint16_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

/// Lowest bit of code `i` of a unit, in codes. AWQ keeps the even codes in the low half of a word
/// and the odd ones in the high half.
int32_t place_in_unit(PackOrder order, int32_t i, int32_t pack) {
  if (order == PackOrder::sequential) return i;
  return i % 2 == 0 ? i / 2 : pack / 2 + i / 2;
}

/// The stored bits at storage coordinates (p, q).
uint32_t grid_bits(const CodeGrid& grid, int64_t p, int64_t q) {
  const int unit_bits = unit_bits_of(grid);
  int64_t u = p;
  int64_t v = q;
  int32_t inside = 0;
  if (grid.pack_axis == PackAxis::rows) {
    u = p / grid.pack;
    inside = static_cast<int32_t>(p % grid.pack);
  } else if (grid.pack_axis == PackAxis::cols) {
    v = q / grid.pack;
    inside = static_cast<int32_t>(q % grid.pack);
  }
  const uint32_t word =
      load_unit(grid.data + u * grid.row_stride + v * grid.col_stride, unit_bits / 8);
  if (grid.pack_axis == PackAxis::none) return word;
  const int bits = unit_bits / grid.pack;
  const uint32_t mask = bits >= 32 ? ~0u : (1u << bits) - 1;
  return (word >> (place_in_unit(grid.order, inside, grid.pack) * bits)) & mask;
}

/// Integer value of stored bits: i8 units that hold one code are two's complement, packed ones are
/// unsigned and shifted by an offset.
int32_t integer_of(const CodeGrid& grid, uint32_t bits) {
  if (grid.pack_axis == PackAxis::none && grid.unit == DType::i8) {
    return static_cast<int8_t>(static_cast<uint8_t>(bits));
  }
  return static_cast<int32_t>(bits);
}

float code_value(CodeKind kind, uint32_t bits) {
  switch (kind) {
    case CodeKind::f32: return f32_from_bits(bits);
    case CodeKind::bf16: return bf16_to_f32(static_cast<uint16_t>(bits));
    case CodeKind::f16: return f16_to_f32(static_cast<uint16_t>(bits));
    case CodeKind::e4m3: return kE4m3Values[bits & 255];
    case CodeKind::e5m2: return kE5m2Values[bits & 255];
    case CodeKind::e2m1: return kE2m1Values[bits & 15];
    case CodeKind::integer: return 0.0f;  // handled by integer_of
  }
  return 0.0f;
}

float scale_value(DType unit, WeightFormat format, uint32_t bits) {
  switch (unit) {
    case DType::f32: return f32_from_bits(bits);
    case DType::bf16: return bf16_to_f32(static_cast<uint16_t>(bits));
    case DType::f16: return f16_to_f32(static_cast<uint16_t>(bits));
    case DType::f8_e4m3: return kE4m3Values[bits & 255];
    case DType::f8_e8m0: return e8m0_to_f32(static_cast<uint8_t>(bits));
    case DType::u8:  // checkpoints without float8 types store scale bytes as plain bytes
      return format == WeightFormat::nvfp4 ? kE4m3Values[bits & 255]
                                           : e8m0_to_f32(static_cast<uint8_t>(bits));
    default: fail(ErrorCode::unsupported, "scales of type {} are not covered", to_string(unit));
  }
}

int64_t group_of(int64_t index, int64_t group) { return group == 0 ? 0 : index / group; }

/// Group number of input q along the columns of a scale or zero grid.
int64_t col_group_of(const StoredMatrix& m, const ScaleGrid& grid, int64_t q) {
  return m.group_index != nullptr ? m.group_index[q] : group_of(q, grid.col_group);
}

int64_t storage_row(const StoredMatrix& m, int64_t row) { return m.row_first + m.row_step * row; }

float scale_in_group(const StoredMatrix& m, int64_t p, int64_t group) {
  const uint32_t bits = grid_bits(m.scales.values, group_of(p, m.scales.row_group), group);
  return scale_value(m.scales.values.unit, m.scheme.format, bits);
}

int32_t zero_in_group(const StoredMatrix& m, int64_t p, int64_t group) {
  const CodeGrid& grid = m.zeros.values;
  return integer_of(grid, grid_bits(grid, group_of(p, m.zeros.row_group), group)) + m.zero_offset;
}

/// values[code] of the 4-bit codes q, q + 1, ..., two a byte, low nibble first.
void decode_nibbles(const uint8_t* bytes, int64_t q, int64_t count,
                    const std::array<float, 16>& values, float* w) {
  int64_t i = 0;
  if (q % 2 != 0 && count > 0) w[i++] = values[bytes[q / 2] >> 4];
  const uint8_t* next = bytes + (q + i) / 2;
  for (; i + 1 < count; i += 2) {
    const uint8_t byte = *next++;
    w[i] = values[byte & 15];
    w[i + 1] = values[byte >> 4];
  }
  if (i < count) w[i] = values[*next & 15];
}

/// Codes of a dense row, from column q on.
void decode_dense(const StoredMatrix& m, CodeKind kind, int bits, const std::byte* row, int64_t q,
                  int64_t count, float* w) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(row);
  switch (kind) {
    case CodeKind::f32: std::memcpy(w, row + q * 4, static_cast<size_t>(count) * 4); return;
    case CodeKind::bf16:
      for (int64_t i = 0; i < count; ++i) w[i] = bf16_to_f32(load_u16(row + (q + i) * 2));
      return;
    case CodeKind::f16:
      for (int64_t i = 0; i < count; ++i) w[i] = f16_to_f32(load_u16(row + (q + i) * 2));
      return;
    case CodeKind::e4m3:
      for (int64_t i = 0; i < count; ++i) w[i] = kE4m3Values[bytes[q + i]];
      return;
    case CodeKind::e5m2:
      for (int64_t i = 0; i < count; ++i) w[i] = kE5m2Values[bytes[q + i]];
      return;
    case CodeKind::e2m1: decode_nibbles(bytes, q, count, kE2m1Values, w); return;
    case CodeKind::integer: break;
  }
  if (bits == 4) {
    std::array<float, 16> values;
    for (int code = 0; code < 16; ++code) {
      values[static_cast<size_t>(code)] = static_cast<float>(code - m.code_offset);
    }
    decode_nibbles(bytes, q, count, values, w);
    return;
  }
  const bool is_signed = m.codes.pack_axis == PackAxis::none && m.codes.unit == DType::i8;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t code = is_signed ? static_cast<int8_t>(bytes[q + i]) : bytes[q + i];
    w[i] = static_cast<float>(code - m.code_offset);
  }
}

int code_bits(const StoredMatrix& m, CodeKind kind) {
  switch (kind) {
    case CodeKind::f32: return 32;
    case CodeKind::bf16:
    case CodeKind::f16: return 16;
    case CodeKind::e4m3:
    case CodeKind::e5m2: return 8;
    case CodeKind::e2m1: return 4;
    case CodeKind::integer: break;
  }
  const WeightFormat f = m.scheme.format;
  const bool four = f == WeightFormat::int4_group || f == WeightFormat::int4_channel;
  // A 4-bit code may also be kept in a byte of its own.
  return four && m.codes.pack_axis != PackAxis::none ? 4 : 8;
}

/// Codes of storage row p from column q on, as fp32, without scales. Dense rows have loops of their
/// own; everything else goes code by code.
void decode_codes(const StoredMatrix& m, CodeKind kind, int64_t p, int64_t q, int64_t count,
                  float* w) {
  const CodeGrid& grid = m.codes;
  const int bits = code_bits(m, kind);
  if (grid.pack_axis != PackAxis::rows && is_dense(grid, bits)) {
    decode_dense(m, kind, bits, grid.data + p * grid.row_stride, q, count, w);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t stored = grid_bits(grid, p, q + i);
    w[i] = kind == CodeKind::integer ? static_cast<float>(integer_of(grid, stored) - m.code_offset)
                                     : code_value(kind, stored);
  }
}

/// Subtracts zero points and multiplies by block scales, a run of one group at a time.
void apply_scales(const StoredMatrix& m, int64_t p, int64_t first, int64_t count, float* w) {
  const bool has_zeros = !m.zeros.empty();
  const bool has_scales = !m.scales.empty();
  // Runs end where either grid changes its group.
  auto run_end = [&](const ScaleGrid& grid, int64_t q) {
    return grid.col_group == 0 ? first + count : (q / grid.col_group + 1) * grid.col_group;
  };
  for (int64_t q = first; q < first + count;) {
    int64_t end = q + 1;
    if (m.group_index != nullptr) {
      while (end < first + count && m.group_index[end] == m.group_index[q]) ++end;
    } else {
      end = first + count;
      if (has_scales) end = std::min(end, run_end(m.scales, q));
      if (has_zeros) end = std::min(end, run_end(m.zeros, q));
    }
    float* run = w + (q - first);
    const int64_t length = end - q;
    if (has_zeros) {
      const auto zero = static_cast<float>(zero_in_group(m, p, col_group_of(m, m.zeros, q)));
      for (int64_t i = 0; i < length; ++i) run[i] -= zero;  // exact: small integers
    }
    if (has_scales) {
      const float scale = scale_in_group(m, p, col_group_of(m, m.scales, q));
      for (int64_t i = 0; i < length; ++i) run[i] *= scale;
    }
    q = end;
  }
}

}  // namespace

void decode_weights(const StoredMatrix& m, int64_t row, int64_t first_col, int64_t count,
                    float* w) {
  MOEKIT_DCHECK(row >= 0 && row < m.rows && first_col >= 0 && first_col + count <= m.cols,
                "row {} and columns [{}, {}) must lie in a {} x {} matrix", row, first_col,
                first_col + count, m.rows, m.cols);
  const int64_t p = storage_row(m, row);
  decode_codes(m, kind_of(m.scheme.format), p, first_col, count, w);
  if (!m.scales.empty() || !m.zeros.empty()) apply_scales(m, p, first_col, count, w);
  if (m.global == 1.0f) return;
  const float global = m.global;
  if (m.global_sense == ScaleSense::multiplier) {
    for (int64_t i = 0; i < count; ++i) w[i] *= global;
  } else {
    for (int64_t i = 0; i < count; ++i) w[i] /= global;
  }
}

bool holds_runs(const CodeGrid& grid, int bits) {
  if (grid.pack_axis == PackAxis::none) return bits == unit_bits_of(grid);
  return grid.pack_axis == PackAxis::cols && grid.order == PackOrder::sequential &&
         grid.pack * bits == unit_bits_of(grid);
}

bool is_dense(const CodeGrid& grid, int bits) {
  return grid.col_stride * 8 == unit_bits_of(grid) && holds_runs(grid, bits);
}

void copy_codes(const StoredMatrix& m, int64_t row, int64_t first_col, int64_t count, int bits,
                std::byte* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = code_at(m, row, first_col + i);
    if (bits == 4) {
      auto* b = reinterpret_cast<uint8_t*>(out) + i / 2;
      *b = static_cast<uint8_t>(i % 2 == 0 ? code & 15 : *b | (code & 15) << 4);
    } else {
      std::memcpy(out + i * (bits / 8), &code, static_cast<size_t>(bits / 8));
    }
  }
}

uint32_t code_at(const StoredMatrix& m, int64_t row, int64_t col) {
  const uint32_t bits = grid_bits(m.codes, storage_row(m, row), col);
  if (kind_of(m.scheme.format) != CodeKind::integer) return bits;
  return static_cast<uint32_t>(integer_of(m.codes, bits));
}

float scale_at(const StoredMatrix& m, int64_t row, int64_t col) {
  if (m.scales.empty()) return 1.0f;
  return scale_in_group(m, storage_row(m, row), col_group_of(m, m.scales, col));
}

int32_t zero_at(const StoredMatrix& m, int64_t row, int64_t col) {
  if (m.zeros.empty()) return 0;
  return zero_in_group(m, storage_row(m, row), col_group_of(m, m.zeros, col));
}

float element(const StoredVector& v, int64_t i) {
  const std::byte* at = v.data + (v.first + v.step * i) * bytes_of(v.dtype);
  switch (v.dtype) {
    case DType::f32: return f32_from_bits(load_unit(at, 4));
    case DType::bf16: return bf16_to_f32(static_cast<uint16_t>(load_unit(at, 2)));
    case DType::f16: return f16_to_f32(static_cast<uint16_t>(load_unit(at, 2)));
    case DType::f64: {
      double value;
      std::memcpy(&value, at, sizeof(value));
      return static_cast<float>(value);
    }
    default:
      fail(ErrorCode::unsupported, "vectors are f32, bf16, f16 or f64, got {}", to_string(v.dtype));
  }
}

}  // namespace moekit::quant
