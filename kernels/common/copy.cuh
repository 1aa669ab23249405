// Data movement: TMA tile loads, cp.async, stmatrix, proxy fences, and the ordering of dependent
// launches.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/common/barrier.cuh"

namespace moekit::kernels {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// One thread: a box of a 2-D tensor, coordinates innermost first, counted on `barrier` in bytes.
__device__ __forceinline__ void tma_load_2d(const CUtensorMap* map, uint64_t* barrier, void* to,
                                            int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(const CUtensorMap* map, uint64_t* barrier, void* to,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// Boxes to the same place in the blocks of `mask`, counted on each block's own barrier.
__device__ __forceinline__ void tma_load_2d_multicast(const CUtensorMap* map, uint64_t* barrier,
                                                      void* to, uint16_t mask, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "h"(mask)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d_multicast(const CUtensorMap* map, uint64_t* barrier,
                                                      void* to, uint16_t mask, int c0, int c1,
                                                      int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(mask)
      : "memory");
}

/// One thread: `bytes` contiguous bytes (a multiple of 16, as both addresses), counted on
/// `barrier`.
__device__ __forceinline__ void bulk_load(uint64_t* barrier, void* to, const void* from,
                                          uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

/// 16 bytes through L2 to shared memory; zeros where `valid` is false (nothing is read then).
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
/// The same, for what is read once and in order: L2 fetches whole lines.
__device__ __forceinline__ void copy_async_stream_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
/// The same, for rows that are read in order, 128 bytes of each at a time: L2 fetches the next 128
/// with them.
__device__ __forceinline__ void copy_async_rows_16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
/// Ends a group of this thread's copies, perhaps an empty one.
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most kPending of this thread's groups, the latest, are under way. Other threads
/// see the copies after a barrier.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
/// Arrives at `barrier` when all earlier copies of this thread have landed. The arrival counts like
/// any other: the barrier must expect one of each copying thread.
__device__ __forceinline__ void copy_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

/// Stores 16 bytes to global memory where `valid`: predicated, where the compiler would branch.
__device__ __forceinline__ void store_16_if(bool valid, void* to, const uint4& v) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(static_cast<int>(valid)),
      "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

/// Asks for the line of `from` (4-aligned) without waiting for it: L1 has it later.
__device__ __forceinline__ void touch(const void* from) {
  [[maybe_unused]] uint32_t unused;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(unused) : "l"(from));
}

/// Orders ordinary shared-memory accesses (cp.async's and stmatrix's among them) that happened
/// before, by this thread or by threads it has synchronised with, ahead of later ones of the async
/// proxy (TMA, wgmma). May stand on either side of the synchronisation (PTX ISA, memory consistency
/// model, causality order: the fence need only lie on the path).
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// The same, each matrix transposed: rows of memory are the fragments' columns.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t to, uint32_t a, uint32_t b,
                                                           uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// Programmatic dependent launch: waits until the kernels this launch depends on have finished and
/// their writes are visible. Nothing a predecessor wrote may be read before, nothing it reads
/// written.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Lets dependents of this launch start; they still wait for its end before they read its results.
__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace moekit::kernels
