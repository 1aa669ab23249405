// Decode tables of the 8-bit and 4-bit floats, built by the compiler from each format's definition.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace moekit {

namespace detail {

/// 2^e for e in [-126, 127].
constexpr float power_of_two(int e) {
  return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23);
}

/// Value of a sign/exponent/mantissa code without specials.
constexpr float decode_minifloat(uint32_t code, int exponent_bits, int mantissa_bits, int bias) {
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((code >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const bool negative = (code >> (mantissa_bits + exponent_bits)) & 1;
  const uint32_t significand = exponent == 0 ? mantissa : mantissa + (1u << mantissa_bits);
  const int scale = (exponent == 0 ? 1 : exponent) - bias - mantissa_bits;
  const float magnitude = static_cast<float>(significand) * power_of_two(scale);
  return negative ? -magnitude : magnitude;
}

constexpr std::array<float, 256> make_e4m3_table() {
  std::array<float, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) table[i] = decode_minifloat(i, 4, 3, 7);
  table[0x7f] = std::bit_cast<float>(uint32_t{0x7fc00000});
  table[0xff] = std::bit_cast<float>(uint32_t{0xffc00000});
  return table;
}

constexpr std::array<float, 256> make_e5m2_table() {
  std::array<float, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    const uint32_t sign = (i & 0x80) << 24;
    table[i] = decode_minifloat(i, 5, 2, 15);
    if ((i & 0x7f) == 0x7c) table[i] = std::bit_cast<float>(sign | 0x7f800000u);
    if ((i & 0x7f) > 0x7c) table[i] = std::bit_cast<float>(sign | 0x7fc00000u);
  }
  return table;
}

constexpr std::array<float, 16> make_e2m1_table() {
  std::array<float, 16> table{};
  for (uint32_t i = 0; i < 16; ++i) table[i] = decode_minifloat(i, 2, 1, 1);
  return table;
}

}  // namespace detail

inline constexpr std::array<float, 256> kE4m3Values = detail::make_e4m3_table();
inline constexpr std::array<float, 256> kE5m2Values = detail::make_e5m2_table();
inline constexpr std::array<float, 16> kE2m1Values = detail::make_e2m1_table();

}  // namespace moekit
