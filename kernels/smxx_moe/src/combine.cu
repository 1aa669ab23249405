// Combine: the slot-ordered, weighted sum of each token's rows (docs/numerics.md), 16 bytes of each
// row a thread. And the activation of fp32 rows, for chains without a fused epilogue.
#include <cuda_bf16.h>

#include "kernels/common/copy.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/live_count.cuh"
#include "kernels/smxx_moe/api.h"

namespace moekit::kernels::smxx_moe {
namespace {

constexpr int kThreads = 256;
/// Columns of a thread.
constexpr int columns_of(RowType type) { return type == RowType::f32 ? 4 : 8; }

struct CombineArgs {
  const void* rows;
  const int32_t* ids;
  const float* weights;
  int32_t num_tokens;
  const int32_t* live_tokens;
  int32_t top_k;
  int32_t num_experts;
  int32_t pieces;  // groups of columns_of() columns in a row
  void* out;
};

template <RowType kType>
struct Piece;

template <>
struct Piece<RowType::f32> {
  float4 v;
  __device__ __forceinline__ void load(const void* base, int64_t piece) {
    v = __ldg(static_cast<const float4*>(base) + piece);
  }
  __device__ __forceinline__ float at(int i) const { return (&v.x)[i]; }
};

template <>
struct Piece<RowType::bf16> {
  uint4 v;
  __device__ __forceinline__ void load(const void* base, int64_t piece) {
    v = __ldg(static_cast<const uint4*>(base) + piece);
  }
  __device__ __forceinline__ float at(int i) const {
    const uint32_t word = (&v.x)[i / 2];
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
};

/// kColumns columns, 8 to 32 bytes.
template <RowType kType, int kColumns>
__device__ __forceinline__ void store_piece(void* base, int64_t piece,
                                            const float (&sum)[kColumns]) {
  constexpr int kWords = kType == RowType::f32 ? kColumns : kColumns / 2;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kType == RowType::f32) {
      words[i] = __float_as_uint(sum[i]);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  auto* to = static_cast<uint32_t*>(base) + piece * kWords;
  if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      *reinterpret_cast<uint4*>(to + i) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
    }
  }
}

/// kBatch slots of a token, from `first` on.
template <int kBatch>
struct Slots {
  bool present[kBatch];
  float weight[kBatch];

  __device__ __forceinline__ void load(const CombineArgs& args, int64_t token, int32_t first) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t slot = token * args.top_k + first + j;
      const bool inside = first + j < args.top_k;
      present[j] =
          inside && static_cast<uint32_t>(args.ids[slot]) < static_cast<uint32_t>(args.num_experts);
      weight[j] = inside ? args.weights[slot] : 0.0f;
    }
  }
};

/// kBatch rows in flight: the sum has to be ordered, the loads do not. Ids and weights are older
/// than the predecessor: where few tokens leave nothing else to do (decode chains, whose rows are
/// f32), the first ones are there when its rows are.
template <RowType kIn, RowType kOut, int kBatch>
__global__ void __launch_bounds__(kThreads) combine_kernel(const CombineArgs args) {
  constexpr int kColumns = columns_of(kIn);
  const int32_t tokens = live_count(args.num_tokens, args.live_tokens);
  const int64_t total = static_cast<int64_t>(tokens) * args.pieces;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Slots<kBatch> slots;
  bool loaded = kIn == RowType::f32;
  if (loaded && i < total) slots.load(args, i / args.pieces, 0);
  wait_for_predecessor();
  release_dependents();
  for (; i < total; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t token = i / args.pieces;
    const int64_t column = i - token * args.pieces;
    float sum[kColumns] = {};
    bool any = false;
    for (int32_t first = 0; first < args.top_k; first += kBatch) {
      if (!loaded) slots.load(args, token, first);
      loaded = false;
      Piece<kIn> piece[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int64_t slot = token * args.top_k + first + j;
        if (slots.present[j]) piece[j].load(args.rows, slot * args.pieces + column);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (!slots.present[j]) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float product = __fmul_rn(slots.weight[j], piece[j].at(c));
          sum[c] = any ? __fadd_rn(sum[c], product) : product;
        }
        any = true;
      }
    }
    store_piece<kOut, kColumns>(args.out, i, sum);
  }
}

__global__ void activate_kernel(const float* gate_up, int64_t num_rows, int64_t inter, bool gated,
                                EpilogueActivation activation, bool to_bf16, void* out) {
  const int64_t total = num_rows * inter;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = i / inter, column = i % inter;
    const float h = gated ? apply_gated(activation, gate_up[row * 2 * inter + column],
                                        gate_up[row * 2 * inter + inter + column])
                          : apply_unary(activation, gate_up[i]);
    if (to_bf16) {
      static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(h);
    } else {
      static_cast<float*>(out)[i] = h;
    }
  }
}

unsigned blocks_for(int64_t items) {
  const int64_t wanted = (items + kThreads - 1) / kThreads;
  constexpr int64_t kMost = 132 * 16;  // two rounds of a full H200
  return static_cast<unsigned>(wanted < kMost ? wanted : kMost);
}

struct SpreadArgs {
  const uint4* from;
  int64_t num_rows;
  const int32_t* live_rows;
  const int32_t* slot_row;
  int32_t slots;
  int32_t pieces;  // of 16 bytes in a row
  uint4* to;
};

/// Reads each row once, however many experts have it.
__global__ void __launch_bounds__(kThreads) spread_kernel(const SpreadArgs args) {
  wait_for_predecessor();
  release_dependents();
  const int64_t total = live_count(args.num_rows, args.live_rows) * args.pieces;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i / args.pieces, piece = i - row * args.pieces;
    const uint4 v = __ldg(args.from + i);
    for (int32_t j = 0; j < args.slots; ++j) {
      const int32_t to = __ldg(args.slot_row + row * args.slots + j);
      if (to >= 0) args.to[int64_t{to} * args.pieces + piece] = v;
    }
  }
}

}  // namespace

cudaError_t spread_rows(const void* from, int64_t row_bytes, int64_t num_rows,
                        const int32_t* live_rows, const int32_t* slot_row, int32_t slots, void* to,
                        cudaStream_t stream, bool overlap) {
  if (row_bytes <= 0 || row_bytes % 16 != 0) return cudaErrorInvalidValue;
  if (num_rows == 0) return cudaSuccess;
  const SpreadArgs args{static_cast<const uint4*>(from),
                        num_rows,
                        live_rows,
                        slot_row,
                        slots,
                        static_cast<int32_t>(row_bytes / 16),
                        static_cast<uint4*>(to)};
  return launch(spread_kernel, {blocks_for(num_rows * args.pieces), kThreads, 0, stream, overlap},
                args);
}

cudaError_t combine_rows(const void* rows, RowType type, const int32_t* ids, const float* weights,
                         int64_t num_tokens, const int32_t* live_tokens, int32_t top_k,
                         int32_t num_experts, int64_t width, RowType out_type, void* out,
                         cudaStream_t stream, bool overlap) {
  if (width <= 0 || width % 8 != 0 || num_tokens > INT32_MAX) return cudaErrorInvalidValue;
  if (num_tokens == 0) return cudaSuccess;
  const CombineArgs args{
      rows,        ids,   weights,     static_cast<int32_t>(num_tokens),
      live_tokens, top_k, num_experts, static_cast<int32_t>(width / columns_of(type)),
      out};
  const LaunchShape shape{blocks_for(num_tokens * args.pieces), kThreads, 0, stream, overlap};
  using enum RowType;
  // In a decode chain each round of loads is a latency that nothing hides.
  if (type == f32) {
    return out_type == f32 ? launch(combine_kernel<f32, f32, 8>, shape, args)
                           : launch(combine_kernel<f32, bf16, 8>, shape, args);
  }
  return out_type == f32 ? launch(combine_kernel<bf16, f32, 4>, shape, args)
                         : launch(combine_kernel<bf16, bf16, 4>, shape, args);
}

cudaError_t activate_rows(const float* gate_up, int64_t num_rows, int64_t inter,
                          const ActivationSpec& activation, RowType type, void* out,
                          cudaStream_t stream) {
  if (num_rows * inter == 0) return cudaSuccess;
  activate_kernel<<<blocks_for(num_rows * inter), kThreads, 0, stream>>>(
      gate_up, num_rows, inter, activation.gated, epilogue_activation(activation),
      type == RowType::bf16, out);
  return cudaGetLastError();
}

}  // namespace moekit::kernels::smxx_moe
