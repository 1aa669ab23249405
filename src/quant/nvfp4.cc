#include "quant/nvfp4.h"

#include <algorithm>
#include <limits>

#include "tensor/float_tables.h"

namespace moekit::quant {
namespace {

constexpr uint8_t kScaleNan = 0x7f;
constexpr uint8_t kScaleEighth = 0x20;  // e4m3(0.125)

}  // namespace

float nvfp4_global(float amax) {
  return is_finite(amax) ? std::max(amax / kNvfp4Max, kScaleFloor) : quiet_nan();
}

float multiplier_of(ScaleSense sense, float global) {
  return sense == ScaleSense::multiplier ? global : 1.0f / global;
}

uint8_t nvfp4_encode(const float* x, int64_t n, ScaleSense sense, float global, uint8_t* codes) {
  const float amax = abs_max(x, n);
  if (is_nan(amax) || is_nan(global)) {
    std::fill_n(codes, n, uint8_t{0});
    return kScaleNan;
  }
  if (sense == ScaleSense::divisor) {
    uint8_t scale = f32_to_e4m3(amax / kE2m1Max * global);
    if (scale == 0) scale = kScaleEighth;
    const float factor = global / kE4m3Values[scale];
    for (int64_t i = 0; i < n; ++i) codes[i] = f32_to_e2m1(x[i] * factor);
    return scale;
  }
  const uint8_t scale = f32_to_e4m3(amax / kE2m1Max / global);
  // Dividing by infinity makes every code of a block without a scale a (signed) zero.
  const float divisor =
      scale == 0 ? std::numeric_limits<float>::infinity() : kE4m3Values[scale] * global;
  for (int64_t i = 0; i < n; ++i) codes[i] = f32_to_e2m1(x[i] / divisor);
  return scale;
}

void nvfp4_decode(const uint8_t* codes, int64_t n, uint8_t scale, float multiplier, float* x) {
  const float s = kE4m3Values[scale];
  for (int64_t i = 0; i < n; ++i) x[i] = kE2m1Values[codes[i] & 15] * s * multiplier;
}

}  // namespace moekit::quant
