// Units of work of the decode kernels: which experts a call needs, 16 weight rows against up to
// eight tokens, and where the tokens' operands come from.
#pragma once

#include <type_traits>

#include "kernels/common/copy.cuh"
#include "kernels/common/live_count.cuh"
#include "kernels/smxx_decode/api.h"
#include "kernels/smxx_decode/src/operands.cuh"

namespace moekit::kernels::smxx_decode {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kRows = 16;   // weight rows of a unit
inline constexpr int kSteps = 8;   // steps of 64 bytes a row in flight
inline constexpr int kTokens = 8;  // tokens of an expert that share one pass over its weights
inline constexpr uint32_t kAll = 0xffffffffu;

/// Which experts the call needs, in shared memory.
struct Chosen {
  int32_t ids[kMaxSlots];
  int32_t experts[kMaxSlots];
  int32_t count;
};

/// The expert of slot threadIdx.x, -1 where there is none.
__device__ __forceinline__ int32_t routed_expert(const Args& args) {
  const int32_t tokens = live_count(args.num_tokens, args.live_tokens);
  const auto s = static_cast<int32_t>(threadIdx.x);
  const int32_t id = s < tokens * args.top_k && s < kMaxSlots ? args.ids[s] : -1;
  return static_cast<uint32_t>(id) < static_cast<uint32_t>(args.num_experts) ? id : -1;
}

/// All threads, with their routed_expert(); ends with a barrier.
__device__ inline void find_chosen(const Args& args, int32_t routed, Chosen& chosen) {
  if (threadIdx.x < kMaxSlots) chosen.ids[threadIdx.x] = routed;
  __syncthreads();
  if (threadIdx.x < 32) {
    int32_t count = 0;
    for (int half = 0; half < kMaxSlots / 32; ++half) {
      const int32_t s = half * 32 + static_cast<int32_t>(threadIdx.x);
      const int32_t id = chosen.ids[s];
      // The first slot of an expert: no lower lane has it, nor (for the second half) any of the
      // first half.
      const uint32_t same = __match_any_sync(kAll, id);  // all lanes, those without an expert too
      bool first = id >= 0 && (same & ((1u << threadIdx.x) - 1)) == 0;
      const bool full = args.num_tokens * args.top_k > 32;
      for (int32_t earlier = 0; earlier < half * 32 && full; ++earlier) {
        if (chosen.ids[earlier] == id) first = false;
      }
      const uint32_t firsts = __ballot_sync(kAll, first);
      if (first) chosen.experts[count + __popc(firsts & ((1u << threadIdx.x) - 1))] = id;
      count += __popc(firsts);
    }
    if (threadIdx.x == 0) chosen.count = count;
  }
  __syncthreads();
}

/// Slots of one expert as a bit mask.
__device__ __forceinline__ uint64_t slots_of(const Chosen& chosen, int32_t expert, int lane) {
  const uint32_t low = __ballot_sync(kAll, chosen.ids[lane] == expert);
  const uint32_t high = __ballot_sync(kAll, chosen.ids[lane + 32] == expert);
  return static_cast<uint64_t>(high) << 32 | low;
}

/// A block's run of `all` things that are dealt to the grid in order, the first blocks one more.
struct BlockRun {
  int32_t first, last, most;  ///< most: of any block

  BlockRun() = default;
  __device__ __forceinline__ explicit BlockRun(int32_t all) {
    const auto grid = static_cast<int32_t>(gridDim.x), block = static_cast<int32_t>(blockIdx.x);
    const int32_t each = all / grid, more = all % grid;
    first = each * block + (block < more ? block : more);
    last = first + each + (block < more ? 1 : 0);
    most = each + (more > 0 ? 1 : 0);
  }
};

/// What a block of down that owns columns adds up, in shared memory.
struct OwnedRows {
  float values[kDecodeOwnedRows][kRows];  // [strip of the run][slot][column of the strip]
  float weights[kDecodeOwnedRows];        // of the slots
  BlockRun strips;

  /// All threads, before the barriers of find_chosen(). Weights are older than gate_up.
  __device__ __forceinline__ void start(const Args& args) {
    const auto slot = static_cast<int32_t>(threadIdx.x);
    const int32_t tokens = live_count(args.num_tokens, args.live_tokens);
    if (slot < tokens * args.top_k) weights[slot] = args.weights[slot];
    if (threadIdx.x == kThreads - 1) strips = BlockRun(args.hidden / kRows);
  }

  /// The values of `strip` for slot 0.
  __device__ __forceinline__ float* strip_values(const Args& args, int32_t strip) {
    return values[(strip - strips.first) * args.num_tokens * args.top_k];
  }

  /// out = the slots' values times their weights, each product rounded, added in slot order, as
  /// combine_rows() has it. All threads.
  __device__ inline void sum(const Args& args, const Chosen& chosen) {
    __syncthreads();
    const int32_t tokens = live_count(args.num_tokens, args.live_tokens);
    const int32_t all = (strips.last - strips.first) * tokens * kRows;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < all; i += kThreads) {
      const int32_t column = i % kRows, token = i / kRows % tokens, own = i / kRows / tokens;
      const float* const rows = strip_values(args, strips.first + own) + column;
      float total = 0.0f;
      bool any = false;
      for (int32_t slot = token * args.top_k; slot < (token + 1) * args.top_k; ++slot) {
        if (chosen.ids[slot] < 0) continue;
        const float product = __fmul_rn(weights[slot], rows[slot * kRows]);
        total = any ? __fadd_rn(total, product) : product;
        any = true;
      }
      const int64_t at =
          static_cast<int64_t>(token) * args.hidden + (strips.first + own) * kRows + column;
      if (args.out_f32) {
        static_cast<float*>(args.out)[at] = total;
      } else {
        static_cast<__nv_bfloat16*>(args.out)[at] = __float2bfloat16_rn(total);
      }
    }
  }
};

/// Weight rows g and g + 8 of a unit for this lane, and the scales of their 128-row blocks (fp8).
struct UnitRows {
  const uint8_t* low;
  const uint8_t* high;
  const float* low_scale;
  const float* high_scale;
};

/// sums += products of the unit's rows with the tokens of `input`, over bytes [begin, end) of the
/// depth (multiples of 128): sums[0], [1] of row g with tokens 2 t and 2 t + 1, [2], [3] of row g
/// + 8. Input::block gives two steps of the lane's token; Input::ready runs once the first weights
/// are under way.
template <OperandFormat kFormat, typename Input>
__device__ __forceinline__ void multiply(const UnitRows& unit, int32_t begin, int32_t end,
                                         int32_t depth, Input& input, int lane, float (&sums)[4]) {
  constexpr int kBlocks = kSteps / 2;
  for (int32_t base = begin; base < end; base += kSteps * kStepBytes) {
    uint4 low[kSteps], high[kSteps];
    // Scales are as cold as the weights: they have to be under way with them.
    float low_scale[kBlocks], high_scale[kBlocks];
    if constexpr (kFormat == OperandFormat::fp8_block) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const bool inside = base + b * 128 < end;
        low_scale[b] = inside ? load_scale(unit.low_scale + base / 128 + b) : 0.0f;
        high_scale[b] = inside ? load_scale(unit.high_scale + base / 128 + b) : 0.0f;
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int32_t byte = base + s * kStepBytes + lane % 4 * 16;
      const bool inside = byte < end && byte < depth;
      low[s] = inside ? load_weights(unit.low + byte) : uint4{0, 0, 0, 0};
      high[s] = inside ? load_weights(unit.high + byte) : uint4{0, 0, 0, 0};
    }
    input.ready();
#pragma unroll
    for (int s = 0; s < kSteps; s += 2) {
      const int32_t byte = base + s * kStepBytes;
      if (byte >= end) break;
      uint4 token[2];
      float scale[2];  // of tokens 2 t and 2 t + 1
      input.block(byte, lane, token, scale);
      if constexpr (kFormat == OperandFormat::bf16) {
        multiply_step<kFormat>(sums, low[s], high[s], token[0]);
        multiply_step<kFormat>(sums, low[s + 1], high[s + 1], token[1]);
      } else {
        // The tensor cores sum one 128-column block, fp32 arithmetic scales and adds it.
        float part[4] = {};
        multiply_step<kFormat>(part, low[s], high[s], token[0]);
        multiply_step<kFormat>(part, low[s + 1], high[s + 1], token[1]);
        sums[0] = fmaf(part[0], scale[0] * low_scale[s / 2], sums[0]);
        sums[1] = fmaf(part[1], scale[1] * low_scale[s / 2], sums[1]);
        sums[2] = fmaf(part[2], scale[0] * high_scale[s / 2], sums[2]);
        sums[3] = fmaf(part[3], scale[1] * high_scale[s / 2], sums[3]);
      }
    }
  }
}

/// Slots of a pass: the first kTokens of a mask, taken out of it.
struct Pass {
  int32_t slot[kTokens];
  int count = 0;

  __device__ __forceinline__ explicit Pass(uint64_t& mask) {
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
      slot[m] = -1;
      if (mask == 0) continue;
      slot[m] = __ffsll(static_cast<long long>(mask)) - 1;
      mask &= mask - 1;
      count = m + 1;
    }
  }
  /// The slot of token m, -1 if there is none; m need not be known at compile time.
  __device__ __forceinline__ int32_t at(int m) const {
    int32_t s = -1;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) s = i == m ? slot[i] : s;
    return s;
  }
};

/// x of the call in shared memory, bf16 values or codes, rows padded by 16 bytes so that eight
/// tokens at one column lie in different banks.
struct StagedTokens {
  const uint8_t* rows;
  const float* scales;  // [T, blocks], fp8
  int32_t row_bytes;    // with padding
  int32_t depth;        // bytes that hold columns
  int32_t blocks;
  int32_t own;      // the lane's token, -1: none
  int32_t pair[2];  // tokens of the lane's sums

  __device__ __forceinline__ void ready() {}
  __device__ __forceinline__ void block(int32_t byte, int lane, uint4 (&token)[2],
                                        float (&scale)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t at = byte + i * kStepBytes + lane % 4 * 16;
      token[i] = own >= 0 && at < depth
                     ? *reinterpret_cast<const uint4*>(rows + own * row_bytes + at)
                     : uint4{0, 0, 0, 0};
      scale[i] = scales != nullptr && pair[i] >= 0 ? scales[pair[i] * blocks + byte / 128] : 0.0f;
    }
  }
};

/// Blocks of 128 columns to codes and scales, a warp each, kBatch under way: load(block, v) for the
/// lane's four columns, store(block, codes, scale) of them. Whole thread blocks.
template <int kBatch, typename Load, typename Store>
__device__ __forceinline__ void quantize_blocks(int32_t count, const Load& load,
                                                const Store& store) {
  for (int32_t first = threadIdx.x / 32; first < count; first += kBatch * kWarps) {
    float v[kBatch][4];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * kWarps < count) load(first + j * kWarps, v[j]);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * kWarps >= count) break;
      float amax = max_or_nan(max_or_nan(fabsf(v[j][0]), fabsf(v[j][1])),
                              max_or_nan(fabsf(v[j][2]), fabsf(v[j][3])));
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        amax = max_or_nan(amax, __shfl_xor_sync(kAll, amax, step));
      const float scale = block_scale(amax);
      store(first + j * kWarps, encode4(v[j], scale), scale);
    }
  }
}

/// Row and block of block i of rows of `blocks` blocks, few rows: without a division.
struct RowBlock {
  int32_t row = 0, block;

  __device__ __forceinline__ RowBlock(int32_t i, int32_t blocks) : block(i) {
    for (; block >= blocks; block -= blocks) ++row;
  }
};

/// Codes of x, `width` columns a row (those past hidden are zero), and a scale for each of `blocks`
/// blocks of a row.
__device__ __forceinline__ void stage_codes(const Args& args, uint8_t* rows, int32_t row_bytes,
                                            int32_t width, float* scales, int32_t blocks) {
  const auto* x = static_cast<const __nv_bfloat16*>(args.x);
  const int lane = threadIdx.x % 32;
  auto load = [&](int32_t i, float(&v)[4]) {
    const RowBlock at(i, blocks);
    const int32_t column = at.block * 128 + lane * 4;
    uint2 raw{0, 0};
    if (column < args.hidden) {
      raw = __ldg(
          reinterpret_cast<const uint2*>(x + static_cast<int64_t>(at.row) * args.hidden + column));
    }
    v[0] = __uint_as_float(raw.x << 16);
    v[1] = __uint_as_float(raw.x & 0xffff0000u);
    v[2] = __uint_as_float(raw.y << 16);
    v[3] = __uint_as_float(raw.y & 0xffff0000u);
  };
  quantize_blocks<4>(args.num_tokens * blocks, load, [&](int32_t i, uint32_t codes, float scale) {
    const RowBlock at(i, blocks);
    const int32_t column = at.block * 128 + lane * 4;
    if (lane == 0) scales[i] = scale;
    if (column < width) *reinterpret_cast<uint32_t*>(rows + at.row * row_bytes + column) = codes;
  });
}

template <OperandFormat kFormat>
__device__ inline void stage_tokens(const Args& args, uint8_t* rows, int32_t row_bytes,
                                    float* scales, int32_t blocks) {
  if constexpr (kFormat == OperandFormat::bf16) {
    const auto* x = static_cast<const __nv_bfloat16*>(args.x);
    const int32_t pieces = args.hidden / 8;
    for (int32_t i = threadIdx.x; i < args.num_tokens * pieces; i += kThreads) {
      const int32_t token = i / pieces, piece = i % pieces;
      *reinterpret_cast<uint4*>(rows + token * row_bytes + piece * 16) =
          __ldg(reinterpret_cast<const uint4*>(x) + i);
    }
  } else {
    stage_codes(args, rows, row_bytes, args.hidden, scales, blocks);
  }
  __syncthreads();
}

/// Rows of h in bf16 from memory (L1 keeps them).
struct IntermediateRows {
  const uint8_t* rows;
  int32_t depth;  // bytes of a row
  bool waiting;   // a predecessor may still be writing
  int32_t own;    // the lane's slot, -1: none

  __device__ __forceinline__ void ready() {
    if (waiting) wait_for_predecessor();
    waiting = false;
  }
  __device__ __forceinline__ void block(int32_t byte, int lane, uint4 (&token)[2],
                                        float (&)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t at = byte + i * kStepBytes + lane % 4 * 16;
      token[i] =
          own >= 0 && at < depth
              ? *reinterpret_cast<const uint4*>(rows + static_cast<int64_t>(own) * depth + at)
              : uint4{0, 0, 0, 0};
    }
  }
};

}  // namespace moekit::kernels::smxx_decode
