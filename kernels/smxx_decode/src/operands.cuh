// Warp-level matrix products of the decode kernels: 16 weight rows times up to 8 tokens, with
// operands loaded as they lie in memory.
//
// A sum over k does not care in which order k runs, as long as both operands agree. So lane (g, t)
// = (lane / 4, lane % 4) loads 16 contiguous bytes of weight rows g and g + 8 and of token g, at
// byte 16 t of a 64-byte step, and the four 4-byte words of each serve as the k positions of two
// mma instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/common/quotients.cuh"
#include "kernels/common/weight_view.h"

namespace moekit::kernels::smxx_decode {

/// Bytes of depth that a warp takes in a step.
inline constexpr int kStepBytes = 64;

/// Weights are read once: they pass by L1.
__device__ __forceinline__ uint4 load_weights(const uint8_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ float load_scale(const float* p) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
__device__ __forceinline__ void mma_e4m3(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#else
/// Before sm_89 there is no fp8 product: e4m3 values are exact in f16, two words make one f16
/// product.
__device__ __forceinline__ void halves_of(uint32_t word, uint32_t& low, uint32_t& high) {
  const __half2_raw a =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(word & 0xffff), __NV_E4M3);
  const __half2_raw b =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(word >> 16), __NV_E4M3);
  low = *reinterpret_cast<const uint32_t*>(&a);
  high = *reinterpret_cast<const uint32_t*>(&b);
}
__device__ __forceinline__ void mma_e4m3_word(float (&c)[4], uint32_t a_low, uint32_t a_high,
                                              uint32_t b) {
  uint32_t a0, a1, a2, a3, b0, b1;
  halves_of(a_low, a0, a2);
  halves_of(a_high, a1, a3);
  halves_of(b, b0, b1);
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_e4m3(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  mma_e4m3_word(c, a0, a1, b0);
  mma_e4m3_word(c, a2, a3, b1);
}
#endif

/// c += 64 bytes of depth: weight rows g (low) and g + 8 (high), token g.
template <OperandFormat kFormat>
__device__ __forceinline__ void multiply_step(float (&c)[4], const uint4& low, const uint4& high,
                                              const uint4& token) {
  if constexpr (kFormat == OperandFormat::bf16) {
    mma_bf16(c, low.x, high.x, low.y, high.y, token.x, token.y);
    mma_bf16(c, low.z, high.z, low.w, high.w, token.z, token.w);
  } else {
    mma_e4m3(c, low.x, high.x, low.y, high.y, token.x, token.y);
    mma_e4m3(c, low.z, high.z, low.w, high.w, token.z, token.w);
  }
}

/// Scale of a 1x128 block: amax / 448 with the row codec's floor, NaN where a value is not finite.
__device__ __forceinline__ float block_scale(float amax) {
  if ((__float_as_uint(amax) & 0x7f800000u) == 0x7f800000u) return __uint_as_float(0x7fc00000);
  const Quotients by_top(448.0f);
  const float scale =
      amax > 0x1p-60f && amax < 0x1p100f ? by_top.of(amax) : __fdiv_rn(amax, 448.0f);
  return fmaxf(scale, 7.88860905e-31f);
}

/// Codes of four values under a scale, first value lowest; zeros under a NaN scale.
__device__ __forceinline__ uint32_t encode4(const float* x, float scale) {
  if (scale != scale) return 0;
  const Quotients by(scale);
  if (by.covered()) return encode4_e4m3(by, x[0], x[1], x[2], x[3]);
  const float2 a{__fdiv_rn(x[0], scale), __fdiv_rn(x[1], scale)};
  const float2 b{__fdiv_rn(x[2], scale), __fdiv_rn(x[3], scale)};
  return __nv_cvt_float2_to_fp8x2(a, __NV_SATFINITE, __NV_E4M3) |
         static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(b, __NV_SATFINITE, __NV_E4M3)) << 16;
}

}  // namespace moekit::kernels::smxx_decode
