// nvfp4: e2m1 codes under one e4m3 scale per 16 elements and one fp32 global. The global multiplies
// (ModelOpt) or divides (compressed-tensors); which of the two is never guessed from its size.
#pragma once

#include "moekit/quant.h"
#include "quant/block.h"

namespace moekit::quant {

inline constexpr int kNvfp4Block = 16;

/// Global multiplier of a row or matrix whose largest magnitude is `amax`: max(amax / 2688,
/// kScaleFloor); NaN when amax is not finite.
float nvfp4_global(float amax);

/// The multiplier that a record keeps: the global itself, or 1 / global rounded to fp32.
float multiplier_of(ScaleSense sense, float global);

/// Quantizes one block of n <= 16 elements, one code a byte, and returns its scale byte.
///   multiplier: s = e4m3(amax / 6 / g), code = e2m1(x / (s * g)); where s is 0 all codes are zero
///   divisor:    s = e4m3(amax / 6 * g), 0.125 where that is 0, code = e2m1(x * (g / s))
/// Every operation is rounded to fp32 in the order written. A block with a NaN, or any block under
/// a NaN global, gets the NaN scale 0x7f and zero codes. Infinities saturate.
uint8_t nvfp4_encode(const float* x, int64_t n, ScaleSense sense, float global, uint8_t* codes);

/// x[i] = (value(codes[i]) * scale) * multiplier; the first product is exact.
void nvfp4_decode(const uint8_t* codes, int64_t n, uint8_t scale, float multiplier, float* x);

/// One block of a row, for the row codec.
struct Nvfp4Blocks {
  using Scale = uint8_t;
  static constexpr int kBlock = kNvfp4Block;
  static constexpr bool kPairs = true;
  static constexpr bool kRowScale = false;
  ScaleSense sense;
  float global;
  Scale encode(const float* x, int64_t n, uint8_t* codes) const {
    return nvfp4_encode(x, n, sense, global, codes);
  }
  static void decode(const uint8_t* codes, int64_t n, Scale s, float multiplier, float* x) {
    nvfp4_decode(codes, n, s, multiplier, x);
  }
};

}  // namespace moekit::quant
