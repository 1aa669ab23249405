#include "quant/fp8.h"

#include <algorithm>

#include "tensor/float_tables.h"

namespace moekit::quant {

float fp8_scale(float amax, bool power_of_two) {
  if (!is_finite(amax)) return quiet_nan();
  const float scale = std::max(amax / kE4m3Max, kScaleFloor);
  return power_of_two ? round_up_to_power_of_two(scale) : scale;
}

void fp8_encode(const float* x, int64_t n, float scale, uint8_t* codes) {
  if (is_nan(scale)) {
    std::fill_n(codes, n, uint8_t{0});
    return;
  }
  for (int64_t i = 0; i < n; ++i) codes[i] = f32_to_e4m3(x[i] / scale);
}

void fp8_decode(const uint8_t* codes, int64_t n, float scale, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = kE4m3Values[codes[i]] * scale;
}

}  // namespace moekit::quant
