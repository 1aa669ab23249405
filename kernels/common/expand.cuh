// Weights of panels (weight_panels.h) to bf16 operands in registers. Exact.
#pragma once

#include <cuda_bf16.h>

#include "kernels/common/weight_panels.h"

namespace moekit::kernels {

/// A shift to the left as a multiplication: those have a pipe of their own beside the one of shifts
/// and masks, which limits the expansion.
__device__ __forceinline__ uint32_t shift_left(uint32_t word, uint32_t factor) {
  uint32_t result;
  asm("mul.lo.u32 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(factor));
  return result;
}
/// expand_code4() with such shifts.
__device__ __forceinline__ uint32_t expand_pair4(int pair, uint32_t word) {
  if (pair == 2) return shift_left(word, 64) & kPlainBits4;
  if (pair == 3) return (word >> 6 & kFirstBits4) | (shift_left(word, 4) & kOtherBits4);
  return expand_code4(pair, word);
}

/// A pair times one of two scales.
__device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, uint32_t scales, int which) {
  const auto& two = *reinterpret_cast<const __nv_bfloat162*>(&scales);
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                         which == 0 ? __low2bfloat162(two) : __high2bfloat162(two));
  return *reinterpret_cast<const uint32_t*>(&product);
}

/// bf16 of bytes 2 `index` and 2 `index` + 1 of a word of scales.
template <OperandFormat kFormat>
__device__ __forceinline__ uint32_t scale_pair(uint32_t word, int index) {
  // Selects 0, high byte, 0, low byte from the word and a zero register, highest first.
  const uint32_t bytes = __byte_perm(word, 0, index == 0 ? 0x4140 : 0x4342);
  return kFormat == OperandFormat::nvfp4 ? bytes * 16 + 0x70007000u : bytes << 7;
}

/// What a lane holds of one strip and block: rows g and g + 8 of 64 columns.
template <OperandFormat kFormat>
struct StripWords {
  static constexpr int kStripBytes = PanelFormat::of(kFormat).strip_bytes();
  static constexpr int kPieces = kStripBytes / 512;  // 16 bytes each
  static constexpr int kRowScales = PanelFormat::of(kFormat).row_scales();
  uint4 codes[kPieces];
  uint32_t scales[2];  // of row g and row g + 8: 2 or 4 bytes

  /// From where the strip's codes and its scales begin.
  __device__ __forceinline__ void load(const uint8_t* strip_codes, const uint8_t* strip_scales,
                                       int lane) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      codes[i] = *reinterpret_cast<const uint4*>(strip_codes + i * 512 + lane * 16);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint8_t* at = strip_scales + (h * 8 + lane / 4) * kRowScales;
      if constexpr (kRowScales == 4) {
        scales[h] = *reinterpret_cast<const uint32_t*>(at);
      } else {
        scales[h] = *reinterpret_cast<const uint16_t*>(at);
      }
    }
  }

  /// The A operand of columns 16 step to 16 step + 15 (step 0-3): a[0] of row g and columns 2 t,
  /// 2 t + 1, a[1] of row g + 8, a[2] and a[3] the same of columns 2 t + 8, 2 t + 9.
  __device__ __forceinline__ void expand(int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int group = step * kRowScales / 4;
      const uint32_t pair_of_scales = scale_pair<kFormat>(scales[h], group / 2);
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        uint32_t pair;
        if constexpr (kPieces == 1) {
          const uint4& c = codes[0];
          const uint32_t word = step / 2 == 0 ? (h == 0 ? c.x : c.y) : (h == 0 ? c.z : c.w);
          pair = expand_pair4(step % 2 * 2 + high, word);
        } else {
          const uint4& c = codes[step / 2];
          const uint32_t word = h == 0 ? (step % 2 == 0 ? c.x : c.y) : (step % 2 == 0 ? c.z : c.w);
          pair = expand_code8(high, word);
        }
        a[high * 2 + h] = multiply_pair(pair, pair_of_scales, group % 2);
      }
    }
  }
};

}  // namespace moekit::kernels
