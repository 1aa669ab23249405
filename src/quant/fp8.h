// fp8: e4m3 codes under an fp32 scale: one static scale, one a row, one a block of 128, or
// (weights) one a matrix, row or 128x128 block. The scale is amax / 448.
#pragma once

#include "quant/block.h"

namespace moekit::quant {

/// Scale of a block whose largest magnitude is `amax`: max(amax / 448, kScaleFloor), rounded up to
/// a power of two on demand. NaN when amax is not finite: the whole block then decodes to NaN.
float fp8_scale(float amax, bool power_of_two);

/// codes[i] = e4m3(x[i] / scale), saturating; zeros under a NaN scale.
void fp8_encode(const float* x, int64_t n, float scale, uint8_t* codes);

/// x[i] = value(codes[i]) * scale.
void fp8_decode(const uint8_t* codes, int64_t n, float scale, float* x);

/// One block of a row, for the row codec: a static scale, or one from the block.
struct Fp8StaticBlocks {
  using Scale = float;
  static constexpr int kBlock = 128;
  static constexpr bool kPairs = false;
  static constexpr bool kRowScale = true;
  float scale;
  Scale encode(const float* x, int64_t n, uint8_t* codes) const {
    fp8_encode(x, n, scale, codes);
    return scale;
  }
  static void decode(const uint8_t* codes, int64_t n, Scale s, float, float* x) {
    fp8_decode(codes, n, s, x);
  }
};

struct Fp8Blocks {
  using Scale = float;
  static constexpr int kBlock = 128;
  static constexpr bool kPairs = false;
  static constexpr bool kRowScale = false;
  bool power_of_two;
  Scale encode(const float* x, int64_t n, uint8_t* codes) const {
    const float scale = fp8_scale(abs_max(x, n), power_of_two);
    fp8_encode(x, n, scale, codes);
    return scale;
  }
  static void decode(const uint8_t* codes, int64_t n, Scale s, float, float* x) {
    fp8_decode(codes, n, s, x);
  }
};

}  // namespace moekit::quant
