// Scalar conversions of the small float formats: exact decode, encode with round-to-nearest-even.
// Host only, branch-light; vector versions live with the back-ends and are tested against these.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace moekit {

inline float f32_from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t f32_bits(float x) { return std::bit_cast<uint32_t>(x); }

inline float bf16_to_f32(uint16_t bits) { return f32_from_bits(static_cast<uint32_t>(bits) << 16); }
/// NaN stays NaN (quiet, sign and upper payload kept); overflow rounds to infinity.
uint16_t f32_to_bf16(float x);

float f16_to_f32(uint16_t bits);
/// Overflow rounds to infinity (IEEE).
uint16_t f32_to_f16(float x);

float e4m3_to_f32(uint8_t bits);
/// Saturating: finite values and infinities beyond 448 become +-448; NaN becomes 0x7f with x's
/// sign.
uint8_t f32_to_e4m3(float x);

float e5m2_to_f32(uint8_t bits);
/// Saturating: beyond 57344 becomes +-57344, infinities too; NaN stays NaN.
uint8_t f32_to_e5m2(float x);

/// Low four bits: sign, exponent 2, mantissa 1: 0, .5, 1, 1.5, 2, 3, 4, 6.
float e2m1_to_f32(uint8_t code);
/// Saturating at +-6. NaN becomes +6 or -6 by sign (the format has no NaN: OCP MX 1.0, 5.3.3 leaves
/// it to the implementation).
uint8_t f32_to_e2m1(float x);

/// 2^(byte - 127); 255 is NaN. Byte 0 is 2^-127 (a subnormal float).
inline float e8m0_to_f32(uint8_t byte) {
  if (byte == 255) return std::bit_cast<float>(uint32_t{0x7fc00000});
  if (byte == 0) return std::bit_cast<float>(uint32_t{0x00400000});
  return std::bit_cast<float>(static_cast<uint32_t>(byte) << 23);
}

/// The byte of a power of two from 2^-127 to 2^127, or of NaN: an e8m0 byte is a float's exponent,
/// and 2^-127, byte 0, a subnormal float.
inline uint8_t power_to_e8m0(float power) {
  if (power != power) return 255;
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(power) >> 23);
}

}  // namespace moekit
