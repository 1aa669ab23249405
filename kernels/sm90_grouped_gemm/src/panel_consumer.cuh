// The consumer warpgroups of the kernels for weights in panels: blocks are expanded to bf16 in
// registers, as the first operand of the products.
#pragma once

#include "kernels/sm90_grouped_gemm/src/panel_storage.cuh"
#include "kernels/sm90_grouped_gemm/src/swapped.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

template <Knobs K>
using GroupWords = StripWords<K.format>[2];

/// Waits for a stage and fetches the group's words of it.
template <Knobs K>
__device__ __forceinline__ void fetch_words(PanelStorage<K>& shared, const RingPosition& ring,
                                            int group, int warp, int lane, GroupWords<K>& words) {
  barrier_wait(&shared.full[ring.stage], ring.parity);
  fence_async_proxy();  // rows were written by ordinary copies
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint8_t* block =
        shared.weights[ring.stage] + (group * 2 + m) * PanelStorage<K>::kBlockBytes;
    words[m].load(block, warp, lane,
                  [](const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); });
  }
}

/// The first operands of a step: of two blocks and four times 16 columns.
struct StepOperands {
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

/// While the products of a step run, the next step's weights are expanded and those of the one
/// after it fetched.
template <Knobs K, int kRows>
__device__ __forceinline__ void multiply_panels(PanelStorage<K>& shared, RingPosition& ring,
                                                int32_t steps, int group, int warp, int lane,
                                                SwappedSums<kRows>& sums) {
  RingPosition ahead = ring;
  GroupWords<K> words;
  auto fetch = [&] {
    fetch_words<K>(shared, ahead, group, warp, lane, words);
    ahead.template advance<K.stages>();
  };
  auto multiply = [&](const StepOperands& a, StepOperands& next, int32_t step) {
    uint64_t b = wgmma_descriptor(shared_address(shared.rows[ring.stage]));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int m = 0; m < 2; ++m) wgmma_bf16(sums.v[m], a.v[m][k], b);
      b += kDescriptorStepK;
    }
    wgmma_commit();
    if (step + 1 < steps) {
      next.expand(words);
      next.pin();
      if (step + 2 < steps) fetch();
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
    ring.advance<K.stages>();
  };
  StepOperands a[2];
  fetch();
  a[0].expand(words);
  if (steps > 1) fetch();
  for (int32_t step = 0; step < steps; step += 2) {
    multiply(a[0], a[1], step);
    if (step + 1 < steps) multiply(a[1], a[0], step + 1);
  }
}

template <Knobs K>
__device__ __forceinline__ void consume_panels(const Args& args, PanelStorage<K>& shared, int group,
                                               int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const int32_t steps = panel_steps(args.shape.depth);
  uint8_t* staging = shared.out[group * 4 + warp];
  RingPosition ring;
  TaskWalk walk(args);
  TileTask task;
  while (walk.take(task)) {
    if (task.num_rows == 0) continue;
    consume_swapped_task<K>(args, task, group, warp, lane, staging, [&](auto& sums) {
      multiply_panels<K>(shared, ring, steps, group, warp, lane, sums);
    });
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
