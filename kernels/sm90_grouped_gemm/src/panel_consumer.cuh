// The consumer warpgroups of the kernels for weights in panels. Operands change places: 64 weight
// rows are the first operand of a product, expanded to bf16 in registers, and up to 128 rows of the
// call the second one, from shared memory. So a short task costs no more than its rows, rounded up
// to 16, 32, 64 or 128, and sums come out as columns: a lane has two columns of a strip and, of
// every eight rows, two.
#pragma once

#include "kernels/common/wgmma.cuh"
#include "kernels/common/wgmma_registers.cuh"
#include "kernels/sm90_grouped_gemm/src/epilogue.cuh"
#include "kernels/sm90_grouped_gemm/src/panel_storage.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// Sums of a group's two blocks of weight rows.
template <int kRows>
struct PanelSums {
  float v[2][kRows / 2];
};

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
                                                PanelSums<kRows>& sums) {
  // Without it the sums of all sizes would live from the kernel's start.
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sums.v[0][i] = sums.v[1][i] = 0.0f;
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
      for (int m = 0; m < 2; ++m) wgmma_bf16_registers(sums.v[m], a[m][k], b);
      b += kDescriptorStepK;
    }
    wgmma_commit();
    const uint32_t used = ring.stage;
    ring.advance<K.stages>();
    if (step + 1 < steps) fetch_words<K>(shared, ring, group, warp, lane, words);
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&shared.empty[used]);
  }
  keep_in_order(sums.v[0]);
  keep_in_order(sums.v[1]);
}

/// Writes a warp's 16 columns from `column` on: v[i] is column (i & 2 ? 8 : 0) + lane / 4, row
/// i / 4 * 8 + lane % 4 * 2 + i % 2. Rows leave as 32 bytes each.
template <int kRows>
__device__ __forceinline__ void store_strip(const Args& args, const TileTask& task, int32_t column,
                                            uint8_t* staging, int lane,
                                            const float (&v)[kRows / 2]) {
  constexpr int kPart = kRows < 32 ? kRows : 32;
#pragma unroll
  for (int base = 0; base < kRows; base += kPart) {
    if (base >= task.num_rows) break;
#pragma unroll
    for (int r = 0; r < kPart; r += 16) {
      const int i = (base + r) / 2;
      const int row = r + lane / 16 * 8 + lane % 8;
      const uint32_t to = shared_address(staging) + row * 32 + (lane / 8 % 2 ^ row / 4 % 2) * 16;
      store_matrix_x4_transposed(to, pack_bf16(v[i], v[i + 1]), pack_bf16(v[i + 2], v[i + 3]),
                                 pack_bf16(v[i + 4], v[i + 5]), pack_bf16(v[i + 6], v[i + 7]));
    }
    __syncwarp();
#pragma unroll
    for (int r = lane / 2; r < kPart; r += 16) {
      if (base + r >= task.num_rows) continue;
      int64_t out_row = task.first_row + base + r;
      if (args.out_index != nullptr) out_row = __ldg(args.out_index + out_row);
      const int chunk = lane % 2;
      auto* out = static_cast<uint8_t*>(args.out) + out_row * args.out_row_bytes;
      *reinterpret_cast<uint4*>(out + int64_t{column} * 2 + chunk * 16) =
          *reinterpret_cast<const uint4*>(staging + r * 32 + (chunk ^ r / 4 % 2) * 16);
    }
    __syncwarp();
  }
}

/// What a lane's two columns have in common: multiplier of the expert, and their biases.
struct ColumnTerms {
  float multiplier;
  float bias[2];

  __device__ __forceinline__ ColumnTerms(const Args& args, const float* multipliers,
                                         const float* biases, int32_t expert, int32_t column,
                                         int lane) {
    multiplier = multipliers != nullptr ? __ldg(multipliers + expert) : 1.0f;
    const float* own = biases + int64_t{expert} * args.shape.columns + column + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = biases != nullptr ? __ldg(own + 8 * h) : 0.0f;
  }
  __device__ __forceinline__ float apply(float sum, int i) const {
    return sum * multiplier + bias[i >> 1 & 1];
  }
};

template <int kRows>
__device__ __forceinline__ void finish_gated_panels(const Args& args, const TileTask& task,
                                                    int32_t column, uint8_t* staging, int lane,
                                                    PanelSums<kRows>& sums) {
  if (column >= args.shape.columns) return;
  const ColumnTerms gate(args, args.weights.multipliers, args.gate_bias, task.expert, column, lane);
  const ColumnTerms up(args, args.weights.up_multipliers, args.up_bias, task.expert, column, lane);
  const bool sigmoid = args.activation.form == EpilogueActivation::Form::sigmoid;
  // One uniform branch for the common form in place of one a value.
  if (sigmoid) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      sums.v[0][i] = apply_gated_sigmoid(args.activation, gate.apply(sums.v[0][i], i),
                                         up.apply(sums.v[1][i], i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      sums.v[0][i] =
          apply_gated(args.activation, gate.apply(sums.v[0][i], i), up.apply(sums.v[1][i], i));
    }
  }
  store_strip<kRows>(args, task, column, staging, lane, sums.v[0]);
}

template <int kRows>
__device__ __forceinline__ void finish_plain_panels(const Args& args, const TileTask& task,
                                                    int32_t column, uint8_t* staging, int lane,
                                                    float (&v)[kRows / 2]) {
  if (column >= args.shape.columns) return;
  const ColumnTerms terms(args, args.weights.multipliers, args.up_bias, task.expert, column, lane);
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) v[i] = terms.apply(v[i], i);
  if (args.activation.form != EpilogueActivation::Form::none) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) v[i] = apply_unary(args.activation, v[i]);
  }
  store_strip<kRows>(args, task, column, staging, lane, v);
}

template <Knobs K, int kRows>
__device__ __forceinline__ void consume_panel_task(const Args& args, PanelStorage<K>& shared,
                                                   const TileTask& task, RingPosition& ring,
                                                   int32_t steps, int group, int warp, int lane) {
  PanelSums<kRows> sums;
  multiply_panels<K, kRows>(shared, ring, steps, group, warp, lane, sums);
  uint8_t* staging = shared.out[group * 4 + warp];
  const int32_t in_tile = warp * kStripRows;
  if constexpr (K.gated()) {
    const int32_t column = PanelTile<K>(task, group, 0).tile * kPanelRows + in_tile;
    finish_gated_panels<kRows>(args, task, column, staging, lane, sums);
  } else {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int32_t column = PanelTile<K>(task, group, m).tile * kPanelRows + in_tile;
      finish_plain_panels<kRows>(args, task, column, staging, lane, sums.v[m]);
    }
  }
}

template <Knobs K>
__device__ __forceinline__ void consume_panels(const Args& args, PanelStorage<K>& shared, int group,
                                               int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const int32_t steps = panel_steps(args.shape.depth);
  RingPosition ring;
  TaskWalk walk(args);
  TileTask task;
  while (walk.take(task)) {
    const int32_t rows = task.num_rows;
    if (rows == 0) continue;
    if (rows <= 16) {
      consume_panel_task<K, 16>(args, shared, task, ring, steps, group, warp, lane);
    } else if (rows <= 32) {
      consume_panel_task<K, 32>(args, shared, task, ring, steps, group, warp, lane);
    } else if (rows <= 64) {
      consume_panel_task<K, 64>(args, shared, task, ring, steps, group, warp, lane);
    } else {
      consume_panel_task<K, 128>(args, shared, task, ring, steps, group, warp, lane);
    }
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
