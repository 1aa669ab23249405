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

/// Keeps the expansion behind the wait for products that still read the registers it writes.
template <Knobs K>
__device__ __forceinline__ void pin_words(GroupWords<K>& words) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (uint4& c : words[m].codes) {
      asm volatile("" : "+r"(c.x), "+r"(c.y), "+r"(c.z), "+r"(c.w)::"memory");
    }
    asm volatile("" : "+r"(words[m].scales[0]), "+r"(words[m].scales[1])::"memory");
  }
}

/// While the products of a step run, the next step's words are fetched; while one group expands,
/// the other's products run.
template <Knobs K, int kRows>
__device__ __forceinline__ void multiply_panels(PanelStorage<K>& shared, RingPosition& ring,
                                                int32_t steps, int group, int warp, int lane,
                                                SwappedSums<kRows>& sums) {
  GroupWords<K> words;
  fetch_words<K>(shared, ring, group, warp, lane, words);
  for (int32_t step = 0; step < steps; ++step) {
    pin_words<K>(words);
    uint32_t a[2][4][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int k = 0; k < 4; ++k) words[m].expand(k, a[m][k]);
    }
    uint64_t b = wgmma_descriptor(shared_address(shared.rows[ring.stage]));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int m = 0; m < 2; ++m) wgmma_bf16(sums.v[m], a[m][k], b);
      b += kDescriptorStepK;
    }
    wgmma_commit();
    const uint32_t used = ring.stage;
    ring.advance<K.stages>();
    if (step + 1 < steps) fetch_words<K>(shared, ring, group, warp, lane, words);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&shared.empty[used]);
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
