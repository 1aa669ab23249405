// Many divisions by one divisor, and the maximum that quantizers take.
#pragma once

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

/// The larger one, or NaN where one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

}  // namespace moekit::kernels
