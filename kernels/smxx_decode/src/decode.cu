// Decode kernels over rows of bf16, and fp8's gate_up where shared memory has no room for rings
// (fp8.cu, panels.cu). A unit of work is 16 weight rows of one chosen expert (8 gate and 8 up rows)
// against that expert's tokens, or one of `split` pieces of their depth; units are dealt to all
// warps of the GPU in memory order. A warp has 16 loads of 512 bytes in flight, an SM 128 KiB: more
// than HBM's latency asks for.
#include "kernels/common/copy.cuh"
#include "kernels/common/launch.h"
#include "kernels/smxx_decode/api.h"
#include "kernels/smxx_decode/src/fp8.h"
#include "kernels/smxx_decode/src/panels.h"
#include "kernels/smxx_decode/src/units.cuh"

namespace moekit::kernels::smxx_decode {
namespace {

struct KernelArgs {
  Args args;
  int32_t split;  // pieces of the depth, 1 or 2: neighbouring warps, added in order
};

/// The pieces of a unit's depth added in order, by the warp of the first piece. All warps of the
/// block call it the same number of times; true for the warp that goes on.
__device__ __forceinline__ bool join_pieces(int32_t split, float (*shared)[32][4], int lane,
                                            float (&sums)[4]) {
  if (split == 1) return true;
  const int warp = threadIdx.x / 32;
  if (warp % 2 == 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[warp / 2][lane][i] = sums[i];
  }
  __syncthreads();
  if (warp % 2 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += shared[warp / 2][lane][i];
  }
  __syncthreads();
  return warp % 2 == 0;
}

/// Which unit and which piece of it a warp has in round `round`; unit >= count: none.
struct Turn {
  int32_t unit, begin, end;

  __device__ __forceinline__ Turn(int32_t round, int32_t split, int32_t depth) {
    const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
    unit = (round * (kWarps / split) + warp / split) * static_cast<int32_t>(gridDim.x) +
           static_cast<int32_t>(blockIdx.x);
    const int32_t blocks = (depth + 127) / 128;
    const int32_t half = (blocks + split - 1) / split;
    begin = warp % split * half * 128;
    end = (warp % split + 1 == split ? blocks : half) * 128;
  }
};

/// Rounds that every warp of the grid makes, so that barriers match.
__device__ __forceinline__ int32_t rounds(int32_t units, int32_t split) {
  const int32_t per_round = static_cast<int32_t>(gridDim.x) * (kWarps / split);
  return (units + per_round - 1) / per_round;
}

/// Passes that the longest list of tokens needs.
__device__ __forceinline__ int32_t num_passes(const Chosen& chosen, int32_t unit, int32_t units,
                                              int32_t groups, int lane) {
  if (unit >= units) return 0;
  return (__popcll(slots_of(chosen, chosen.experts[unit / groups], lane)) + kTokens - 1) / kTokens;
}

/// The weight rows of gate_up's unit (expert, n): rows g are gate columns n + g and rows g + 8
/// their up columns; without a gate, columns n + g and n + 8 + g.
__device__ __forceinline__ UnitRows gate_up_rows(const Args& args, int32_t expert, int32_t n,
                                                 int lane) {
  const WeightView& w = args.gate_up;
  UnitRows unit;
  unit.low =
      static_cast<const uint8_t*>(w.base) + expert * w.expert_bytes + (n + lane / 4) * w.row_bytes;
  unit.high = unit.low + (args.gated ? w.half_bytes : 8 * w.row_bytes);
  unit.low_scale = w.scales + expert * w.scale_expert + n / 128 * w.scale_row;
  unit.high_scale = unit.low_scale + (args.gated ? w.scale_half : 0);
  return unit;
}

template <OperandFormat kFormat>
__device__ __forceinline__ void store_intermediate(const Args& args, int32_t expert, int32_t n,
                                                   const Pass& pass, int lane,
                                                   const float (&sums)[4]) {
  const int64_t bias = static_cast<int64_t>(expert) * args.inter;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t slot = pass.at(lane % 4 * 2 + i);
    if (slot < 0) continue;
    auto store = [&](int32_t column, float h) {
      const int64_t at = static_cast<int64_t>(slot) * args.inter + column;
      if constexpr (kFormat == OperandFormat::bf16) {
        static_cast<__nv_bfloat16*>(args.h)[at] = __float2bfloat16_rn(h);
      } else {
        args.h_values[at] = h;
      }
    };
    const int32_t column = n + lane / 4;
    const float low_bias = args.gated
                               ? (args.gate_bias != nullptr ? args.gate_bias[bias + column] : 0.0f)
                               : (args.up_bias != nullptr ? args.up_bias[bias + column] : 0.0f);
    const int32_t high_column = args.gated ? column : column + 8;
    const float high_bias = args.up_bias != nullptr ? args.up_bias[bias + high_column] : 0.0f;
    if (args.gated) {
      store(column, apply_gated(args.activation, sums[i] + low_bias, sums[2 + i] + high_bias));
    } else {
      store(column, apply_unary(args.activation, sums[i] + low_bias));
      store(high_column, apply_unary(args.activation, sums[2 + i] + high_bias));
    }
  }
}

template <OperandFormat kFormat>
__global__ void __launch_bounds__(kThreads, 1)
    gate_up_kernel(const __grid_constant__ KernelArgs kernel) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ Chosen chosen;
  __shared__ float pieces[kWarps / 2][32][4];
  const Args& args = kernel.args;
  const int lane = threadIdx.x % 32;
  const int32_t depth = args.hidden * (kFormat == OperandFormat::bf16 ? 2 : 1);
  const int32_t row_bytes = depth + 16;
  const int32_t blocks = (args.hidden + 127) / 128;
  auto* scales = reinterpret_cast<float*>(shared + args.num_tokens * row_bytes);
  wait_for_predecessor();
  // Only now: what starts early may then read whatever this kernel was allowed to read.
  release_dependents();
  find_chosen(args, routed_expert(args), chosen);
  stage_tokens<kFormat>(args, shared, row_bytes, scales, blocks);
  StagedTokens input{
      shared,  kFormat == OperandFormat::bf16 ? nullptr : scales, row_bytes, depth, blocks, -1,
      {-1, -1}};
  const int columns = args.gated ? 8 : 16;  // of h in a unit
  const int32_t groups = args.inter / columns;
  const int32_t units = chosen.count * groups;
  for (int32_t round = 0; round < rounds(units, kernel.split); ++round) {
    const Turn turn(round, kernel.split, depth);
    const int32_t passes = num_passes(chosen, turn.unit, units, groups, lane);
    const int32_t expert = passes > 0 ? chosen.experts[turn.unit / groups] : 0;
    const int32_t n = turn.unit % groups * columns;
    uint64_t mask = passes > 0 ? slots_of(chosen, expert, lane) : 0;
    const UnitRows unit = gate_up_rows(args, expert, passes > 0 ? n : 0, lane);
    // With pieces to join, every warp of the block makes the most passes that any expert needs.
    const int32_t turns = kernel.split == 1 ? passes : kMaxSlots / kTokens;
    for (int32_t p = 0; p < turns; ++p) {
      if (kernel.split > 1 && __syncthreads_or(p < passes) == 0) break;
      const Pass pass(mask);
      input.own = pass.at(lane / 4);
      input.own = input.own < 0 ? -1 : input.own / args.top_k;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t slot = pass.at(lane % 4 * 2 + i);
        input.pair[i] = slot < 0 ? -1 : slot / args.top_k;
      }
      float sums[4] = {};
      if (p < passes) multiply<kFormat>(unit, turn.begin, turn.end, depth, input, lane, sums);
      if (join_pieces(kernel.split, pieces, lane, sums) && p < passes) {
        store_intermediate<kFormat>(args, expert, n, pass, lane, sums);
      }
    }
  }
}

/// Owners have runs of whole strips, the experts of a strip one after the other.
template <bool kOwner>
__global__ void __launch_bounds__(kThreads, 1)
    down_kernel(const __grid_constant__ KernelArgs kernel) {
  __shared__ Chosen chosen;
  __shared__ std::conditional_t<kOwner, OwnedRows, char> owned;
  __shared__ float pieces[kWarps / 2][32][4];
  const Args& args = kernel.args;
  const int lane = threadIdx.x % 32;
  const int32_t depth = args.inter * 2;
  release_dependents();
  if constexpr (kOwner) owned.start(args);
  find_chosen(args, routed_expert(args), chosen);
  IntermediateRows input{static_cast<const uint8_t*>(args.h), depth, true, -1};
  const WeightView& w = args.down;
  const int32_t groups = args.hidden / kRows;
  const BlockRun run(kOwner ? groups : 0);
  const int32_t units = chosen.count * (kOwner ? run.last : groups);
  const int32_t each = kWarps / kernel.split;  // units of a round
  const int32_t all_rounds = kOwner ? ((run.last - run.first) * chosen.count + each - 1) / each
                                    : rounds(units, kernel.split);
  for (int32_t round = 0; round < all_rounds; ++round) {
    Turn turn(round, kernel.split, depth);
    if constexpr (kOwner) {
      turn.unit = run.first * chosen.count + round * each +
                  static_cast<int32_t>(threadIdx.x) / 32 / kernel.split;
    }
    const bool has_unit = turn.unit < units;
    const int32_t experts = kOwner ? chosen.count : groups;  // or strips
    const int32_t quotient = has_unit ? turn.unit / experts : 0;
    const int32_t remainder = has_unit ? turn.unit % experts : 0;
    const int32_t expert = has_unit ? chosen.experts[kOwner ? remainder : quotient] : 0;
    const int32_t strip = kOwner ? quotient : remainder, n = strip * kRows;
    uint64_t mask = has_unit ? slots_of(chosen, expert, lane) : 0;
    const int32_t passes = (__popcll(mask) + kTokens - 1) / kTokens;
    UnitRows unit;
    unit.low = static_cast<const uint8_t*>(w.base) + expert * w.expert_bytes +
               (n + lane / 4) * w.row_bytes;
    unit.high = unit.low + 8 * w.row_bytes;
    unit.low_scale = unit.high_scale = nullptr;
    const int32_t turns = kernel.split == 1 ? passes : kMaxSlots / kTokens;
    for (int32_t p = 0; p < turns; ++p) {
      if (kernel.split > 1 && __syncthreads_or(p < passes) == 0) break;
      const Pass pass(mask);
      input.own = pass.at(lane / 4);
      float sums[4] = {};
      if (p < passes)
        multiply<OperandFormat::bf16>(unit, turn.begin, turn.end, depth, input, lane, sums);
      if (!join_pieces(kernel.split, pieces, lane, sums) || p >= passes) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t slot = pass.at(lane % 4 * 2 + i % 2);
        if (slot < 0) continue;
        const int32_t column = n + lane / 4 + i / 2 * 8;
        const float bias = args.down_bias != nullptr
                               ? args.down_bias[static_cast<int64_t>(expert) * args.hidden + column]
                               : 0.0f;
        if constexpr (kOwner) {
          owned.strip_values(args, strip)[slot * kRows + column - n] = sums[i] + bias;
        } else {
          args.y[static_cast<int64_t>(slot) * args.hidden + column] = sums[i] + bias;
        }
      }
    }
  }
  // A block without work waits too: the end of this grid has to mean the end of gate_up.
  input.ready();
  if constexpr (kOwner) owned.sum(args, chosen);
}

/// Two pieces of depth where there are too few units to keep all warps busy.
int32_t split_of(const Args& args, int64_t units_per_expert) {
  const int64_t units = static_cast<int64_t>(args.num_tokens) * args.top_k * units_per_expert;
  return units < int64_t{2} * args.num_sms * kWarps ? 2 : 1;
}

template <OperandFormat kFormat>
cudaError_t launch_gate_up(const Args& args, cudaStream_t stream, bool overlap) {
  const int64_t shared =
      decode_shared_bytes(args.num_tokens, args.hidden, kFormat == OperandFormat::bf16 ? 2 : 1);
  const cudaError_t status =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(&gate_up_kernel<kFormat>),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  const LaunchShape shape{dim3(static_cast<unsigned>(args.num_sms)), kThreads,
                          static_cast<size_t>(shared), stream, overlap};
  return launch(gate_up_kernel<kFormat>, shape,
                KernelArgs{args, split_of(args, args.inter / (args.gated ? 8 : 16))});
}

}  // namespace

const char* refusal(const Args& args) {
  if (args.num_tokens < 1 || args.num_tokens > kMaxTokens ||
      args.num_tokens * args.top_k > kMaxSlots) {
    return "decode takes 1 to 8 tokens and up to 64 slots";
  }
  static_assert(kDecodeLimits.size_multiple == 32);
  if (args.hidden % kDecodeLimits.size_multiple != 0 ||
      args.inter % kDecodeLimits.size_multiple != 0) {
    return "sizes must be multiples of 32";
  }
  const bool fits = in_panels(args.format)
                        ? decode_panel_shared_bytes(args.format, args.num_tokens, args.hidden,
                                                    decode_panel_stages(args.format, false)) +
                                  kDecodeStaticBytes <=
                              block_shared_bytes(9, 0)
                        : int64_t{args.num_tokens} * args.hidden <= kDecodeLimits.max_elements;
  return fits ? nullptr : "the tokens do not fit into shared memory";
}

bool owns_columns(const Args& args) {
  // In fp8 each block would quantize the rows of all experts: 10 us more (H200, 2026-12).
  if (args.format == OperandFormat::fp8_block) return false;
  const int32_t strips = args.hidden / kRows;
  const int32_t most = (strips + args.num_sms - 1) / args.num_sms;
  // FP4 with two strips a block took from 2 us less to 12 us more. A twentieth of the blocks may
  // have nothing to do: a launch for the sum costs more.
  const bool fp4 = args.format == OperandFormat::mxfp4 || args.format == OperandFormat::nvfp4;
  return (most == 1 || !fp4) && int64_t{strips} * 20 >= int64_t{most} * args.num_sms * 19 &&
         most * args.num_tokens * args.top_k <= kDecodeOwnedRows;
}

cudaError_t gate_up(const Args& args, cudaStream_t stream, bool overlap) {
  if (refusal(args) != nullptr || args.num_sms < 1) return cudaErrorInvalidValue;
  if (in_panels(args.format)) return panel_gate_up(args, stream, overlap);
  if (args.format == OperandFormat::bf16) {
    return launch_gate_up<OperandFormat::bf16>(args, stream, overlap);
  }
  bool fits = false;
  const cudaError_t status = fp8_ring_fits(args, fits);
  if (status != cudaSuccess) return status;
  return fits ? fp8_gate_up(args, stream, overlap)
              : launch_gate_up<OperandFormat::fp8_block>(args, stream, overlap);
}

cudaError_t down(const Args& args, cudaStream_t stream, bool overlap) {
  if (refusal(args) != nullptr || args.num_sms < 1) return cudaErrorInvalidValue;
  if (in_panels(args.format)) return panel_down(args, stream, overlap);
  if (args.format == OperandFormat::fp8_block) return fp8_down(args, stream, overlap);
  const LaunchShape shape{dim3(static_cast<unsigned>(args.num_sms)), kThreads, 0, stream, overlap};
  return launch(args.out != nullptr ? down_kernel<true> : down_kernel<false>, shape,
                KernelArgs{args, split_of(args, args.hidden / kRows)});
}

}  // namespace moekit::kernels::smxx_decode
