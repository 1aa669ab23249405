#include "quant/mx.h"

#include <algorithm>

#include "tensor/float_tables.h"

namespace moekit::quant {

uint8_t mx_scale(float amax, MxElement element) {
  if (!is_finite(amax)) return 255;
  const uint32_t bits = f32_bits(amax);
  const int bump = (bits & 0x00600000u) == 0x00600000u ? 1 : 0;  // mantissa >= 1.75
  const int byte = static_cast<int>(bits >> 23) + bump - mx_emax(element);
  // A subnormal amax has exponent field 0 and lands here too.
  return static_cast<uint8_t>(std::max(byte, 0));
}

void mx_encode(const float* x, int64_t n, MxElement element, uint8_t scale, uint8_t* codes) {
  if (scale == 255) {
    std::fill_n(codes, n, uint8_t{0});
    return;
  }
  const float divisor = e8m0_to_f32(scale);
  switch (element) {
    case MxElement::e4m3:
      for (int64_t i = 0; i < n; ++i) codes[i] = f32_to_e4m3(x[i] / divisor);
      return;
    case MxElement::e5m2:
      for (int64_t i = 0; i < n; ++i) codes[i] = f32_to_e5m2(x[i] / divisor);
      return;
    case MxElement::e2m1:
      for (int64_t i = 0; i < n; ++i) codes[i] = f32_to_e2m1(x[i] / divisor);
      return;
  }
}

void mx_decode(const uint8_t* codes, int64_t n, MxElement element, uint8_t scale, float* x) {
  const float factor = e8m0_to_f32(scale);
  switch (element) {
    case MxElement::e4m3:
      for (int64_t i = 0; i < n; ++i) x[i] = kE4m3Values[codes[i]] * factor;
      return;
    case MxElement::e5m2:
      for (int64_t i = 0; i < n; ++i) x[i] = kE5m2Values[codes[i]] * factor;
      return;
    case MxElement::e2m1:
      for (int64_t i = 0; i < n; ++i) x[i] = kE2m1Values[codes[i] & 15] * factor;
      return;
  }
}

}  // namespace moekit::quant
