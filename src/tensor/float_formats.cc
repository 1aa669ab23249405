#include "tensor/float_formats.h"

#include "tensor/float_tables.h"

namespace moekit {
namespace {

constexpr uint32_t kInfinity = 0x7f800000;

/// |x| rounded to nearest even in a small format, as exponent and mantissa bits without sign. The
/// exponent field may run past the format's largest: callers saturate. `abs` is the bit pattern of
/// a finite |x|.
template <int kMantissaBits, int kBias>
uint32_t round_magnitude(uint32_t abs) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kFirstNormal = static_cast<uint32_t>(127 + 1 - kBias) << 23;
  if (abs < kFirstNormal) {
    // Adding 2^23 steps of the subnormal grid makes the FPU round to that grid; what is left in the
    // low bits is the number of steps, which is the code (2^kMantissaBits steps is the first
    // normal).
    constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 23 + 1 - kBias - kMantissaBits) << 23;
    return f32_bits(f32_from_bits(abs) + f32_from_bits(kMagic)) - kMagic;
  }
  const uint32_t even = (abs >> kShift) & 1;
  const uint32_t rounded = abs + ((1u << (kShift - 1)) - 1) + even;
  return (rounded >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
}

}  // namespace

uint16_t f32_to_bf16(float x) {
  const uint32_t bits = f32_bits(x);
  if ((bits & 0x7fffffff) > kInfinity) return static_cast<uint16_t>((bits >> 16) | 0x0040);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
  if (magnitude >= 0x0f800000) {  // exponent field 31
    const bool nan = magnitude > 0x0f800000;
    return f32_from_bits(sign | kInfinity | (magnitude & 0x007fffff) | (nan ? 0x00400000 : 0));
  }
  // Read as a float the exponent is off by the difference of the biases; the product is exact for
  // normal and subnormal codes alike.
  const float value = f32_from_bits(magnitude) * f32_from_bits((127u + 112u) << 23);
  return f32_from_bits(f32_bits(value) | sign);
}

uint16_t f32_to_f16(float x) {
  const uint32_t bits = f32_bits(x);
  const uint32_t abs = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 16) & 0x8000;
  if (abs > kInfinity) return static_cast<uint16_t>(sign | 0x7e00 | ((abs >> 13) & 0x3ff));
  if (abs >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520: the tie to infinity
  return static_cast<uint16_t>(sign | round_magnitude<10, 15>(abs));
}

float e4m3_to_f32(uint8_t bits) { return kE4m3Values[bits]; }

uint8_t f32_to_e4m3(float x) {
  const uint32_t bits = f32_bits(x);
  const uint32_t abs = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 24) & 0x80;
  if (abs > kInfinity) return static_cast<uint8_t>(sign | 0x7f);
  if (abs >= 0x43e00000) return static_cast<uint8_t>(sign | 0x7e);  // 448
  return static_cast<uint8_t>(sign | round_magnitude<3, 7>(abs));
}

float e5m2_to_f32(uint8_t bits) { return kE5m2Values[bits]; }

uint8_t f32_to_e5m2(float x) {
  const uint32_t bits = f32_bits(x);
  const uint32_t abs = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 24) & 0x80;
  if (abs > kInfinity) return static_cast<uint8_t>(sign | 0x7f);
  if (abs >= 0x47600000) return static_cast<uint8_t>(sign | 0x7b);  // 57344
  return static_cast<uint8_t>(sign | round_magnitude<2, 15>(abs));
}

float e2m1_to_f32(uint8_t code) { return kE2m1Values[code & 15]; }

uint8_t f32_to_e2m1(float x) {
  const uint32_t bits = f32_bits(x);
  const uint32_t abs = bits & 0x7fffffff;
  const uint32_t sign = (bits >> 28) & 0x8;
  if (abs >= 0x40c00000) return static_cast<uint8_t>(sign | 7);  // 6, infinity and NaN
  return static_cast<uint8_t>(sign | round_magnitude<1, 1>(abs));
}

}  // namespace moekit
