// The producer warpgroup of the kernels for weights in panels: blocks of weights by bulk copies,
// rows as in producer.cuh.
#pragma once

#include "kernels/sm90_grouped_gemm/src/panel_storage.cuh"
#include "kernels/sm90_grouped_gemm/src/producer.cuh"
#include "kernels/sm90_grouped_gemm/src/swapped.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// Where the blocks of a task's stages come from.
template <Knobs K>
struct PanelStream {
  static constexpr int kBytes = PanelStorage<K>::kBlockBytes;
  static constexpr int kTiles = PanelStorage<K>::kTiles;
  const uint8_t* tile[kTiles];  // null past the last row of the matrix
  uint32_t num_tiles = 0;

  __device__ __forceinline__ PanelStream(const Args& args, const TileTask& task) {
    const int64_t tile_bytes = int64_t{panel_steps(args.shape.depth)} * kBytes;
    const auto* expert =
        static_cast<const uint8_t*>(args.weights.base) + task.expert * args.weights.expert_bytes;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const SwappedBlock<K> t(task, i / 2, i % 2);
      const bool inside = t.tile < panel_tiles(args.shape.columns);
      tile[i] = inside ? expert + t.half * args.weights.half_bytes + t.tile * tile_bytes : nullptr;
      if (inside) ++num_tiles;
    }
  }

  /// One thread: announces the bytes of a stage, `others` among them, and loads blocks `block` to
  /// `block` + count - 1 of each tile.
  __device__ __forceinline__ void load(uint64_t* full, uint8_t* to, int32_t block, int32_t count,
                                       uint32_t others) const {
    const uint32_t bytes = static_cast<uint32_t>(count * kBytes);
    barrier_arrive_expect(full, num_tiles * bytes + others);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (tile[i] == nullptr) continue;
      bulk_load(full, to + i * kStageBlocks * kBytes,
                tile[i] + static_cast<int64_t>(block) * kBytes, bytes);
    }
  }
};

/// One thread: a tile's 128 rows from `row` on, columns from `k` on. Blocks of a cluster have the
/// same rows: each loads one half for both, as its empty barriers tell of room in both.
template <Knobs K>
__device__ __forceinline__ void load_boxes(const KernelArgs& kernel, uint64_t* full, uint8_t* to,
                                           int32_t k, int32_t row) {
  for (uint32_t half = 0; half < 2; ++half) {
    uint8_t* at = to + half * 64 * kTileRowBytes;
    if constexpr (K.cluster == 1) {
      tma_load_2d(&kernel.rows, full, at, k, row + static_cast<int32_t>(half) * 64);
    } else if (cluster_rank() == half) {
      tma_load_2d_multicast(&kernel.rows, full, at, 3, k, row + static_cast<int32_t>(half) * 64);
    }
  }
}

/// Rows come by TMA where they lie in order and fill a tile, else by copies of just those rows.
/// early: the ring is filled with weights before the predecessor has ended, as in producer.cuh.
template <Knobs K>
__device__ __forceinline__ void produce_panels(const KernelArgs& kernel, PanelStorage<K>& shared,
                                               int thread, bool early) {
  const Args& args = kernel.args;
  const int32_t depth_bytes = args.shape.depth * K.element_bytes();
  const int32_t blocks = panel_steps(args.shape.depth);
  // Not of the warp that copies the rows of a short task.
  const bool leads = thread == kWarpgroup - 32;
  RingPosition ring;
  TaskWalk<K> walk(args);
  TileTask task;
  bool first_task = true;
  while (walk.take(task)) {
    if (task.num_rows == 0) continue;
    const PanelStream<K> weights(args, task);
    const bool tiles = args.row_index == nullptr && task.num_rows > 64;
    auto load = [&](int32_t block, uint32_t stage) {
      const int32_t count = blocks - block < kStageBlocks ? blocks - block : kStageBlocks;
      weights.load(&shared.full[stage], shared.weights[stage], block, count,
                   tiles ? count * PanelStorage<K>::kRowsBytes : 0);
    };
    int32_t ahead = 0;  // blocks of depth whose weights are under way
    if (early && first_task) {
      for (int32_t stage = 0; stage < K.stages && ahead < blocks; ++stage, ahead += kStageBlocks) {
        if (leads) load(ahead, stage);
      }
      wait_for_predecessor();
    }
    first_task = false;
    GatheredRows rows;
    if (!tiles) rows.find(args, task, thread);
    for (int32_t block = 0; block < blocks; block += kStageBlocks) {
      const int32_t count = blocks - block < kStageBlocks ? blocks - block : kStageBlocks;
      uint64_t* full = &shared.full[ring.stage];
      if (block >= ahead) {
        barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        if (leads) load(block, ring.stage);
      }
      for (int32_t i = 0; i < count; ++i) {
        uint8_t* to = shared.rows[ring.stage] + i * PanelStorage<K>::kRowsBytes;
        if (!tiles) {
          rows.copy(args, to, (block + i) * kTileRowBytes, depth_bytes, thread);
        } else if (leads) {
          load_boxes<K>(kernel, full, to, (block + i) * kPanelDepth, task.first_row);
        }
      }
      if (tiles) {
        barrier_arrive(full);
      } else {
        copy_async_arrive(full);
      }
      ring.advance<K.stages>();
    }
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
