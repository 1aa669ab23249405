// Steps of fp8 weights in rings, and the codes of tokens that they are multiplied by. A step is 16
// weight rows of one 128-column block: eight of gate and the same of up, or 16 of one matrix.
#pragma once

#include "kernels/smxx_decode/src/operands.cuh"
#include "kernels/smxx_decode/src/ring_units.cuh"

namespace moekit::kernels::smxx_decode {

inline constexpr int kFp8Block = 128;  // columns under one scale

/// What a lane multiplies by a step: bytes 16 t to 16 t + 15 of both halves of token g's block, and
/// the scales of tokens 2 t and 2 t + 1.
struct Fp8Words {
  uint4 codes[2];
  float scales[2];
};

/// Where in a step byte 16 `piece` (0-7) of row `row` lies: copies of whole rows, and loads of four
/// pieces of two rows, touch every bank once.
__device__ __forceinline__ uint32_t fp8_step_place(uint32_t row, uint32_t piece) {
  return row * kFp8Block + ((piece ^ (row & 1) << 2) << 4);
}

/// kPair: rows g of a step are gate's and rows g + 8 up's, of columns 8 strip + g of h. Otherwise
/// all are rows of one matrix, 16 strip + g. In shared memory: the codes, then the scales of rows
/// 0-7 and 8-15.
template <bool kPair>
class Fp8Source {
 public:
  static constexpr int kBytes = kFp8StepBytes;
  static constexpr int kSums = 1;
  static constexpr int kStepBlocks = 1;
  static constexpr int kStripColumns = kPair ? 8 : 16;  // of the output
  static constexpr int kCodeBytes = 16 * kFp8Block;

  __device__ __forceinline__ Fp8Source(const WeightView& view, int32_t depth)
      : view_(view), depth_(depth) {}

  __device__ __forceinline__ void start(int32_t expert, int32_t strip, int32_t block, int32_t) {
    const int lane = threadIdx.x % 32;
    const int32_t n = strip * kStripColumns, column = block * kFp8Block + lane % 8 * 16;
    codes_ = static_cast<const uint8_t*>(view_.base) + expert * view_.expert_bytes +
             (n + lane / 8) * view_.row_bytes + column;
    scale_ = static_cast<int32_t>(expert * view_.scale_expert + n / kFp8Block * view_.scale_row +
                                  (kPair && lane > 0 ? view_.scale_half : 0) + block);
    offset_ = 0;
    inside_ = depth_ - column;
  }

  __device__ __forceinline__ void copy(uint32_t slot, int lane, int32_t) {
    const uint8_t* low = codes_ + offset_;
    const uint8_t* high = low + (kPair ? view_.half_bytes : 8 * view_.row_bytes);
    const bool valid = offset_ < inside_;  // the last block may have 32, 64 or 96 columns
    const uint32_t to = slot + fp8_step_place(lane / 8, lane % 8);
    copy_async_rows_16(to, low, valid);
    copy_async_rows_16(to + 4 * kFp8Block, low + 4 * view_.row_bytes, valid);
    copy_async_rows_16(to + 8 * kFp8Block, high, valid);
    copy_async_rows_16(to + 12 * kFp8Block, high + 4 * view_.row_bytes, valid);
    // Scales are as cold as the weights: they have to be under way with them.
    if (lane < 2) {
      copy_async_4(slot + kCodeBytes + lane * 4, view_.scales + scale_++);
    }
    offset_ += kFp8Block;
  }

  /// The tensor cores sum one block, fp32 arithmetic scales and adds it.
  template <typename Tokens>
  __device__ static __forceinline__ void multiply(const uint8_t* slot, int lane,
                                                  const Fp8Words& words, Tokens&,
                                                  float (&sums)[kSums][4]) {
    float parts[2][4] = {};  // chains of products that do not wait for each other
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint8_t* at = slot + fp8_step_place(lane / 4, half * 4 + lane % 4);
      multiply_step<OperandFormat::fp8_block>(parts[half], *reinterpret_cast<const uint4*>(at),
                                              *reinterpret_cast<const uint4*>(at + 8 * kFp8Block),
                                              words.codes[half]);
    }
    float part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = parts[0][i] + parts[1][i];
    const float2 scale = *reinterpret_cast<const float2*>(slot + kCodeBytes);
    sums[0][0] = fmaf(part[0], words.scales[0] * scale.x, sums[0][0]);
    sums[0][1] = fmaf(part[1], words.scales[1] * scale.x, sums[0][1]);
    sums[0][2] = fmaf(part[2], words.scales[0] * scale.y, sums[0][2]);
    sums[0][3] = fmaf(part[3], words.scales[1] * scale.y, sums[0][3]);
  }

 private:
  const WeightView& view_;
  int32_t depth_;
  int32_t offset_ = 0;              // bytes of depth behind
  int32_t inside_ = 0;              // the lane's bytes are columns as long as offset_ is below
  const uint8_t* codes_ = nullptr;  // what the lane copies of the pass's first block
  int32_t scale_ = 0;               // of the next block and rows 0-7 (lane 0), rows 8-15 (lane 1)
};

/// Codes of x in shared memory, zeros up to a multiple of 128 columns.
struct StagedCodes {
  using Words = Fp8Words;
  const Args& args;
  uint8_t* rows;
  float* scales;      // [T, blocks]
  int32_t row_bytes;  // eight lanes' 16 bytes of two rows lie in different banks
  int32_t blocks;
  const uint8_t* own = nullptr;  // the lane's next codes and scales
  int32_t own_scales[2] = {};

  __device__ __forceinline__ StagedCodes(const Args& call, uint8_t* shared)
      : args(call),
        rows(shared),
        row_bytes(panel_row_elements(call.hidden) + 64),
        blocks((call.hidden + kFp8Block - 1) / kFp8Block) {
    scales = reinterpret_cast<float*>(shared + call.num_tokens * row_bytes);
  }

  __device__ __forceinline__ void ready() {
    stage_codes(args, rows, row_bytes, blocks * kFp8Block, scales, blocks);
    __syncthreads();
  }
  __device__ __forceinline__ void select(int32_t slot, int32_t begin, int32_t) {
    const int lane = threadIdx.x % 32;
    const int32_t token = slot / args.top_k;
    own = rows + token * row_bytes + begin * kFp8Block + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own_scales[i] = __shfl_sync(kAll, token, (lane % 4 * 2 + i) * 4) * blocks + begin;
    }
  }
  __device__ __forceinline__ void load(Words& words) {
    words.codes[0] = *reinterpret_cast<const uint4*>(own);
    words.codes[1] = *reinterpret_cast<const uint4*>(own + 64);
    own += kFp8Block;
#pragma unroll
    for (int i = 0; i < 2; ++i) words.scales[i] = scales[own_scales[i]++];
  }
};

/// Codes of h in memory (L1 keeps them). Each thread block makes those that it needs, of h in f32:
/// many may write the same bytes to the same place. kBatch: see quantize_blocks().
template <int kBatch>
struct IntermediateCodes {
  using Words = Fp8Words;
  const Args& args;
  const Chosen& chosen;
  const Share<false>& share;
  int32_t blocks;
  const uint8_t* own = nullptr;  // the lane's next codes and scales
  int32_t own_scales[2] = {};
  int32_t left = 0;  // columns from `own` to the end of the row

  __device__ __forceinline__ IntermediateCodes(const Args& call, const Chosen& experts,
                                               const Share<false>& of_block)
      : args(call),
        chosen(experts),
        share(of_block),
        blocks((call.inter + kFp8Block - 1) / kFp8Block) {}

  __device__ __forceinline__ void ready() {
    // gate_up has ended. A block without work waits too: the end of this grid has to mean that.
    wait_for_predecessor();
    quantize();
    __syncthreads();
  }

  /// The first lines of the piece are asked for at once; the products would wait for one after the
  /// other.
  __device__ __forceinline__ void select(int32_t slot, int32_t begin, int32_t end) {
    const int lane = threadIdx.x % 32;
    const int32_t column = begin * kFp8Block + lane % 4 * 16;
    const uint8_t* const row = static_cast<const uint8_t*>(args.h) + slot * args.inter;
    own = row + column;
    left = args.inter - column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t block = begin + i * 4 + lane % 4;
      if (block < end) touch(row + block * kFp8Block);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own_scales[i] = __shfl_sync(kAll, slot, (lane % 4 * 2 + i) * 4) * blocks + begin;
    }
  }
  __device__ __forceinline__ void load(Words& words) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words.codes[i] =
          i * 64 < left ? *reinterpret_cast<const uint4*>(own + i * 64) : uint4{0, 0, 0, 0};
      words.scales[i] = args.h_scales[own_scales[i]++];
    }
    own += kFp8Block;
    left -= kFp8Block;
  }

 private:
  /// Codes of the slots whose experts this block has units of.
  __device__ __forceinline__ void quantize() {
    if (share.first >= share.last) return;
    const int lane = threadIdx.x % 32;
    uint64_t slots = 0;
    for (int32_t i = share.expert_idx(share.first); i <= share.expert_idx(share.last - 1); ++i) {
      slots |= slots_of(chosen, chosen.experts[i], lane);
    }
    // Row and block of the i-th block of these slots.
    auto slot_of = [&](int32_t i, int32_t& block) {
      uint64_t mask = slots;
      for (block = i; block >= blocks; block -= blocks) mask &= mask - 1;
      return __ffsll(static_cast<long long>(mask)) - 1;
    };
    auto load = [&](int32_t i, float(&v)[4]) {
      int32_t block;
      const int32_t slot = slot_of(i, block), column = block * kFp8Block + lane * 4;
      float4 four{};
      if (column < args.inter) {
        four = __ldcg(reinterpret_cast<const float4*>(args.h_values + slot * args.inter + column));
      }
      v[0] = four.x;
      v[1] = four.y;
      v[2] = four.z;
      v[3] = four.w;
    };
    quantize_blocks<kBatch>(__popcll(slots) * blocks, load,
                            [&](int32_t i, uint32_t codes, float scale) {
                              int32_t block;
                              const int32_t slot = slot_of(i, block);
                              const int32_t column = block * kFp8Block + lane * 4;
                              if (lane == 0) args.h_scales[slot * blocks + block] = scale;
                              if (column < args.inter) {
                                *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(args.h) +
                                                             slot * args.inter + column) = codes;
                              }
                            });
  }
};

}  // namespace moekit::kernels::smxx_decode
