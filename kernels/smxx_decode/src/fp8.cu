// Decode kernels over fp8_block weights, which lie in rows. Rings of 16 warps keep 64 KiB under way
// on an SM, and L2 fetches as much again; for few tokens an SM holds a block of gate_up and one of
// down, so that down fills its rings while gate_up still runs. Codes of the tokens are made once
// the first weights are under way.
#include "kernels/smxx_decode/src/fp8.h"
#include "kernels/smxx_decode/src/fp8_units.cuh"
#include "kernels/smxx_decode/src/ring_launch.cuh"

namespace moekit::kernels::smxx_decode {
namespace {

template <bool kGated, int kStages>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    fp8_gate_up_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t fp8_shared[];
  __shared__ Chosen chosen;
  __shared__ Share<false> share;
  using Source = Fp8Source<kGated>;
  const SharedParts<Source, kStages> parts(fp8_shared);
  wait_for_predecessor();
  // Only now: what starts early may then read whatever this kernel was allowed to read.
  release_dependents();
  find_chosen(args, routed_expert(args), chosen);
  StagedCodes tokens(args, parts.rows);
  if (threadIdx.x == 0) {
    share.fill(chosen, args.inter / Source::kStripColumns, tokens.blocks, Source::kStepBlocks);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  auto store = [&](int32_t expert, int32_t strip, int32_t slot, const float(&sums)[1][4]) {
    const int32_t column = strip * Source::kStripColumns + lane / 4;
    const int64_t bias = static_cast<int64_t>(expert) * args.inter + column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t to = __shfl_sync(kAll, slot, (lane % 4 * 2 + i) * 4);
      if (to < 0) continue;
      float* const h = args.h_values + static_cast<int64_t>(to) * args.inter + column;
      const float low = sums[0][i], high = sums[0][2 + i];
      if constexpr (kGated) {
        *h = apply_gated(args.activation, low + value_or(args.gate_bias, bias, 0.0f),
                         high + value_or(args.up_bias, bias, 0.0f));
      } else {
        h[0] = apply_unary(args.activation, low + value_or(args.up_bias, bias, 0.0f));
        h[8] = apply_unary(args.activation, high + value_or(args.up_bias, bias + 8, 0.0f));
      }
    }
  };
  run_units<kStages>(Source(args.gate_up, args.hidden), chosen, share, parts.rings, parts.pieces,
                     tokens, store);
}

template <int kStages, int kBatch>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    fp8_down_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t fp8_shared[];
  __shared__ Chosen chosen;
  __shared__ Share<false> share;
  using Source = Fp8Source<false>;
  const SharedParts<Source, kStages> parts(fp8_shared);
  release_dependents();
  find_chosen(args, routed_expert(args), chosen);
  IntermediateCodes<kBatch> tokens(args, chosen, share);
  if (threadIdx.x == 0) {
    share.fill(chosen, args.hidden / Source::kStripColumns, tokens.blocks, Source::kStepBlocks);
  }
  __syncthreads();
  auto store = [&](int32_t expert, int32_t strip, int32_t slot, const float(&sums)[1][4]) {
    const int32_t first = strip * Source::kStripColumns;
    store_output(args, expert, first, slot, args.y + first, args.hidden,
                 [&](int i) { return sums[0][i]; });
  };
  run_units<kStages>(Source(args.down, args.inter), chosen, share, parts.rings, parts.pieces,
                     tokens, store);
}

// Stages of a ring. With the deep ones a block of down finds no room beside one of gate_up, which
// costs less than streams with gaps do where a call reads more than kDeepBytes.
constexpr int kDeep = 4, kMany = 3, kFew = 2;
constexpr int64_t kDeepBytes = 48 << 20;

/// How many stages rings have, and the shared memory, with `tokens` rows in it.
struct Shape {
  int stages = kFew;
  int64_t bytes = 0;

  Shape(const Args& args, int32_t tokens, const Room& room) {
    const int64_t most = int64_t{args.num_tokens} * args.top_k;
    const int64_t experts = most < args.num_experts ? most : args.num_experts;
    const bool deep = experts * (args.gate_up.expert_bytes + args.down.expert_bytes) > kDeepBytes;
    for (const int depth : {kDeep, kMany, kFew}) {
      stages = depth;
      bytes = decode_fp8_shared_bytes(tokens, args.hidden, depth);
      if ((deep || depth != kDeep) && room.takes(bytes)) break;
    }
  }
};

template <bool kGated>
auto gate_up_kernel(int stages) {
  return stages == kDeep   ? fp8_gate_up_kernel<kGated, kDeep>
         : stages == kMany ? fp8_gate_up_kernel<kGated, kMany>
                           : fp8_gate_up_kernel<kGated, kFew>;
}
/// Rows of many blocks are quantized eight blocks a warp at a time; for others the code of that
/// would cost more, cold, than it saves.
auto down_kernel(int stages, int32_t inter) {
  const bool long_rows = inter > 4 * kWarps * kFp8Block;
  return stages == kDeep && long_rows ? fp8_down_kernel<kDeep, 8>
         : stages == kDeep            ? fp8_down_kernel<kDeep, 4>
         : stages == kMany            ? fp8_down_kernel<kMany, 4>
                                      : fp8_down_kernel<kFew, 4>;
}

}  // namespace

cudaError_t fp8_ring_fits(const Args& args, bool& fits) {
  Room room;
  const cudaError_t status = room.find();
  fits = status == cudaSuccess &&
         room.takes(decode_fp8_shared_bytes(args.num_tokens, args.hidden, kFew));
  return status;
}

cudaError_t fp8_gate_up(const Args& args, cudaStream_t stream, bool overlap) {
  Room room;
  const cudaError_t status = room.find();
  if (status != cudaSuccess) return status;
  const Shape shape(args, args.num_tokens, room);
  const auto kernel =
      args.gated ? gate_up_kernel<true>(shape.stages) : gate_up_kernel<false>(shape.stages);
  return launch_rings(kernel, args, room.alone(shape.bytes), stream, overlap);
}

cudaError_t fp8_down(const Args& args, cudaStream_t stream, bool overlap) {
  Room room;
  const cudaError_t status = room.find();
  if (status != cudaSuccess) return status;
  const Shape shape(args, 0, room);
  const int64_t gate_up_bytes = room.alone(Shape(args, args.num_tokens, room).bytes);
  return launch_rings(down_kernel(shape.stages, args.inter), args,
                      room.beside(gate_up_bytes, shape.bytes), stream, overlap);
}

}  // namespace moekit::kernels::smxx_decode
