// The consumer warpgroups of the kernels for weights in panels: blocks are expanded to bf16 in
// registers, as the first operand of the products.
#pragma once

#include "kernels/sm90_grouped_gemm/src/panel_storage.cuh"
#include "kernels/sm90_grouped_gemm/src/swapped.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// Waits for a stage.
template <Knobs K>
__device__ __forceinline__ void acquire_panels(PanelStorage<K>& shared, const RingPosition& ring) {
  barrier_wait(&shared.full[ring.stage], ring.parity);
  fence_async_proxy();  // rows were written by ordinary copies
}

/// A warp's words of tile `tile` of the group's two, in block `block` of a stage.
template <Knobs K>
__device__ __forceinline__ void fetch_words(const PanelStorage<K>& shared, uint32_t stage,
                                            int block, int tile, int group, int warp, int lane,
                                            StripWords<K.format>& words) {
  constexpr PanelFormat kPanel = PanelFormat::of(K.format);
  const uint8_t* from = shared.weights[stage] +
                        ((group * 2 + tile) * kStageBlocks + block) * PanelStorage<K>::kBlockBytes;
  words.load(from + warp * kPanel.strip_bytes(), from + kPanel.scale_offset(warp * kStripRows, 0),
             lane);
}

/// The first operands of a tile's block: of four times 16 columns.
struct TileOperands {
  uint32_t v[4][4];

  template <typename Words>
  __device__ __forceinline__ void expand(const Words& words) {
#pragma unroll
    for (int k = 0; k < 4; ++k) words.expand(k, v[k]);
  }
  /// Keeps the expansion where it is written: ahead of the wait that follows.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(v[i / 4][i % 4])::"memory");
  }
};

/// A unit is one tile's block: four to a stage, both tiles of a block one after the other. While
/// its products run, the next unit's weights are expanded and those of the one after it fetched.
template <Knobs K, int kRows>
__device__ __forceinline__ void multiply_panels(PanelStorage<K>& shared, RingPosition& ring,
                                                int32_t blocks, int group, int warp, int lane,
                                                SwappedSums<kRows>& sums) {
  static_assert(kStageBlocks == 2);  // units 0 and 1 begin a stage, 2 and 3 end it
  RingPosition ahead = ring;
  StripWords<K.format> words;
  const int32_t units = 2 * blocks;
  auto fetch = [&](int unit) {
    if (unit == 0) acquire_panels<K>(shared, ahead);
    fetch_words<K>(shared, ahead.stage, unit / 2, unit % 2, group, warp, lane, words);
    if (unit == 3) ahead.template advance<K.stages>();
  };
  // Unit `in_stage` of its stage, unit `index` of all.
  auto multiply = [&](const TileOperands& a, TileOperands& next, int in_stage, int32_t index) {
    uint64_t b = wgmma_descriptor(shared_address(shared.rows[ring.stage]) +
                                  in_stage / 2 * PanelStorage<K>::kRowsBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma_bf16(sums.v[in_stage % 2], a.v[k], b);
      b += kDescriptorStepK;
    }
    wgmma_commit();
    if (index + 1 < units) {
      next.expand(words);
      next.pin();
      if (index + 2 < units) fetch((in_stage + 2) % 4);
    }
    wgmma_wait<0>();
    if (in_stage == 3 || index + 1 == units) {
      release_stage<K>(shared, ring.stage, lane);
      ring.advance<K.stages>();
    }
  };
  TileOperands a[2];
  fetch(0);
  a[0].expand(words);
  fetch(1);
  for (int32_t index = 0; index < units; index += 4) {
    multiply(a[0], a[1], 0, index);
    multiply(a[1], a[0], 1, index + 1);
    if (index + 2 < units) {
      multiply(a[0], a[1], 2, index + 2);
      multiply(a[1], a[0], 3, index + 3);
    }
  }
}

template <Knobs K>
__device__ __forceinline__ void consume_panels(const Args& args, PanelStorage<K>& shared, int group,
                                               int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const int32_t blocks = panel_steps(args.shape.depth);
  uint8_t* staging = shared.out[group * 4 + warp];
  RingPosition ring;
  TaskWalk<K> walk(args);
  TileTask task;
  while (walk.take(task)) {
    if (task.num_rows == 0) continue;
    consume_swapped_task<K>(args, task, group, warp, lane, staging, [&](auto& sums) {
      multiply_panels<K>(shared, ring, blocks, group, warp, lane, sums);
    });
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
