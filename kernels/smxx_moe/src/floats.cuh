// Small float formats on the device, by the definitions of src/tensor/float_formats.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace moekit::kernels::smxx_moe {

/// Saturating; NaN keeps its sign.
__device__ __forceinline__ uint8_t encode_e4m3(float x) {
  if (x != x) return static_cast<uint8_t>(0x7f | (__float_as_uint(x) >> 24 & 0x80));
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float decode_e4m3(uint8_t code) {
  const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
  float v;
  if ((code & 0x7f) == 0x7f) {
    v = __uint_as_float(0x7fc00000);
  } else if (exponent == 0) {
    v = static_cast<float>(mantissa) * 0.001953125f;
  } else {
    v = __uint_as_float((exponent + 120) << 23 | mantissa << 20);
  }
  return code & 0x80 ? -v : v;
}

__device__ __forceinline__ float decode_e5m2(uint8_t code) {
  const uint32_t exponent = code >> 2 & 31, mantissa = code & 3;
  float v;
  if (exponent == 31) {
    v = __uint_as_float(mantissa ? 0x7fc00000 : 0x7f800000);
  } else if (exponent == 0) {
    v = static_cast<float>(mantissa) * 1.52587890625e-5f;
  } else {
    v = __uint_as_float((exponent + 112) << 23 | mantissa << 21);
  }
  return code & 0x80 ? -v : v;
}

/// Round to nearest even among 0, .5, 1, 1.5, 2, 3, 4, 6; saturating; NaN becomes 6 with its sign.
__device__ __forceinline__ uint8_t encode_e2m1(float x) {
  const float a = fabsf(x);
  const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                   (a >= 3.5f) + (a > 5.0f);
  return static_cast<uint8_t>((x != x ? 7 : code) | (__float_as_uint(x) >> 28 & 8));
}

__device__ __forceinline__ float decode_e2m1(uint32_t code) {
  const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
  const float v = exponent == 0 ? 0.5f * static_cast<float>(mantissa)
                                : __uint_as_float((exponent + 126) << 23 | mantissa << 22);
  return code & 8 ? -v : v;
}

__device__ __forceinline__ float decode_e8m0(uint8_t byte) {
  if (byte == 255) return __uint_as_float(0x7fc00000);
  return byte == 0 ? __uint_as_float(0x00400000)
                   : __uint_as_float(static_cast<uint32_t>(byte) << 23);
}

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

inline constexpr float kScaleFloor = 7.88860905e-31f;  // 2^-100, as in src/quant/block.h

__device__ __forceinline__ float fp8_scale(float amax, bool power_of_two) {
  if (!is_finite(amax)) return __uint_as_float(0x7fc00000);
  const float scale = fmaxf(__fdiv_rn(amax, 448.0f), kScaleFloor);
  if (!power_of_two) return scale;
  const uint32_t bits = __float_as_uint(scale);
  return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

__device__ __forceinline__ uint32_t encode4_e4m3(const float4& v, float divisor) {
  if (divisor != divisor) return 0;
  return encode_e4m3(__fdiv_rn(v.x, divisor)) | encode_e4m3(__fdiv_rn(v.y, divisor)) << 8 |
         encode_e4m3(__fdiv_rn(v.z, divisor)) << 16 |
         static_cast<uint32_t>(encode_e4m3(__fdiv_rn(v.w, divisor))) << 24;
}

}  // namespace moekit::kernels::smxx_moe
