// Operands that have changed places: 64 weight rows are the first operand of a product and up to
// 128 rows of the call the second one. So a short task costs no more than its rows, rounded up to
// 16, 32, 64 or 128, and sums come out as columns: a lane has two columns of a warp's 16 and, of
// every eight rows, two.
#pragma once

#include "kernels/common/wgmma.cuh"
#include "kernels/common/wgmma_swapped.cuh"
#include "kernels/sm90_grouped_gemm/src/epilogue.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// Columns of a warp.
inline constexpr int kStripColumns = 16;

/// Sums of a group's two blocks of 64 weight rows: with a gate the gate's and up's of the same
/// columns, else of neighbouring ones.
template <int kRows>
struct SwappedSums {
  float v[2][kRows / 2];

  // Left undefined, the sums of all sizes would live from the kernel's start.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) v[0][i] = v[1][i] = 0.0f;
  }
};

/// Which 64 rows of which half (gate 0, up 1) block `i` of consumer group `group` is.
template <Knobs K>
struct SwappedBlock {
  int32_t half, tile;
  __device__ __forceinline__ SwappedBlock(const TileTask& task, int group, int i)
      : half(K.gated() ? i : 0),
        tile(K.gated() ? task.n_block * K.groups + group
                       : (task.n_block * K.groups + group) * 2 + i) {}
};

/// Output rows of a task's rows lane / 2, lane / 2 + 16, ...: all asked for at once.
template <int kRows>
struct StripRows {
  int32_t out_row[kRows / 16];

  __device__ __forceinline__ StripRows(const Args& args, const TileTask& task, int lane) {
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i) {
      const int row = lane / 2 + 16 * i;
      out_row[i] = task.first_row + row;
      if (args.out_index != nullptr && row < task.num_rows) {
        out_row[i] = __ldg(args.out_index + out_row[i]);
      }
    }
  }
};

/// Writes a warp's 16 columns from `column` on: v[i] is column (i & 2 ? 8 : 0) + lane / 4, row
/// i / 4 * 8 + lane % 4 * 2 + i % 2. Rows leave as 32 bytes each.
template <int kRows>
__device__ __forceinline__ void store_strip(const Args& args, const TileTask& task,
                                            const StripRows<kRows>& rows, int32_t column,
                                            uint8_t* staging, int lane,
                                            const float (&v)[kRows / 2]) {
  constexpr int kPart = kRows < 32 ? kRows : 32;
  const int chunk = lane % 2;
  uint8_t* const out = static_cast<uint8_t*>(args.out) + int64_t{column} * 2 + chunk * 16;
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
    for (int r = 0; r < kPart; r += 16) {
      const int row = r + lane / 2;
      const uint4 piece =
          *reinterpret_cast<const uint4*>(staging + row * 32 + (chunk ^ row / 4 % 2) * 16);
      store_16_if(base + row < task.num_rows,
                  out + rows.out_row[(base + r) / 16] * args.out_row_bytes, piece);
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
__device__ __forceinline__ void finish_gated_swapped(const Args& args, const TileTask& task,
                                                     const StripRows<kRows>& rows, int32_t column,
                                                     uint8_t* staging, int lane,
                                                     SwappedSums<kRows>& sums) {
  if (column >= args.shape.columns) return;
  const ColumnTerms gate(args, args.weights.multipliers, args.gate_bias, task.expert, column, lane);
  const ColumnTerms up(args, args.weights.up_multipliers, args.up_bias, task.expert, column, lane);
  // One uniform branch for the common forms in place of one a value: silu is a sigmoid one too.
  if (args.activation.form == EpilogueActivation::Form::silu ||
      args.activation.form == EpilogueActivation::Form::sigmoid) {
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
  store_strip<kRows>(args, task, rows, column, staging, lane, sums.v[0]);
}

template <int kRows>
__device__ __forceinline__ void finish_plain_swapped(const Args& args, const TileTask& task,
                                                     const StripRows<kRows>& rows, int32_t column,
                                                     uint8_t* staging, int lane,
                                                     float (&v)[kRows / 2]) {
  if (column >= args.shape.columns) return;
  const ColumnTerms terms(args, args.weights.multipliers, args.up_bias, task.expert, column, lane);
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) v[i] = terms.apply(v[i], i);
  if (args.activation.form != EpilogueActivation::Form::none) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) v[i] = apply_unary(args.activation, v[i]);
  }
  store_strip<kRows>(args, task, rows, column, staging, lane, v);
}

template <Knobs K, int kRows>
__device__ __forceinline__ void finish_swapped(const Args& args, const TileTask& task, int group,
                                               int warp, int lane, uint8_t* staging,
                                               SwappedSums<kRows>& sums) {
  const int32_t in_tile = warp * kStripColumns;
  const StripRows<kRows> rows(args, task, lane);
  if constexpr (K.gated()) {
    const int32_t column = SwappedBlock<K>(task, group, 0).tile * 64 + in_tile;
    finish_gated_swapped<kRows>(args, task, rows, column, staging, lane, sums);
  } else {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int32_t column = SwappedBlock<K>(task, group, m).tile * 64 + in_tile;
      finish_plain_swapped<kRows>(args, task, rows, column, staging, lane, sums.v[m]);
    }
  }
}

/// Calls multiply(sums) with sums of the least size that holds the task's rows, then finishes.
template <Knobs K, typename Multiply>
__device__ __forceinline__ void consume_swapped_task(const Args& args, const TileTask& task,
                                                     int group, int warp, int lane,
                                                     uint8_t* staging, Multiply multiply) {
  auto of_size = [&]<int kRows>() {
    SwappedSums<kRows> sums;
    sums.clear();
    multiply(sums);
    keep_in_order(sums.v[0]);
    keep_in_order(sums.v[1]);
    finish_swapped<K, kRows>(args, task, group, warp, lane, staging, sums);
  };
  if (task.num_rows <= 16) {
    of_size.template operator()<16>();
  } else if (K.tile().rows == 32 || task.num_rows <= 32) {
    of_size.template operator()<32>();
  } else if constexpr (K.tile().rows > 32) {
    if (task.num_rows <= 64) {
      of_size.template operator()<64>();
    } else {
      of_size.template operator()<128>();
    }
  }
}

}  // namespace moekit::kernels::sm90_grouped_gemm
