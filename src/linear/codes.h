// Codes and scales of packed panels. Light: the ISA files include it.
#pragma once

#include <cstdint>

namespace moekit::linear {

inline constexpr int64_t kPanelCols = 32;
inline constexpr int64_t kBlockK = 32;
inline constexpr int64_t kUnitBytes = 64;

/// What one code is, wherever its scale comes from.
enum class Code : uint8_t {
  bf16,
  f16,
  f32,
  e4m3,
  e5m2,
  e2m1,
  int4,  ///< two's complement, centred: the stored unsigned code minus 8
  int8,  ///< two's complement, centred
};
inline constexpr int kNumCodes = 8;

/// One scale per `group` along K and column, or `f32_panel`: one for all columns of the panel.
enum class Scale : uint8_t { none, e8m0, e4m3, f32_panel, f32, f16, bf16 };

constexpr int bits_of(Code code) {
  switch (code) {
    case Code::f32: return 32;
    case Code::bf16:
    case Code::f16: return 16;
    case Code::e2m1:
    case Code::int4: return 4;
    default: return 8;
  }
}
/// K elements in the 32-bit word of a column.
constexpr int64_t unit_k(Code code) { return 32 / bits_of(code); }

constexpr int64_t bytes_of(Scale scale) {
  switch (scale) {
    case Scale::none: return 0;
    case Scale::e8m0:
    case Scale::e4m3: return 1;
    case Scale::f16:
    case Scale::bf16: return 2;
    default: return 4;
  }
}

}  // namespace moekit::linear
