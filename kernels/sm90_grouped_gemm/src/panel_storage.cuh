// Shared memory of the kernels for weights in panels.
#pragma once

#include "kernels/common/expand.cuh"
#include "kernels/sm90_grouped_gemm/src/shared_storage.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// Blocks of 64 columns of depth in a stage: fewer, larger steps keep short tasks streaming.
inline constexpr int kStageBlocks = 2;

template <Knobs K>
struct PanelStorage {
  static constexpr int kBlockBytes = PanelFormat::of(K.format).block_bytes();
  static constexpr int kRowsBytes = K.tile().rows * kTileRowBytes;
  /// Tiles of 64 weight rows of a task: two for each consumer group.
  static constexpr int kTiles = 2 * K.groups;
  // Rows of 64 columns in the 128-byte swizzle, and blocks as they lie in memory.
  uint8_t rows[K.stages][kStageBlocks * kRowsBytes];
  uint8_t weights[K.stages][kTiles * kStageBlocks * kBlockBytes];
  // 32 rows of 16 columns for each consumer warp on their way out.
  uint8_t out[K.groups * 4][32 * 32];
  uint64_t full[K.stages];
  uint64_t empty[K.stages];
};

template <Knobs K>
__device__ __forceinline__ PanelStorage<K>& panel_storage(uint8_t* dynamic) {
  const uint32_t address = shared_address(dynamic);
  return *reinterpret_cast<PanelStorage<K>*>(dynamic + ((1024u - (address & 1023u)) & 1023u));
}

/// Walks the tasks of this block, or of its cluster, whose blocks take one half of a task's columns
/// each: one of as many as there are blocks or clusters. Each round starts one entry later, so that
/// entries which stand apart by a divisor of that number, the empty halves of pairs say, do not all
/// meet the same blocks. (A queue as of the other kernels cost these, whose tasks are short, more
/// than it gave.)
template <Knobs K>
class TaskWalk {
 public:
  __device__ __forceinline__ explicit TaskWalk(const Args& args)
      : tasks_(args.tasks), count_(__ldcg(args.num_tasks)), place_(blockIdx.x / K.cluster) {
    load();
  }
  /// False after the last task. Fetches one ahead, so that a task's start does not wait for memory.
  /// In the last round a block may find no entry: an empty task.
  __device__ __forceinline__ bool take(TileTask& task) {
    if (round_ >= count_) return false;
    task = next_;
    const uint32_t width = gridDim.x / K.cluster;
    round_ += width;
    place_ += 1;
    if (place_ >= width) place_ -= width;
    load();
    return true;
  }

 private:
  __device__ __forceinline__ void load() {
    const int32_t i = round_ + place_;
    const auto* entry = reinterpret_cast<const int4*>(tasks_ + i);
    // From L2: `down` may have started while the predecessor of its predecessor had just ended.
    const int4 raw = i < count_ ? __ldcg(entry) : int4{0, 0, 0, 0};
    next_ = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (K.cluster > 1) next_.n_block = raw.w * K.cluster + cluster_rank();
  }
  const TileTask* tasks_;
  int32_t count_;
  int32_t round_ = 0;  // first entry of the next round
  uint32_t place_;     // in it
  TileTask next_;
};

}  // namespace moekit::kernels::sm90_grouped_gemm
