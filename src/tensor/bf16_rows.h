// fp32 rows to bf16 and back in bulk. Bits are those of f32_to_bf16 and bf16_to_f32.
#pragma once

#include <cstdint>

#include "tensor/float_formats.h"

namespace moekit {

/// f32_to_bf16 without a branch, so that loops over it vectorize.
inline uint16_t round_to_bf16(float x) {
  const uint32_t bits = f32_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

void f32_to_bf16_row(const float* in, int64_t width, uint16_t* out);
void bf16_to_f32_row(const uint16_t* in, int64_t width, float* out);

}  // namespace moekit
