// What decode kernels share that stream weights through rings: how units of work are dealt, how a
// warp copies the steps of its units through a ring of its own in shared memory, across the borders
// of units so that copies never stop while products run, and how pieces of a unit are added.
//
// A unit is a strip of weight rows of one chosen expert (with a gate: rows of gate and of up, of
// the same columns of h) against up to eight tokens, or a piece of its depth. A Source says what a
// step is:
//   kBytes, kSums, kStepBlocks   in shared memory; accumulators of four; blocks of depth
//   start(expert, strip, block, blocks)   before the copies of a pass from `block` on
//   copy(slot, lane, left)                the next step; `left` blocks of the pass are to come
//   multiply(slot, lane, words, tokens, sums)   sums += products of a step with tokens
#pragma once

#include "kernels/common/copy.cuh"
#include "kernels/smxx_decode/api.h"
#include "kernels/smxx_decode/src/units.cuh"

namespace moekit::kernels::smxx_decode {

/// Thread blocks that an SM is to hold: one of gate_up beside one of down, but a hundred KiB of
/// shared memory holds one, and before sm_90 launches do not overlap.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1200 || __CUDA_ARCH__ < 900)
constexpr int kBlocksOfSm = 1;
#else
constexpr int kBlocksOfSm = 2;
#endif

/// What a thread block does, in shared memory, read at the borders of units so that loops need few
/// registers. A block has a run of units in memory order; 2^log_split neighbouring warps share a
/// unit, each taking a piece of its steps.
template <bool kOwner>
struct Share {
  /// Unit u is strip u % divisor of chosen expert u / divisor; of an owner, strip u / divisor of
  /// chosen expert u % divisor, and its run has whole strips.
  uint32_t divisor;
  int32_t blocks;  ///< of its depth
  int32_t steps;   ///< of a unit
  int32_t first, last;
  int32_t log_split;

  /// One thread; chosen has to be there. A matrix has `matrix_strips` strips of `depth_blocks`
  /// blocks, a step takes `step_blocks` of these.
  __device__ __forceinline__ void fill(const Chosen& chosen, int32_t matrix_strips,
                                       int32_t depth_blocks, int32_t step_blocks) {
    divisor = static_cast<uint32_t>(kOwner ? chosen.count : matrix_strips);
    blocks = depth_blocks;
    steps = (blocks + step_blocks - 1) / step_blocks;
    const BlockRun run(kOwner ? matrix_strips : chosen.count * matrix_strips);
    const int32_t units = kOwner ? chosen.count : 1;  // for one of the run
    first = run.first * units;
    last = run.last * units;
    log_split = choose_split(run.most * units, steps);
  }

  __device__ __forceinline__ int32_t expert_idx(int32_t unit) const {
    const auto u = static_cast<uint32_t>(unit);
    return static_cast<int32_t>(kOwner ? u % divisor : u / divisor);
  }
  __device__ __forceinline__ int32_t strip(int32_t unit) const {
    const auto u = static_cast<uint32_t>(unit);
    return static_cast<int32_t>(kOwner ? u / divisor : u % divisor);
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
__device__ __forceinline__ int32_t num_ring_passes(const Chosen& chosen, int32_t expert) {
  return (__popcll(slots_of(chosen, expert, threadIdx.x % 32)) + kTokens - 1) / kTokens;
}

/// Copies the steps of a warp's share, one by one, ahead of the products.
template <typename Source, typename Dealt>
class Feed {
 public:
  __device__ __forceinline__ Feed(const Source& source, const Chosen& chosen, const Dealt& share)
      : source_(source),
        chosen_(chosen),
        share_(share),
        unit_(share.first_unit() - share.stride()) {}

  /// The next step, if there is one, to shared memory at `slot`.
  __device__ __forceinline__ void next(uint32_t slot, int lane) {
    if (left_ <= 0) start_pass();
    if (left_ <= 0) return;
    source_.copy(slot, lane, left_);
    left_ -= Source::kStepBlocks;
  }

 private:
  /// The next pass over a unit, or the next unit.
  __device__ __forceinline__ void start_pass() {
    if (passes_ == 0) {
      if (unit_ + share_.stride() >= share_.last) return;
      unit_ += share_.stride();
    }
    const int32_t expert = chosen_.experts[share_.expert_idx(unit_)];
    if (passes_ == 0) passes_ = num_ring_passes(chosen_, expert);
    --passes_;
    const int32_t begin = Source::kStepBlocks * share_.begin();
    const int32_t end = Source::kStepBlocks * share_.end();
    left_ = (end < share_.blocks ? end : share_.blocks) - begin;
    source_.start(expert, share_.strip(unit_), begin, share_.blocks);
  }

  Source source_;
  const Chosen& chosen_;
  const Dealt& share_;
  int32_t unit_;
  int32_t passes_ = 0;  // of this unit to come
  int32_t left_ = 0;    // blocks of this pass to come
};

/// The sums of a unit's pieces added in order, by the warp of the first piece: true there. All
/// warps of the unit call it. `pieces`: 128 bytes a sum for each warp but the first.
template <int kSums, typename Dealt>
__device__ __forceinline__ bool join_ring_pieces(const Dealt& share, float* pieces, int lane,
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
struct RingPass {
  int32_t first, own = -1;

  __device__ __forceinline__ RingPass(uint64_t mask, int32_t pass, int token) {
    for (int32_t i = 0; i < pass * kTokens; ++i) mask &= mask - 1;
    first = __ffsll(static_cast<long long>(mask)) - 1;
    for (int m = 0; m < kTokens && mask != 0; ++m) {
      if (m == token) own = __ffsll(static_cast<long long>(mask)) - 1;
      mask &= mask - 1;
    }
  }
};

/// All units of this warp. tokens.ready() is called by all threads once the first weights are under
/// way, tokens.select(slot, begin, end) by whole warps before a pass through these steps,
/// tokens.load(words) for what one multiplication asks for; store(expert, strip, slot, sums) at the
/// end of a pass by whole warps, where slot is that of token lane / 4 or -1.
template <int kStages, typename Source, typename Dealt, typename Tokens, typename Store>
__device__ __forceinline__ void run_units(const Source& source, const Chosen& chosen,
                                          const Dealt& share, uint8_t* rings, float* pieces,
                                          Tokens& tokens, const Store& store) {
  constexpr int kBytes = Source::kBytes;
  const int lane = threadIdx.x % 32;
  uint8_t* const ring = rings + threadIdx.x / 32 * (kStages * kBytes);
  Feed<Source, Dealt> feed(source, chosen, share);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    feed.next(shared_address(ring) + i * kBytes, lane);
    copy_async_commit();
  }
  tokens.ready();
  int32_t read = 0, write = (kStages - 1) * kBytes;  // offsets in the ring
  for (int32_t unit = share.first_unit(); unit < share.last; unit += share.stride()) {
    for (int32_t pass = 0;; ++pass) {
      const int32_t expert = chosen.experts[share.expert_idx(unit)];
      if (pass == num_ring_passes(chosen, expert)) break;
      const RingPass slots(slots_of(chosen, expert, lane), pass, lane / 4);
      // An absent token reads another's row: its column of the sums is not stored.
      tokens.select(slots.own >= 0 ? slots.own : slots.first, share.begin(), share.end());
      float sums[Source::kSums][4] = {};
      for (int32_t left = share.end() - share.begin(); left > 0; --left) {
        typename Tokens::Words words;
        tokens.load(words);
        copy_async_wait<kStages - 2>();
        // All lanes' copies of this step are there, and all lanes have read the step before.
        __syncwarp();
        feed.next(shared_address(ring) + write, lane);
        copy_async_commit();
        Source::multiply(ring + read, lane, words, tokens, sums);
        write = read;
        read = read + kBytes == kStages * kBytes ? 0 : read + kBytes;
      }
      if (join_ring_pieces(share, pieces, lane, sums)) {
        store(expert, share.strip(unit), slots.own, sums);
      }
    }
  }
}

/// Dynamic shared memory: rings, pieces of sums, the rows of gate_up.
template <typename Source, int kStages>
struct SharedParts {
  uint8_t* rings;
  float* pieces;
  uint8_t* rows;

  __device__ __forceinline__ explicit SharedParts(uint8_t* shared)
      : rings(shared),
        pieces(reinterpret_cast<float*>(shared + kWarps * kStages * Source::kBytes)),
        rows(reinterpret_cast<uint8_t*>(pieces) + (kWarps - 1) * Source::kSums * 512) {}
};

__device__ __forceinline__ float value_or(const float* values, int64_t at, float otherwise) {
  return values != nullptr ? values[at] : otherwise;
}

/// down's end of a pass: value(i) of register i and its bias, columns `first` to first + 15 of the
/// slots of a pass, to `y`, which has rows of `stride` from column `first` on. Whole warps.
template <typename Value>
__device__ __forceinline__ void store_output(const Args& args, int32_t expert, int32_t first,
                                             int32_t slot, float* y, int32_t stride,
                                             const Value& value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t to = __shfl_sync(kAll, slot, (lane % 4 * 2 + i % 2) * 4);
    const int32_t column = lane / 4 + i / 2 * 8;
    if (to < 0) continue;
    const int64_t bias = static_cast<int64_t>(expert) * args.hidden + first + column;
    y[static_cast<int64_t>(to) * stride + column] = value(i) + value_or(args.down_bias, bias, 0.0f);
  }
}

}  // namespace moekit::kernels::smxx_decode
