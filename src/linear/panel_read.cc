// Reads packed panels back, code by code: what packing is tested by.
#include <cstring>

#include "linear/panel_pack.h"
#include "linear/panel_shuffle.h"
#include "tensor/float_formats.h"

namespace moekit::linear {

uint32_t packed_code_at(const PanelSpec& spec, const std::byte* panels, int64_t row, int64_t col) {
  const int bits = bits_of(spec.code);
  const int64_t unit = unit_k(spec.code);
  const int64_t c = row % kPanelCols;
  const int64_t j = col % unit;
  const std::byte* at = panels + row / kPanelCols * spec.panel_bytes() +
                        col / kBlockK * 2 * spec.half_bytes() + c / 16 * spec.half_bytes() +
                        col % kBlockK / unit * kUnitBytes;
  const auto* b = reinterpret_cast<const uint8_t*>(at);
  switch (shuffle_of(spec.code)) {
    case Shuffle::words: return b[c % 16 / 4 * 16 + 8 * (j / 2) + 2 * (c % 4) + j % 2];
    case Shuffle::nibbles: return b[c % 16 * 4 + 2 * (j % 2) + j / 4] >> (4 * (j / 2 % 2)) & 15u;
    case Shuffle::none: break;
  }
  uint32_t code = 0;
  std::memcpy(&code, b + c % 16 * 4 + j * (bits / 8), static_cast<size_t>(bits / 8));
  return code;
}

namespace {

float code_value(Code code, uint32_t bits) {
  switch (code) {
    case Code::bf16: return bf16_to_f32(static_cast<uint16_t>(bits));
    case Code::f16: return f16_to_f32(static_cast<uint16_t>(bits));
    case Code::f32: return f32_from_bits(bits);
    case Code::e4m3: return e4m3_to_f32(static_cast<uint8_t>(bits));
    case Code::e5m2: return e5m2_to_f32(static_cast<uint8_t>(bits));
    case Code::e2m1: return e2m1_to_f32(static_cast<uint8_t>(bits));
    case Code::int4: return static_cast<float>(static_cast<int32_t>(bits << 28) >> 28);
    case Code::int8: return static_cast<float>(static_cast<int8_t>(bits));
  }
  return 0.0f;
}

float scale_value(Scale kind, const std::byte* base, int64_t index) {
  uint16_t half = 0;
  float full = 1.0f;
  switch (kind) {
    case Scale::none: return 1.0f;
    case Scale::e8m0: return e8m0_to_f32(static_cast<uint8_t>(base[index]));
    case Scale::e4m3: return e4m3_to_f32(static_cast<uint8_t>(base[index]));
    case Scale::f32_panel:
    case Scale::f32: std::memcpy(&full, base + index * 4, 4); return full;
    case Scale::f16: std::memcpy(&half, base + index * 2, 2); return f16_to_f32(half);
    case Scale::bf16: std::memcpy(&half, base + index * 2, 2); return bf16_to_f32(half);
  }
  return full;
}

}  // namespace

float packed_value_at(const PanelSpec& spec, const std::byte* panels, int64_t row, int64_t col) {
  const std::byte* panel = panels + row / kPanelCols * spec.panel_bytes();
  const int64_t c = row % kPanelCols;
  const int64_t group = spec.group > 0 ? col / spec.group : 0;
  float value = code_value(spec.code, packed_code_at(spec, panels, row, col));
  if (spec.zeros) {
    int8_t z;
    std::memcpy(&z, panel + spec.zero_offset() + group * kPanelCols + c, 1);
    value -= static_cast<float>(z);
  }
  value *= scale_value(spec.scale, panel + spec.scale_offset(),
                       spec.scale == Scale::f32_panel ? group : group * kPanelCols + c);
  float column;
  std::memcpy(&column, panel + spec.column_scale_offset() + c * 4, 4);
  return value * column;
}

}  // namespace moekit::linear
