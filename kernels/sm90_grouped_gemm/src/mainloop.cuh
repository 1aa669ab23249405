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
template <Knobs K, typename Storage>
__device__ __forceinline__ void release_stage(Storage& shared, uint32_t stage, int lane) {
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
/// (gate, up) or the two 128-row blocks of the weight tile. Offsets are bytes: 32 bits reach the
/// scales of 2^37 values.
struct ScaleCursor {
  uint32_t row[2];
  uint32_t weight[2];
  float row_next[2];
  float weight_next[2];

  __device__ __forceinline__ void fetch(const Args& args, int32_t step) {
    const uint32_t at = static_cast<uint32_t>(step) * sizeof(float);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_next[i] = load(args.row_scales, row[i] + at);
      weight_next[i] = load(args.weights.scales, weight[i] + at);
    }
  }

 private:
  static __device__ __forceinline__ float load(const float* base, uint32_t offset) {
    return __ldg(reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(base) + offset));
  }
};

/// Products of row and weight scales: [which weights][which row].
struct ScaleTerms {
  float v[2][2];

  /// Of what was fetched last; computed here, not where they are used.
  __device__ __forceinline__ void take(const ScaleCursor& scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i / 2][i % 2] = scales.row_next[i % 2] * scales.weight_next[i / 2];
      asm volatile("" : "+f"(v[i / 2][i % 2]));
    }
  }
};

/// Descriptors of one operand in all stages: only their low words differ.
struct StageDescriptors {
  uint32_t first;  // low word of stage 0's

  __device__ __forceinline__ explicit StageDescriptors(const uint8_t* tile)
      : first(static_cast<uint32_t>(wgmma_descriptor(shared_address(tile)))) {
    asm volatile("" : "+r"(first));  // or it would be computed again in every step
  }
  /// `bytes` from the start of stage 0's tile.
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    return (wgmma_descriptor(0) >> 32 << 32) | (first + (bytes >> 4));
  }
};

/// sums += part * terms. With a gate the first 32 registers are gate columns, else all are of one
/// weight block. In the order of the terms, so that the register file gives each of them once for
/// several.
template <Knobs K>
__device__ __forceinline__ void promote(const float (&part)[64], const ScaleTerms& terms, int pass,
                                        float (&sums)[64]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float term = terms.v[K.gated() ? half : pass][row];
#pragma unroll
      for (int i = half * 32 + row * 2; i < half * 32 + 32; i += 4) {
        sums[i] = fmaf(part[i], term, sums[i]);
        sums[i + 1] = fmaf(part[i + 1], term, sums[i + 1]);
      }
    }
  }
}

/// fp8: products of one 128-deep block by half of the weight tile land in `part`, then fp32
/// arithmetic scales and adds them: sums += part * (row scale * weight scale). While one group does
/// that the other one's products run. All that the next products need is made ready while these
/// run, so that nothing but the additions stands between the two.
template <Knobs K, bool kHalf>
__device__ __forceinline__ void multiply_fp8(const Args& args, SharedStorage<K>& shared,
                                             RingPosition& ring, int32_t steps, int group, int lane,
                                             ScaleCursor& scales, Sums& sums) {
  constexpr int kPasses = kHalf ? 1 : 2;
  constexpr uint32_t kRowsStage = sizeof(shared.rows[0]), kWeightsStage = sizeof(shared.weights[0]);
  const StageDescriptors a(shared.rows[0]), b(shared.weights[0]);
  // A vote, so that the compiler sees that all lanes agree and keeps descriptors in uniform
  // registers.
  const uint32_t second = __any_sync(0xffffffffu, group == 1) ? 1 : 0;
  const uint32_t a_group = kHalf ? 0 : second * 64 * kTileRowBytes;
  const uint32_t b_group = kHalf ? second * 128 * kTileRowBytes : 0;
  float part[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) part[i] = sums.v[0][i] = sums.v[1][i] = 0.0f;
  ScaleTerms terms, next_terms;
  acquire_stage<K>(shared, ring);
  terms.take(scales);
  scales.fetch(args, steps > 1 ? 1 : 0);
  for (int32_t step = 0; step < steps; ++step) {
    RingPosition next = ring;
    next.template advance<K.stages>();
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      uint64_t a_k = a.at(ring.stage * kRowsStage + a_group);
      uint64_t b_k = b.at(ring.stage * kWeightsStage + b_group + pass * 128 * kTileRowBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma_e4m3_n128(part, a_k, b_k, k > 0);
        a_k += kDescriptorStepK;
        b_k += kDescriptorStepK;
      }
      wgmma_commit();
      if (pass == 0) {
        next_terms.take(scales);
        scales.fetch(args, step + 2 < steps ? step + 2 : steps - 1);
      }
      if (pass == kPasses - 1 && step + 1 < steps) acquire_stage<K>(shared, next);
      wgmma_wait<0>();
      keep_in_order(part);
      if (pass == kPasses - 1) release_stage<K>(shared, ring.stage, lane);
      promote<K>(part, terms, kHalf ? 0 : pass, sums.v[pass]);
    }
    terms = next_terms;
    ring = next;
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
