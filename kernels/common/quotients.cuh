// What quantizers of fp8 share: many divisions by one divisor, and the maximum they start with.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace moekit::kernels {

/// Quotients by one divisor, the same ones as __fdiv_rn's, whose steps these are: but the
/// reciprocal is found once, and only operands of the middle of the range are looked after.
class Quotients {
 public:
  __device__ __forceinline__ explicit Quotients(float divisor) : divisor_(divisor) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(divisor));
    inverse_ = fmaf(y, fmaf(-divisor, y, 1.0f), y);
  }
  /// Whether dividends of at most 448 divisors can be divided.
  __device__ __forceinline__ bool covered() const {
    return divisor_ > 0x1p-60f && divisor_ < 0x1p100f;
  }
  __device__ __forceinline__ float of(float x) const {
    float q = x * inverse_;
    q = fmaf(fmaf(-divisor_, q, x), inverse_, q);
    q = fmaf(fmaf(-divisor_, q, x), inverse_, q);
    return __uint_as_float(__float_as_uint(q) | (__float_as_uint(x) & 0x80000000u));  // of -0 too
  }

 private:
  float divisor_, inverse_;
};

/// e4m3 codes of four covered quotients, the first one lowest.
__device__ __forceinline__ uint32_t encode4_e4m3(const Quotients& by, float x0, float x1, float x2,
                                                 float x3) {
  const auto low = __nv_cvt_float2_to_fp8x2({by.of(x0), by.of(x1)}, __NV_SATFINITE, __NV_E4M3);
  const auto high = __nv_cvt_float2_to_fp8x2({by.of(x2), by.of(x3)}, __NV_SATFINITE, __NV_E4M3);
  return low | static_cast<uint32_t>(high) << 16;
}

/// The larger one, or NaN where one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

}  // namespace moekit::kernels
