// mx: codes under one e8m0 scale per 32 elements (OCP Microscaling 1.0). The rule by which a scale
// is chosen is ours to write down: exponent = floor(log2 amax), one more where amax >= 1.75 times
// that power of two, minus the largest exponent of the element format; elements saturate.
#pragma once

#include "quant/block.h"

namespace moekit::quant {

inline constexpr int kMxBlock = 32;

enum class MxElement : uint8_t { e4m3, e5m2, e2m1 };

/// Exponent of the element format's largest value: 8, 15, 2.
constexpr int mx_emax(MxElement element) {
  return element == MxElement::e4m3 ? 8 : element == MxElement::e5m2 ? 15 : 2;
}

/// Scale byte of a block whose largest magnitude is `amax`: 255 (NaN) when amax is not finite, 0
/// for a zero block and wherever the rule asks for less than 2^-127.
uint8_t mx_scale(float amax, MxElement element);

/// codes[i] = element(x[i] / 2^(scale - 127)), saturating; zeros under a NaN scale. One code a
/// byte.
void mx_encode(const float* x, int64_t n, MxElement element, uint8_t scale, uint8_t* codes);

/// x[i] = value(codes[i]) * 2^(scale - 127).
void mx_decode(const uint8_t* codes, int64_t n, MxElement element, uint8_t scale, float* x);

/// One block of a row, for the row codec.
template <MxElement kElement>
struct MxBlocks {
  using Scale = uint8_t;
  static constexpr int kBlock = kMxBlock;
  static constexpr bool kPairs = kElement == MxElement::e2m1;
  static constexpr bool kRowScale = false;
  Scale encode(const float* x, int64_t n, uint8_t* codes) const {
    const uint8_t scale = mx_scale(abs_max(x, n), kElement);
    mx_encode(x, n, kElement, scale, codes);
    return scale;
  }
  static void decode(const uint8_t* codes, int64_t n, Scale s, float, float* x) {
    mx_decode(codes, n, kElement, s, x);
  }
};

}  // namespace moekit::quant
