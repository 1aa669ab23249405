// The consumer warpgroups' main loops. A full task (65 to 128 rows) gives each group 64 rows and
// all 256 weight rows; a half task (up to 64 rows) gives both groups the same rows and 128 weight
// rows each, so that short experts cost half.
#pragma once

#include "kernels/common/copy.cuh"
#include "kernels/common/wgmma.cuh"
#include "kernels/sm90_grouped_gemm/src/shared_storage.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// Sums of a thread: [0] of weight rows 0-127 of the tile (a half task: of the group's 128), [1] of
/// 128-255.
struct Sums {
  float v[2][64];
};

/// One arrival a warp, at the own block's and the partner's barrier.
template <Knobs K>
__device__ __forceinline__ void release_stage(SharedStorage<K>& shared, uint32_t stage, int lane) {
  if constexpr (K.cluster == 1) {
    if (lane == 0) barrier_arrive(&shared.empty[stage]);
  } else {
    if (lane < K.cluster) barrier_arrive_cluster(&shared.empty[stage], lane);
  }
}

/// Waits for the operands of a stage. Gathered rows were written by ordinary copies: the fence
/// makes them visible to the tensor cores.
template <Knobs K>
__device__ __forceinline__ void acquire_stage(SharedStorage<K>& shared, const RingPosition& ring) {
  barrier_wait(&shared.full[ring.stage], ring.parity);
  if constexpr (K.gathers()) fence_async_proxy();
}

/// Passes over a task that has no rows.
template <Knobs K>
__device__ __forceinline__ void skip_task(SharedStorage<K>& shared, RingPosition& ring,
                                          int32_t steps, int lane) {
  for (int32_t step = 0; step < steps; ++step) {
    barrier_wait(&shared.full[ring.stage], ring.parity);
    release_stage<K>(shared, ring.stage, lane);
    ring.advance<K.stages>();
  }
}

/// bf16: two wgmma groups in flight; a stage goes back when the next one's products have been
/// issued.
template <Knobs K, bool kHalf>
__device__ __forceinline__ void multiply_bf16(SharedStorage<K>& shared, RingPosition& ring,
                                              int32_t steps, int group, int lane, Sums& sums) {
  // Left undefined, the sums of full and half tasks would both live from the kernel's start.
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    sums.v[0][i] = 0.0f;
    if constexpr (!kHalf) sums.v[1][i] = 0.0f;
  }
  uint32_t previous = K.stages;
  for (int32_t step = 0; step < steps; ++step) {
    acquire_stage<K>(shared, ring);
    uint64_t a = wgmma_descriptor(shared_address(shared.rows[ring.stage]) +
                                  (kHalf ? 0 : group * 64 * kTileRowBytes));
    uint64_t b = wgmma_descriptor(shared_address(shared.weights[ring.stage]) +
                                  (kHalf ? group * 128 * kTileRowBytes : 0));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (kHalf) {
        wgmma_bf16_n128(sums.v[0], a, b);
      } else {
        wgmma_bf16_n256(sums.v[0], sums.v[1], a, b);
      }
      a += kDescriptorStepK;
      b += kDescriptorStepK;
    }
    wgmma_commit();
    if (previous < K.stages) {
      wgmma_wait<1>();
      release_stage<K>(shared, previous, lane);
    }
    previous = ring.stage;
    ring.advance<K.stages>();
  }
  wgmma_wait<0>();
  keep_in_order(sums.v[0]);
  if constexpr (!kHalf) keep_in_order(sums.v[1]);
  release_stage<K>(shared, previous, lane);
}

/// Scales that one thread needs along the depth: of its two rows, and of the two 64-column halves
/// (gate, up) or the two 128-row blocks of the weight tile. Offsets are elements, 32 bits to spare
/// registers: 2^32 scales stand for half a tera of values.
struct ScaleCursor {
  uint32_t row[2];
  uint32_t weight[2];
  float row_next[2];
  float weight_next[2];

  __device__ __forceinline__ void fetch(const Args& args, int32_t step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_next[i] = __ldg(args.row_scales + row[i] + step);
      weight_next[i] = __ldg(args.weights.scales + weight[i] + step);
    }
  }
};

/// fp8: products of one 128-deep block land in `part`, then fp32 arithmetic scales and adds them:
/// sums += part * (row scale * weight scale). While one group does that the other multiplies.
template <Knobs K, bool kHalf>
__device__ __forceinline__ void multiply_fp8(const Args& args, SharedStorage<K>& shared,
                                             RingPosition& ring, int32_t steps, int group, int lane,
                                             ScaleCursor& scales, Sums& sums) {
  float part[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) part[i] = sums.v[0][i] = sums.v[1][i] = 0.0f;
  scales.fetch(args, 0);
  for (int32_t step = 0; step < steps; ++step) {
    float row[2], weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = scales.row_next[i];
      weight[i] = scales.weight_next[i];
    }
    if (step + 1 < steps) scales.fetch(args, step + 1);
    acquire_stage<K>(shared, ring);
#pragma unroll
    for (int pass = 0; pass < (kHalf ? 1 : 2); ++pass) {
      uint64_t a = wgmma_descriptor(shared_address(shared.rows[ring.stage]) +
                                    (kHalf ? 0 : group * 64 * kTileRowBytes));
      uint64_t b = wgmma_descriptor(shared_address(shared.weights[ring.stage]) +
                                    (kHalf ? group : pass) * 128 * kTileRowBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma_e4m3_n128(part, a, b, k > 0);
        a += kDescriptorStepK;
        b += kDescriptorStepK;
      }
      wgmma_commit();
      wgmma_wait<0>();
      keep_in_order(part);
      if (pass == (kHalf ? 0 : 1)) release_stage<K>(shared, ring.stage, lane);
        // With a gate the first 32 registers are gate columns; else one weight block a pass.
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const int which = K.gated() ? i / 32 : (kHalf ? 0 : pass);
        const float scale = row[(i >> 1) & 1] * weight[which];
        sums.v[pass][i] = fmaf(part[i], scale, sums.v[pass][i]);
      }
    }
    ring.advance<K.stages>();
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
