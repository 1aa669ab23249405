// Shared memory of one block and the small helpers that all roles use.
#pragma once

#include "kernels/common/barrier.cuh"
#include "kernels/common/fragment.h"
#include "kernels/common/swizzle.h"
#include "kernels/sm90_grouped_gemm/src/knobs.h"

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

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

/// Walks the tasks of this block: one of every gridDim.x, with a cluster entry `rank` of every
/// pair. Each round starts one entry (pair) later, so that entries which stand apart by a divisor
/// of gridDim.x, the empty halves of pairs say, do not all meet the same blocks.
template <Knobs K>
class TaskWalk {
 public:
  __device__ __forceinline__ TaskWalk(const Args& args)
      : tasks_(args.tasks), count_(__ldcg(args.num_tasks)), place_(blockIdx.x) {
    load();
  }
  /// False after the last task. Fetches one ahead, so that a task's start does not wait for memory.
  /// In the last round a block may find no entry: an empty task.
  __device__ __forceinline__ bool take(TileTask& task) {
    if (round_ >= count_) return false;
    task = next_;
    index_ = round_ + place_;
    round_ += gridDim.x;
    place_ += K.cluster;
    if (place_ >= gridDim.x) place_ -= gridDim.x;
    load();
    return true;
  }
  /// Entry of the task taken last.
  __device__ __forceinline__ int32_t index() const { return index_; }

 private:
  __device__ __forceinline__ void load() {
    const int32_t i = round_ + place_;
    const auto* entry = reinterpret_cast<const int4*>(tasks_ + i);
    // From L2: `down` may have started while the predecessor of its predecessor had just ended.
    const int4 raw = i < count_ ? __ldcg(entry) : int4{0, 0, 0, 0};
    next_ = {raw.x, raw.y, raw.z, raw.w};
  }
  const TileTask* tasks_;
  int32_t count_;
  int32_t round_ = 0;  // first entry of the next round
  uint32_t place_;     // in it
  int32_t index_ = 0;
  TileTask next_;
};

}  // namespace moekit::kernels::sm90_grouped_gemm
