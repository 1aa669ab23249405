#include "quant/int_group.h"

#include <algorithm>
#include <cmath>

#include "quant/block.h"

namespace moekit::quant {

float storable_scale(float scale, DType dtype) {
  switch (dtype) {
    case DType::bf16: scale = bf16_to_f32(f32_to_bf16(scale)); break;
    case DType::f16:
      scale = f16_to_f32(f32_to_f16(std::min(scale, 65504.0f)));  // largest f16
      break;
    case DType::f8_e8m0: scale = round_up_to_power_of_two(scale); break;
    default: break;
  }
  if (!is_finite(scale)) scale = f32_from_bits(0x7f7f0000);  // largest bf16
  return scale == 0 ? 1.0f : scale;
}

IntGroup int_group_of(const float* w, int64_t n, int bits, bool zero_points, DType scale_dtype) {
  const int32_t levels = (1 << bits) - 1;
  const int32_t middle = 1 << (bits - 1);
  if (!zero_points) {
    const float scale = std::max(abs_max(w, n) / static_cast<float>(middle - 1), kScaleFloor);
    return {storable_scale(scale, scale_dtype), middle};
  }
  float low = 0;
  float high = 0;
  for (int64_t i = 0; i < n; ++i) {
    low = std::min(low, w[i]);
    high = std::max(high, w[i]);
  }
  // Halves first: the range of two large values may overflow.
  const float range = (high * 0.5f - low * 0.5f) / (0.5f * static_cast<float>(levels));
  IntGroup group;
  group.scale = storable_scale(std::max(range, kScaleFloor), scale_dtype);
  const float zero = std::nearbyint(-low / group.scale);
  group.zero = static_cast<int32_t>(std::clamp(zero, 0.0f, static_cast<float>(levels)));
  return group;
}

void int_encode(const float* w, int64_t n, int bits, const IntGroup& group, uint8_t* codes) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const auto zero = static_cast<float>(group.zero);
  for (int64_t i = 0; i < n; ++i) {
    const float code = std::nearbyint(w[i] / group.scale) + zero;
    codes[i] = static_cast<uint8_t>(std::clamp(code, 0.0f, levels));
  }
}

}  // namespace moekit::quant
