// wgmma with 64 weight rows in registers as the first operand, and 16 to 128 rows of the call as
// the second one. See wgmma.cuh for the order of use. sm_90a only.
#pragma once

#include <cstdint>

#include "kernels/common/wgmma_lists.h"

namespace moekit::kernels {

// d += a * b over 16 columns of depth: d of thread and register as fragment.h says, b a descriptor.
// `a` is mma.m16n8k16's fragment of each warp's 16 rows; it must not be written before the group
// has been waited for.

__device__ __forceinline__ void wgmma_bf16(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" MOEKIT_WGMMA_REGISTERS_8
               "}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
               : MOEKIT_WGMMA_SUMS_8(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_bf16(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" MOEKIT_WGMMA_REGISTERS_16
               "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
               : MOEKIT_WGMMA_SUMS_16(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_bf16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MOEKIT_WGMMA_REGISTERS_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : MOEKIT_WGMMA_SUMS_32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_bf16(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MOEKIT_WGMMA_REGISTERS_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : MOEKIT_WGMMA_SUMS_64(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

}  // namespace moekit::kernels
