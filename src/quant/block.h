// What the block-scaled formats share: largest magnitude of a block, floor of computed scales,
// nibble pairs. A "block" is the run of elements under one scale.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor/float_formats.h"

namespace moekit::quant {

/// Largest finite values.
inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kE2m1Max = 6.0f;
/// Full range of nvfp4 under a global of 1.
inline constexpr float kNvfp4Max = kE4m3Max * kE2m1Max;

/// Computed fp32 scales never go below this, so a zero block needs no special case, nothing is
/// divided by zero, and every product of a code and a scale is a normal float: hosts and devices
/// that flush subnormals give the same bits. Rows below 448 * 2^-100 lose relative precision, no
/// more.
inline constexpr float kScaleFloor = 0x1p-100f;

/// max |x[i]|, as a pattern: infinity or NaN when one is present (NaN wins). 0 for n = 0.
inline float abs_max(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, f32_bits(x[i]) & 0x7fffffffu);
  return f32_from_bits(largest);
}

inline bool is_finite(float x) { return (f32_bits(x) & 0x7f800000u) != 0x7f800000u; }
inline bool is_nan(float x) { return (f32_bits(x) & 0x7fffffffu) > 0x7f800000u; }
inline float quiet_nan() { return f32_from_bits(0x7fc00000u); }

/// A positive normal or zero x rounded up to a power of two.
inline float round_up_to_power_of_two(float x) {
  return f32_from_bits((f32_bits(x) + 0x007fffffu) & 0x7f800000u);
}

/// Two codes a byte, low nibble first; the last high nibble of an odd count is zero.
inline void pack_nibbles(const uint8_t* codes, int64_t n, uint8_t* bytes) {
  for (int64_t i = 0; i + 1 < n; i += 2) {
    bytes[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
  }
  if (n % 2 != 0) bytes[n / 2] = codes[n - 1];
}
inline void unpack_nibbles(const uint8_t* bytes, int64_t n, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = static_cast<uint8_t>((bytes[i / 2] >> ((i & 1) * 4)) & 15);
  }
}

}  // namespace moekit::quant
