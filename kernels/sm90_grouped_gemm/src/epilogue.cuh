// The consumer warpgroups' epilogues: bias, activation, rounding or quantization, and rows on their
// way out through shared memory, so that every store is 16 bytes wide and rows are written whole.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "kernels/common/copy.cuh"
#include "kernels/common/quotients.cuh"
#include "kernels/sm90_grouped_gemm/src/mainloop.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// Where one warp's 16 rows of a task stand and go. Lane l keeps the output row of row l % 16.
struct WarpRows {
  int32_t first = 0;  // inside the task
  int32_t valid = 0;  // of the 16, how many are rows of the task
  int32_t out_row = 0;

  __device__ __forceinline__ void find(const Args& args, const TileTask& task, bool half, int group,
                                       int warp, int lane) {
    first = (half ? 0 : group * 64) + warp * 16;
    const int32_t left = task.num_rows - first;
    valid = left < 0 ? 0 : left > 16 ? 16 : left;
    out_row = task.first_row + first + lane % 16;
    if (args.out_index != nullptr && lane % 16 < valid) out_row = __ldg(args.out_index + out_row);
  }
};

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// Writes 16 columns (two neighbouring groups of eight) of a warp's 16 staged rows of 256 bytes:
/// v[0..3] of the left group, v[4..7] of the right one, in accumulator order.
__device__ __forceinline__ void stage_bf16(uint8_t* staging, const float (&v)[8], int chunk,
                                           int lane) {
  const uint32_t row = lane / 8 % 2 * 8 + lane % 8;
  const uint32_t to = shared_address(staging) + staging_chunk_offset(row, chunk + lane / 16, 16);
  store_matrix_x4(to, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                  pack_bf16(v[6], v[7]));
}

/// Copies a warp's staged rows out: kChunks 16-byte pieces a row (a power of two) of the kRowChunks
/// that staged rows are apart, those below `valid_chunks`, to byte `out_byte` of each output row.
/// Without a branch, so that loads and stores of several rows are under way at once.
template <int kRowChunks, int kChunks>
__device__ __forceinline__ void store_rows(const Args& args, const WarpRows& rows,
                                           const uint8_t* staging, int valid_chunks,
                                           int64_t out_byte, int lane) {
  constexpr int kStep = 32 / kChunks, kPasses = 16 / kStep, kBatch = kPasses < 4 ? kPasses : 4;
  const int chunk = lane % kChunks, first = lane / kChunks;
  uint8_t* const out = static_cast<uint8_t*>(args.out) + out_byte + chunk * 16;
  __syncwarp();
#pragma unroll
  for (int pass = 0; pass < kPasses; pass += kBatch) {
    uint4 piece[kBatch];
    int32_t out_row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = first + (pass + i) * kStep;
      piece[i] =
          *reinterpret_cast<const uint4*>(staging + staging_chunk_offset(r, chunk, kRowChunks));
      out_row[i] = __shfl_sync(0xffffffffu, rows.out_row, r);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = first + (pass + i) * kStep;
      store_16_if(r < rows.valid && chunk < valid_chunks, out + out_row[i] * args.out_row_bytes,
                  piece[i]);
    }
  }
  __syncwarp();
}

/// sums[i] += bias of its column, for kCount registers that start at `column`. Columns past the
/// last one have no bias.
template <int kCount>
__device__ __forceinline__ void add_bias(const float* bias, int32_t column, int32_t columns,
                                         int lane, float* sums) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const int c = column + i * 2 + lane % 4 * 2;
    if (c >= columns) break;
    const float2 b = __ldg(reinterpret_cast<const float2*>(bias + c));
    sums[i] += b.x;
    sums[i + 1] += b.y;
    sums[i + 2] += b.x;
    sums[i + 3] += b.y;
  }
}

/// act(gate, up) of registers i and i + 32 of a 128-column block, in place of the gate registers.
template <int kBlocks>
__device__ __forceinline__ void activate_gated(const Args& args, const TileTask& task, int column,
                                               int lane, Sums& sums) {
  const int64_t base = static_cast<int64_t>(task.expert) * args.shape.columns;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int c = column + b * 64;
    if (args.gate_bias != nullptr) {
      add_bias<32>(args.gate_bias + base, c, args.shape.columns, lane, sums.v[b]);
    }
    if (args.up_bias != nullptr) {
      add_bias<32>(args.up_bias + base, c, args.shape.columns, lane, sums.v[b] + 32);
    }
    // One uniform branch for the common forms in place of one a value.
    if (args.activation.form == EpilogueActivation::Form::silu) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        sums.v[b][i] = apply_gated_silu(sums.v[b][i], sums.v[b][i + 32]);
      }
    } else if (args.activation.form == EpilogueActivation::Form::sigmoid) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        sums.v[b][i] = apply_gated_sigmoid(args.activation, sums.v[b][i], sums.v[b][i + 32]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        sums.v[b][i] = apply_gated(args.activation, sums.v[b][i], sums.v[b][i + 32]);
      }
    }
  }
}

/// f(x) without a gate, in place.
__device__ __forceinline__ void activate_plain(const EpilogueActivation& activation,
                                               float (&v)[64]) {
  if (activation.form == EpilogueActivation::Form::none) return;
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = apply_unary(activation, v[i]);
}

/// gate_up, bf16: kBlocks * 64 columns of h.
template <int kBlocks>
__device__ __forceinline__ void finish_gated_bf16(const Args& args, const TileTask& task,
                                                  const WarpRows& rows, int column,
                                                  uint8_t* staging, int lane, Sums& sums) {
  activate_gated<kBlocks>(args, task, column, lane, sums);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = sums.v[b][i + j];
      stage_bf16(staging, v, b * 8 + i / 4, lane);
    }
  }
  const int left = (args.shape.columns - column) / 8;
  store_rows<16, kBlocks * 8>(args, rows, staging, left, static_cast<int64_t>(column) * 2, lane);
}

/// up and down, bf16: kBlocks * 128 columns.
template <int kBlocks, bool kActivation>
__device__ __forceinline__ void finish_plain_bf16(const Args& args, const TileTask& task,
                                                  const WarpRows& rows, int column,
                                                  uint8_t* staging, int lane, Sums& sums) {
  const int64_t base = static_cast<int64_t>(task.expert) * args.shape.columns;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int first = column + b * 128;
    if (args.up_bias != nullptr) {
      add_bias<64>(args.up_bias + base, first, args.shape.columns, lane, sums.v[b]);
    }
    if constexpr (kActivation) activate_plain(args.activation, sums.v[b]);
#pragma unroll
    for (int i = 0; i < 64; i += 8) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = sums.v[b][i + j];
      stage_bf16(staging, v, i / 4, lane);
    }
    store_rows<16, 16>(args, rows, staging, (args.shape.columns - first) / 8,
                       static_cast<int64_t>(first) * 2, lane);
  }
}

/// gate_up, fp8: kBlocks * 64 of the task's 128 columns, quantized under one scale a row and task.
template <int kBlocks>
__device__ __forceinline__ void finish_gated_fp8(const Args& args, const TileTask& task,
                                                 const WarpRows& rows, int column, int group,
                                                 int warp, uint8_t* staging, float (*amax)[64],
                                                 int lane, Sums& sums) {
  activate_gated<kBlocks>(args, task, column, lane, sums);
  float top[2] = {0.0f, 0.0f};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& t = top[(i >> 1) & 1];
      t = max_or_nan(t, fabsf(sums.v[b][i]));
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int width = 1; width < 4; width *= 2) {
      top[h] = max_or_nan(top[h], __shfl_xor_sync(0xffffffffu, top[h], width));
    }
  }
  if constexpr (kBlocks == 1) {
    // A half task: the other 64 columns of each row are with the other group.
    const int row = warp * 16 + lane / 4;
    if (lane % 4 == 0) {
      amax[group][row] = top[0];
      amax[group][row + 8] = top[1];
    }
    named_barrier(1, kConsumerGroups * kWarpgroup);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = max_or_nan(top[h], amax[group ^ 1][row + 8 * h]);
    }
    named_barrier(1, kConsumerGroups * kWarpgroup);  // read before the next half task writes
  }
  float scale[2], inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // amax / 448 with the codec's floor of 2^-100; NaN marks a block that is not finite.
    const float s = top[h] * (1.0f / 448.0f);
    scale[h] = top[h] < 3.4e38f ? fmaxf(s, 7.88860905e-31f) : __int_as_float(0x7fc00000);
    inverse[h] = 1.0f / scale[h];
    const int row = lane / 4 + 8 * h;
    if (lane % 4 == 0 && row < rows.valid && (kBlocks == 2 || group == 0)) {
      const int64_t out_row = task.first_row + rows.first + row;
      args.out_scales[out_row * args.out_scale_stride + task.n_block] = scale[h];
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int h = (i >> 1) & 1;
      const float2 pair = {sums.v[b][i] * inverse[h], sums.v[b][i + 1] * inverse[h]};
      const uint16_t codes = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      const uint32_t byte = b * 64 + i / 4 * 8 + lane % 4 * 2;
      *reinterpret_cast<uint16_t*>(staging + staging_chunk_offset(lane / 4 + 8 * h, byte / 16, 8) +
                                   byte % 16) = codes;
    }
  }
  const int left = (args.shape.columns - column) / 16;
  store_rows<8, kBlocks * 4>(args, rows, staging, left, column, lane);
}

}  // namespace moekit::kernels::sm90_grouped_gemm
