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
  static constexpr uint32_t kBytes = PanelFormat::of(K.format).block_bytes();
  const uint8_t* block[kStageBlocks];  // of the first step; null past the last row of the matrix
  uint32_t stage_bytes = 0;

  __device__ __forceinline__ PanelStream(const Args& args, const TileTask& task) {
    const int64_t tile_bytes = int64_t{panel_steps(args.shape.depth)} * kBytes;
    const auto* expert =
        static_cast<const uint8_t*>(args.weights.base) + task.expert * args.weights.expert_bytes;
#pragma unroll
    for (int i = 0; i < kStageBlocks; ++i) {
      const SwappedBlock<K> t(task, i / 2, i % 2);
      const bool inside = t.tile < panel_tiles(args.shape.columns);
      block[i] = inside ? expert + t.half * args.weights.half_bytes + t.tile * tile_bytes : nullptr;
      if (inside) stage_bytes += kBytes;
    }
  }

  /// One thread: announces the bytes of a stage, `others` among them, and loads its blocks.
  __device__ __forceinline__ void load(uint64_t* full, uint8_t* to, int32_t step,
                                       uint32_t others) const {
    barrier_arrive_expect(full, stage_bytes + others);
#pragma unroll
    for (int i = 0; i < kStageBlocks; ++i) {
      if (block[i] == nullptr) continue;
      bulk_load(full, to + i * kBytes, block[i] + static_cast<int64_t>(step) * kBytes, kBytes);
    }
  }
};

/// Rows come by TMA where they lie in order and fill a tile, else by copies of just those rows.
template <Knobs K>
__device__ __forceinline__ void produce_panels(const KernelArgs& kernel, PanelStorage<K>& shared,
                                               int thread) {
  const Args& args = kernel.args;
  const int32_t depth_bytes = args.shape.depth * K.element_bytes();
  const int32_t steps = panel_steps(args.shape.depth);
  RingPosition ring;
  TaskWalk walk(args);
  TileTask task;
  while (walk.take(task)) {
    if (task.num_rows == 0) continue;
    const PanelStream<K> weights(args, task);
    const bool tiles = args.row_index == nullptr && task.num_rows > 64;
    GatheredRows rows;
    if (!tiles) rows.find(args, task, thread);
    for (int32_t step = 0; step < steps; ++step) {
      uint64_t* full = &shared.full[ring.stage];
      uint8_t* to = shared.rows[ring.stage];
      barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      if (thread == 0) {
        weights.load(full, shared.weights[ring.stage], step, tiles ? kTileRows * kTileRowBytes : 0);
      }
      if (tiles) {
        if (thread == 0) {
          tma_load_2d(&kernel.rows, full, to, step * kPanelDepth, task.first_row);
          tma_load_2d(&kernel.rows, full, to + 64 * kTileRowBytes, step * kPanelDepth,
                      task.first_row + 64);
        }
        barrier_arrive(full);
      } else {
        rows.copy(args, to, step * kTileRowBytes, depth_bytes, thread);
        copy_async_arrive(full);
      }
      ring.advance<K.stages>();
    }
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
