// Shared memory of one block and the small helpers that all roles use.
#pragma once

#include "kernels/common/barrier.cuh"
#include "kernels/common/fragment.h"
#include "kernels/common/swizzle.h"
#include "kernels/sm90_grouped_gemm/src/knobs.h"
#include "kernels/sm90_grouped_gemm/src/task_queue.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

inline constexpr int kConsumerGroups = 2;
inline constexpr int kConsumerWarps = kConsumerGroups * 4;
inline constexpr int kThreads = (kConsumerGroups + 1) * kWarpgroup;

template <Knobs K>
struct SharedStorage {
  // Operand ring, 128-byte rows in the 128-byte swizzle.
  uint8_t rows[K.stages][K.tile().rows * kTileRowBytes];
  uint8_t weights[K.stages][kTileColumns * kTileRowBytes];
  // 16 rows of 256 bytes for each consumer warp on their way out.
  uint8_t out[kConsumerWarps][16 * 256];
  float amax[kConsumerGroups][64];
  uint64_t full[K.stages];   // operands of a stage have arrived
  uint64_t empty[K.stages];  // all consumers (of the cluster) have read a stage
  TaskQueue tasks;
};

/// The block's storage at the first 1024-byte boundary of dynamic shared memory.
template <Knobs K>
__device__ __forceinline__ SharedStorage<K>& shared_storage(uint8_t* dynamic) {
  const uint32_t address = shared_address(dynamic);
  return *reinterpret_cast<SharedStorage<K>*>(dynamic + ((1024u - (address & 1023u)) & 1023u));
}
template <Knobs K>
constexpr int32_t shared_bytes() {
  return static_cast<int32_t>(sizeof(SharedStorage<K>)) + 1024;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

}  // namespace moekit::kernels::sm90_grouped_gemm
