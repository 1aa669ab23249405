// The consumer warpgroups of the kernels for weights in panels: blocks are expanded to bf16 in
// registers, as the first operand of the products.
#pragma once

#include "kernels/sm90_grouped_gemm/src/panel_storage.cuh"
#include "kernels/sm90_grouped_gemm/src/swapped.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

template <Knobs K>
using GroupWords = StripWords<K.format>[2];

/// Waits for a stage.
template <Knobs K>
__device__ __forceinline__ void acquire_panels(PanelStorage<K>& shared, const RingPosition& ring) {
  barrier_wait(&shared.full[ring.stage], ring.parity);
  fence_async_proxy();  // rows were written by ordinary copies
}

/// A warp's words of block `block` of a stage.
template <Knobs K>
__device__ __forceinline__ void fetch_words(const PanelStorage<K>& shared, uint32_t stage,
                                            int block, int group, int warp, int lane,
                                            GroupWords<K>& words) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint8_t* from = shared.weights[stage] +
                          ((group * 2 + m) * kStageBlocks + block) * PanelStorage<K>::kBlockBytes;
    constexpr PanelFormat kPanel = PanelFormat::of(K.format);
    words[m].load(from + warp * kPanel.strip_bytes(),
                  from + kPanel.scale_offset(warp * kStripRows, 0), lane);
  }
}

/// The first operands of a block: of two tiles and four times 16 columns.
struct BlockOperands {
  uint32_t v[2][4][4];

  template <typename Words>
  __device__ __forceinline__ void expand(const Words& words) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int k = 0; k < 4; ++k) words[m].expand(k, v[m][k]);
    }
  }
  /// Keeps the expansion where it is written: ahead of the wait that follows.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(v[i / 16][i / 4 % 4][i % 4])::"memory");
  }
};

/// While the products of a block run, the next block's weights are expanded and those of the one
/// after it fetched.
template <Knobs K, int kRows>
__device__ __forceinline__ void multiply_panels(PanelStorage<K>& shared, RingPosition& ring,
                                                int32_t blocks, int group, int warp, int lane,
                                                SwappedSums<kRows>& sums) {
  static_assert(kStageBlocks == 2);  // even blocks begin a stage, odd ones end it
  RingPosition ahead = ring;
  GroupWords<K> words;
  auto fetch = [&](int odd) {
    if (odd == 0) acquire_panels<K>(shared, ahead);
    fetch_words<K>(shared, ahead.stage, odd, group, warp, lane, words);
    if (odd == 1) ahead.template advance<K.stages>();
  };
  auto multiply = [&](const BlockOperands& a, BlockOperands& next, int32_t block, int odd) {
    uint64_t b = wgmma_descriptor(shared_address(shared.rows[ring.stage]) +
                                  odd * PanelStorage<K>::kRowsBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int m = 0; m < 2; ++m) wgmma_bf16(sums.v[m], a.v[m][k], b);
      b += kDescriptorStepK;
    }
    wgmma_commit();
    if (block + 1 < blocks) {
      next.expand(words);
      next.pin();
      if (block + 2 < blocks) fetch(odd);
    }
    wgmma_wait<0>();
    if (odd == 1 || block + 1 == blocks) {
      if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
      ring.advance<K.stages>();
    }
  };
  BlockOperands a[2];
  fetch(0);
  a[0].expand(words);
  if (blocks > 1) fetch(1);
  for (int32_t block = 0; block < blocks; block += 2) {
    multiply(a[0], a[1], block, 0);
    if (block + 1 < blocks) multiply(a[1], a[0], block + 1, 1);
  }
}

template <Knobs K>
__device__ __forceinline__ void consume_panels(const Args& args, PanelStorage<K>& shared, int group,
                                               int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const int32_t blocks = panel_steps(args.shape.depth);
  uint8_t* staging = shared.out[group * 4 + warp];
  RingPosition ring;
  TaskWalk walk(args);
  TileTask task;
  while (walk.take(task)) {
    if (task.num_rows == 0) continue;
    consume_swapped_task<K>(args, task, group, warp, lane, staging, [&](auto& sums) {
      multiply_panels<K>(shared, ring, blocks, group, warp, lane, sums);
    });
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
