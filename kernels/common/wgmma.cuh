// wgmma: asynchronous products of a warpgroup. Operands lie in shared memory in the 128-byte
// swizzle, K-major; sums stay in registers (fragment.h says where). sm_90a only.
//
// Order of use: wgmma_fence(), products, wgmma_commit(), ..., wgmma_wait<n>(), keep_in_order(sums).
// Between the first product and the wait no thread may touch the sums.
#pragma once

#include <cstdint>

#include "kernels/common/wgmma_lists.h"

namespace moekit::kernels {

/// Orders earlier register accesses of the sums before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// The wait above names no register, so the compiler could read sums before it: this ties them
/// down.
template <int kCount>
__device__ __forceinline__ void keep_in_order(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Products of 64 rows of a and the named number of rows of b, which are descriptors: bf16 adds to
// d, e4m3 does where `accumulate` is not 0 and overwrites it otherwise.

__device__ __forceinline__ void wgmma_bf16_n256(float (&d0)[64], float (&d1)[64], uint64_t a,
                                                uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MOEKIT_WGMMA_REGISTERS_128
               "}, %128, %129, 1, 1, 1, 0, 0;"
               : MOEKIT_WGMMA_SUMS_64(d0, 0), MOEKIT_WGMMA_SUMS_64(d1, 0)
               : "l"(a), "l"(b));
}

__device__ __forceinline__ void wgmma_bf16_n128(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MOEKIT_WGMMA_REGISTERS_64
               "}, %64, %65, 1, 1, 1, 0, 0;"
               : MOEKIT_WGMMA_SUMS_64(d, 0)
               : "l"(a), "l"(b));
}

__device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b,
                                                int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOEKIT_WGMMA_REGISTERS_64
      "}, %64, %65, p, 1, 1;\n"
      "}\n"
      : MOEKIT_WGMMA_SUMS_64(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}

}  // namespace moekit::kernels
