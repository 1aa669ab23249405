// Units of work over weight panels: a strip of 16 weight rows (with a gate: one of gate and one of
// up, of the same columns of h) against up to eight tokens, or a piece of its depth. Every warp
// streams the strips of its units through a ring of its own in shared memory, across the borders of
// units, so that copies never stop while products run.
#pragma once

#include "kernels/common/copy.cuh"
#include "kernels/common/expand.cuh"
#include "kernels/smxx_decode/api.h"
#include "kernels/smxx_decode/src/operands.cuh"
#include "kernels/smxx_decode/src/units.cuh"

namespace moekit::kernels::smxx_decode {

/// A step of a warp takes two strips of 16 rows and 64 columns: those of gate and up in one block
/// (kPair), or one matrix's in two blocks that follow each other. In shared memory: the codes of
/// both, then the scales of both.
template <OperandFormat kFormat>
struct StepLayout {
  static constexpr PanelFormat kPanel = PanelFormat::of(kFormat);
  static constexpr int kCodeBytes = kPanel.strip_bytes();
  static constexpr int kScaleBytes = kStripRows * kPanel.row_scales();
  static constexpr int kBytes = 2 * (kCodeBytes + kScaleBytes);
};

/// What a thread block does, in shared memory, read at the borders of units so that loops need few
/// registers. A block has a run of units in memory order; 2^log_split neighbouring warps share a
/// unit, each taking a piece of its steps.
struct Share {
  uint32_t strips;  ///< of a matrix: unit u is strip u % strips of chosen expert u / strips
  int32_t blocks;   ///< of its depth
  int32_t steps;    ///< of a unit
  int32_t first, last;
  int32_t log_split;

  /// One thread; chosen has to be there.
  __device__ __forceinline__ void fill(const Chosen& chosen, int32_t rows, int32_t depth,
                                       bool pair) {
    strips = static_cast<uint32_t>(rows / kStripRows);
    blocks = panel_steps(depth);
    steps = pair ? blocks : (blocks + 1) / 2;
    const int32_t units = chosen.count * rows / kStripRows;
    const auto grid = static_cast<int32_t>(gridDim.x), block = static_cast<int32_t>(blockIdx.x);
    const int32_t each = units / grid, more = units % grid;  // the first blocks have one more
    first = each * block + (block < more ? block : more);
    last = first + each + (block < more ? 1 : 0);
    log_split = choose_split(each + (more > 0 ? 1 : 0), steps);
  }

  __device__ __forceinline__ int32_t expert_idx(int32_t unit) const {
    return static_cast<int32_t>(static_cast<uint32_t>(unit) / strips);
  }
  __device__ __forceinline__ int32_t strip(int32_t unit) const {
    return static_cast<int32_t>(static_cast<uint32_t>(unit) % strips);
  }
  __device__ __forceinline__ int32_t warp() const { return static_cast<int32_t>(threadIdx.x) / 32; }
  __device__ __forceinline__ int32_t piece() const { return warp() & ((1 << log_split) - 1); }
  /// The warp's units: first_unit(), this and so many more, ... below `last`.
  __device__ __forceinline__ int32_t first_unit() const { return first + (warp() >> log_split); }
  __device__ __forceinline__ int32_t stride() const { return kWarps >> log_split; }
  /// Its steps of each: at least one.
  __device__ __forceinline__ int32_t begin() const { return steps * piece() >> log_split; }
  __device__ __forceinline__ int32_t end() const { return steps * (piece() + 1) >> log_split; }

 private:
  /// The split with which the busiest warp has the least to do: its units one after the other, each
  /// its steps and about two steps' time for start, joining and storing.
  __device__ static __forceinline__ int32_t choose_split(int32_t units, int32_t steps) {
    int32_t best = 0, least = 0x7fffffff;
#pragma unroll
    for (int log = 0; 1 << log <= kWarps; ++log) {
      const int32_t rounds = (units + (kWarps >> log) - 1) / (kWarps >> log);
      const int32_t cost = rounds * ((steps + (1 << log) - 1) / (1 << log) + 2);
      if (1 << log > steps || cost >= least) continue;
      best = log;
      least = cost;
    }
    return best;
  }
};

/// Passes over an expert's weights: one for every kTokens slots. Whole warps.
__device__ __forceinline__ int32_t num_panel_passes(const Chosen& chosen, int32_t expert) {
  return (__popcll(slots_of(chosen, expert, threadIdx.x % 32)) + kTokens - 1) / kTokens;
}

/// Copies the strips of a warp's share, step by step, ahead of the products.
template <OperandFormat kFormat, bool kPair>
class Feed {
  using Layout = StepLayout<kFormat>;
  static constexpr int kBlockBytes = Layout::kPanel.block_bytes();
  static constexpr int kScaleLanes = Layout::kScaleBytes / 16;  // lanes that copy a strip's scales
  static constexpr int kStepBlocks = kPair ? 1 : 2;

 public:
  __device__ __forceinline__ Feed(const WeightView& view, const Chosen& chosen, const Share& share)
      : view_(view), chosen_(chosen), share_(share), unit_(share.first_unit() - share.stride()) {}

  /// The next step, if there is one, to shared memory at `slot`.
  __device__ __forceinline__ void next(uint32_t slot, int lane) {
    if (left_ <= 0) start_pass();
    if (left_ <= 0) return;
    const uint8_t* codes = codes_ + offset_;
    const uint8_t* second = codes + (kPair ? view_.half_bytes : int64_t{kBlockBytes});
    const bool both = kPair || left_ > 1;
#pragma unroll
    for (int i = 0; i < Layout::kCodeBytes; i += 512) {
      const uint32_t to = slot + i + lane * 16;
      copy_async_stream_16(to, codes + i, true);
      copy_async_stream_16(to + Layout::kCodeBytes, second + i, both);
    }
    if (lane < 2 * kScaleLanes) {
      copy_async_stream_16(slot + 2 * Layout::kCodeBytes + lane * 16, scales_ + offset_,
                           both || lane < kScaleLanes);
    }
    offset_ += kStepBlocks * kBlockBytes;
    left_ -= kStepBlocks;
  }

 private:
  /// The next pass over a unit, or the next unit.
  __device__ __forceinline__ void start_pass() {
    constexpr int kPerTile = kPanelRows / kStripRows;
    if (passes_ == 0) {
      if (unit_ + share_.stride() >= share_.last) return;
      unit_ += share_.stride();
    }
    const int32_t expert = chosen_.experts[share_.expert_idx(unit_)];
    if (passes_ == 0) passes_ = num_panel_passes(chosen_, expert);
    --passes_;
    const int lane = threadIdx.x % 32;
    const int32_t begin = kStepBlocks * share_.begin(), end = kStepBlocks * share_.end();
    left_ = (end < share_.blocks ? end : share_.blocks) - begin;
    const int32_t strip = share_.strip(unit_);
    const uint8_t* base = static_cast<const uint8_t*>(view_.base) + expert * view_.expert_bytes +
                          int64_t{strip / kPerTile * share_.blocks + begin} * kBlockBytes;
    codes_ = base + strip % kPerTile * Layout::kCodeBytes + lane * 16;
    scales_ = base + Layout::kPanel.code_bytes() + strip % kPerTile * Layout::kScaleBytes +
              lane % kScaleLanes * 16;
    if (lane >= kScaleLanes) scales_ += kPair ? view_.half_bytes : int64_t{kBlockBytes};
    offset_ = 0;
  }

  const WeightView& view_;
  const Chosen& chosen_;
  const Share& share_;
  int32_t unit_;
  int32_t passes_ = 0;               // of this unit to come
  int32_t left_ = 0;                 // blocks of this pass to come
  int32_t offset_ = 0;               // bytes of depth behind
  const uint8_t* codes_ = nullptr;   // what the lane copies of the pass's first block, first strip
  const uint8_t* scales_ = nullptr;  // the same of scales, either strip
};

/// sums += the products of strip `j` (0, 1) of a step that lies at `slot` in shared memory, with
/// the lane's B operands of its 64 columns.
template <OperandFormat kFormat>
__device__ __forceinline__ void multiply_strip(const uint8_t* slot, int j, int lane,
                                               const uint4 (&tokens)[2], float (&sums)[4]) {
  using Layout = StepLayout<kFormat>;
  StripWords<kFormat> words;
#pragma unroll
  for (int i = 0; i < StripWords<kFormat>::kPieces; ++i) {
    words.codes[i] =
        *reinterpret_cast<const uint4*>(slot + j * Layout::kCodeBytes + i * 512 + lane * 16);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint8_t* at = slot + 2 * Layout::kCodeBytes + j * Layout::kScaleBytes +
                        (h * 8 + lane / 4) * Layout::kPanel.row_scales();
    if constexpr (Layout::kPanel.row_scales() == 4) {
      words.scales[h] = *reinterpret_cast<const uint32_t*>(at);
    } else {
      words.scales[h] = *reinterpret_cast<const uint16_t*>(at);
    }
  }
#pragma unroll
  for (int step = 0; step < kPanelDepth / 16; ++step) {
    uint32_t a[4];
    words.expand(step, a);
    const uint4& token = tokens[step / 2];
    mma_bf16(sums, a[0], a[1], a[2], a[3], step % 2 == 0 ? token.x : token.z,
             step % 2 == 0 ? token.y : token.w);
  }
}

/// The sums of a unit's pieces added in order, by the warp of the first piece: true there. All
/// warps of the unit call it. `pieces`: 128 bytes a sum for each warp but the first.
template <int kSums>
__device__ __forceinline__ bool join_panel_pieces(const Share& share, float* pieces, int lane,
                                                  float (&sums)[kSums][4]) {
  const int32_t split = 1 << share.log_split;
  if (split == 1) return true;
  const int32_t warp = share.warp(), piece = share.piece();
  const uint32_t barrier = 1 + (warp >> share.log_split), threads = split * 32;
  auto part = [&](int32_t of_warp, int j) -> float4& {
    return reinterpret_cast<float4*>(pieces)[((of_warp - 1) * kSums + j) * 32 + lane];
  };
  if (piece > 0) {
#pragma unroll
    for (int j = 0; j < kSums; ++j)
      part(warp, j) = {sums[j][0], sums[j][1], sums[j][2], sums[j][3]};
  }
  named_barrier(barrier, threads);  // the pieces are there
  if (piece == 0) {
    for (int p = 1; p < split; ++p) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        const float4 more = part(warp + p, j);
        sums[j][0] += more.x;
        sums[j][1] += more.y;
        sums[j][2] += more.z;
        sums[j][3] += more.w;
      }
    }
  }
  named_barrier(barrier, threads);  // and have been read
  return piece == 0;
}

/// The slots of a pass, by token of the pass: own of token lane / 4, -1 if there is none.
struct PanelPass {
  int32_t first, own = -1;

  __device__ __forceinline__ PanelPass(uint64_t mask, int32_t pass, int token) {
    for (int32_t i = 0; i < pass * kTokens; ++i) mask &= mask - 1;
    first = __ffsll(static_cast<long long>(mask)) - 1;
    for (int m = 0; m < kTokens && mask != 0; ++m) {
      if (m == token) own = __ffsll(static_cast<long long>(mask)) - 1;
      mask &= mask - 1;
    }
  }
};

/// All units of this warp. tokens.ready() is called once the first weights are under way,
/// tokens.select(slot, begin, end) before a pass through these steps, tokens.load(words)
/// gives the next 64 columns in it; store(expert, strip, slot, sums) at the end of a pass by whole
/// warps, where slot is that of token lane / 4 or -1.
template <OperandFormat kFormat, bool kPair, int kStages, typename Tokens, typename Store>
__device__ __forceinline__ void run_units(const WeightView& view, const Chosen& chosen,
                                          const Share& share, uint8_t* rings, float* pieces,
                                          Tokens& tokens, const Store& store) {
  constexpr int kStepBytes = StepLayout<kFormat>::kBytes;
  const int lane = threadIdx.x % 32;
  uint8_t* const ring = rings + threadIdx.x / 32 * (kStages * kStepBytes);
  Feed<kFormat, kPair> feed(view, chosen, share);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    feed.next(shared_address(ring) + i * kStepBytes, lane);
    copy_async_commit();
  }
  tokens.ready();
  int32_t read = 0, write = (kStages - 1) * kStepBytes;  // offsets in the ring
  for (int32_t unit = share.first_unit(); unit < share.last; unit += share.stride()) {
    for (int32_t pass = 0;; ++pass) {
      const int32_t expert = chosen.experts[share.expert_idx(unit)];
      if (pass == num_panel_passes(chosen, expert)) break;
      const PanelPass slots(slots_of(chosen, expert, lane), pass, lane / 4);
      // An absent token reads another's row: its column of the sums is not stored.
      tokens.select(slots.own >= 0 ? slots.own : slots.first, share.begin(), share.end());
      float sums[kPair ? 2 : 1][4] = {};
      for (int32_t left = share.end() - share.begin(); left > 0; --left) {
        uint4 words[2];
        tokens.load(words);
        copy_async_wait<kStages - 2>();
        // All lanes' copies of this step are there, and all lanes have read the step before.
        __syncwarp();
        feed.next(shared_address(ring) + write, lane);
        copy_async_commit();
        multiply_strip<kFormat>(ring + read, 0, lane, words, sums[0]);
        if constexpr (!kPair) tokens.load(words);
        multiply_strip<kFormat>(ring + read, 1, lane, words, sums[kPair ? 1 : 0]);
        write = read;
        read = read + kStepBytes == kStages * kStepBytes ? 0 : read + kStepBytes;
      }
      if (join_panel_pieces(share, pieces, lane, sums)) {
        store(expert, share.strip(unit), slots.own, sums);
      }
    }
  }
}

}  // namespace moekit::kernels::smxx_decode
