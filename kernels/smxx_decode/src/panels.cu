// Decode kernels over weight panels. Rings of 16 warps keep 64 to 92 KiB under way on an SM. An SM
// holds a block of gate_up and one of down, as far as registers and (for few tokens) shared memory
// allow, so that down fills its rings while gate_up still runs; never two of a kind, which would
// leave other SMs idle.
#include "kernels/smxx_decode/src/panel_units.cuh"
#include "kernels/smxx_decode/src/panels.h"
#include "kernels/smxx_decode/src/ring_launch.cuh"

namespace moekit::kernels::smxx_decode {
namespace {

/// Where column `column` of a row of bf16 lies in x as staged and in h: of every 32 columns, lane t
/// of a fragment's four finds its B operands of two products in 16 bytes.
__device__ __forceinline__ int32_t fragment_place(int32_t column) {
  return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2;
}

/// Bytes between staged rows: eight lanes' 16 bytes of two rows lie in different banks.
__device__ __forceinline__ int32_t staged_row_bytes(int32_t hidden) {
  return panel_row_elements(hidden) * 2 + 64;
}

/// x to shared memory in fragment order, zeros up to a multiple of 128 columns. No barrier.
__device__ inline void stage_panel_tokens(const Args& args, uint8_t* rows) {
  const auto* x = static_cast<const uint4*>(args.x);
  const int32_t row_bytes = staged_row_bytes(args.hidden);
  const int32_t pieces = args.hidden / 8, padded = panel_row_elements(args.hidden) / 8;
  for (int32_t i = threadIdx.x; i < args.num_tokens * padded; i += kThreads) {
    const int32_t token = i / padded, piece = i % padded;
    const uint4 v = piece < pieces ? __ldg(x + token * pieces + piece) : uint4{0, 0, 0, 0};
    uint8_t* to = rows + token * row_bytes + fragment_place(piece * 8) * 2;
    *reinterpret_cast<uint32_t*>(to) = v.x;
    *reinterpret_cast<uint32_t*>(to + 16) = v.y;
    *reinterpret_cast<uint32_t*>(to + 32) = v.z;
    *reinterpret_cast<uint32_t*>(to + 48) = v.w;
  }
}

/// The columns of h past inter, which down's steps of 128 columns read.
__device__ inline void clear_tails(const Args& args) {
  const int32_t stride = panel_row_elements(args.inter), tail = stride - args.inter;
  auto* const h = static_cast<__nv_bfloat16*>(args.h) + args.inter;
  const int32_t all = args.num_tokens * args.top_k * tail;
  for (int32_t i = static_cast<int32_t>(blockIdx.x) * kThreads + threadIdx.x; i < all;
       i += static_cast<int32_t>(gridDim.x) * kThreads) {
    h[static_cast<int64_t>(i / tail) * stride + i % tail] = __nv_bfloat16();
  }
}

/// A lane's B operands of 64 columns, as both kinds of rows give them.
using PanelWords = uint4[2];

/// Those at `own`, which moves on to the next 64 columns.
__device__ __forceinline__ void load_words(const uint8_t*& own, PanelWords& words) {
  words[0] = *reinterpret_cast<const uint4*>(own);
  words[1] = *reinterpret_cast<const uint4*>(own + 64);
  own += 128;
}

/// Rows of x as staged, read in steps of kStepBytes.
template <int kStepBytes>
struct StagedPanelTokens {
  using Words = PanelWords;
  const uint8_t* rows;
  int32_t row_bytes;
  int32_t top_k;
  const uint8_t* own = nullptr;  // the lane's next words

  __device__ __forceinline__ void ready() {}
  __device__ __forceinline__ void select(int32_t slot, int32_t begin, int32_t) {
    own = rows + slot / top_k * row_bytes + begin * kStepBytes + threadIdx.x % 4 * 16;
  }
  __device__ __forceinline__ void load(Words& words) { load_words(own, words); }
};

/// Rows of h from memory (L1 keeps them).
struct IntermediatePanelRows {
  using Words = PanelWords;
  const uint8_t* rows;
  int32_t row_bytes;
  const uint8_t* own = nullptr;  // the lane's next words

  /// gate_up, or whatever ran in between, has ended.
  __device__ __forceinline__ void ready() { wait_for_predecessor(); }

  /// The first lines of the piece are asked for at once; the products would wait for one after the
  /// other.
  __device__ __forceinline__ void select(int32_t slot, int32_t begin, int32_t end) {
    const int lane = threadIdx.x % 4;
    const uint8_t* const piece = rows + static_cast<int64_t>(slot) * row_bytes + begin * 256;
    own = piece + lane * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t at = (i * 4 + lane) * 128;
      if (at < (end - begin) * 256) touch(piece + at);
    }
  }
  __device__ __forceinline__ void load(Words& words) { load_words(own, words); }
};

template <OperandFormat kFormat, bool kGated, int kStages>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    panel_gate_up_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t panel_shared[];
  __shared__ Chosen chosen;
  __shared__ Share<false> share;
  using Source = PanelSource<kFormat, kGated>;
  const SharedParts<Source, kStages> parts(panel_shared);
  wait_for_predecessor();
  // Only now: what starts early may then read whatever this kernel was allowed to read.
  release_dependents();
  const int32_t routed = routed_expert(args);
  stage_panel_tokens(args, parts.rows);
  clear_tails(args);
  find_chosen(args, routed, chosen);  // its barriers publish the rows too
  if (threadIdx.x == 0)
    share.fill(chosen, args.inter / kStripRows, panel_steps(args.hidden), Source::kStepBlocks);
  __syncthreads();
  StagedPanelTokens<kGated ? 128 : 256> tokens{parts.rows, staged_row_bytes(args.hidden),
                                               args.top_k};
  const int lane = threadIdx.x % 32;
  auto store = [&](int32_t expert, int32_t strip, int32_t slot,
                   const float(&sums)[kGated ? 2 : 1][4]) {
    const float scale = value_or(args.gate_up.multipliers, expert, 1.0f);
    const float up_scale = kGated ? value_or(args.gate_up.up_multipliers, expert, 1.0f) : scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t to = __shfl_sync(kAll, slot, (lane % 4 * 2 + i % 2) * 4);
      const int32_t column = strip * kStripRows + lane / 4 + i / 2 * 8;
      if (to < 0) continue;
      const int64_t bias = static_cast<int64_t>(expert) * args.inter + column;
      const float up = sums[kGated ? 1 : 0][i] * up_scale + value_or(args.up_bias, bias, 0.0f);
      float h;
      if constexpr (kGated) {
        const float gate = sums[0][i] * scale + value_or(args.gate_bias, bias, 0.0f);
        h = apply_gated(args.activation, gate, up);
      } else {
        h = apply_unary(args.activation, up);
      }
      static_cast<__nv_bfloat16*>(
          args.h)[static_cast<int64_t>(to) * panel_row_elements(args.inter) +
                  fragment_place(column)] = __float2bfloat16_rn(h);
    }
  };
  run_units<kStages>(Source(args.gate_up), chosen, share, parts.rings, parts.pieces, tokens, store);
}

static_assert(kStripRows == kRows);

template <OperandFormat kFormat, int kStages, bool kOwner>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    panel_down_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(128) uint8_t panel_shared[];
  __shared__ Chosen chosen;
  __shared__ Share<kOwner> share;
  __shared__ std::conditional_t<kOwner, OwnedRows, char> owned;
  using Source = PanelSource<kFormat, false>;
  const SharedParts<Source, kStages> parts(panel_shared);
  release_dependents();
  if constexpr (kOwner) owned.start(args);
  find_chosen(args, routed_expert(args), chosen);
  if (threadIdx.x == 0)
    share.fill(chosen, args.hidden / kStripRows, panel_steps(args.inter), Source::kStepBlocks);
  __syncthreads();
  IntermediatePanelRows tokens{static_cast<const uint8_t*>(args.h),
                               panel_row_elements(args.inter) * 2};
  auto store = [&](int32_t expert, int32_t strip, int32_t slot, const float(&sums)[1][4]) {
    const float scale = value_or(args.down.multipliers, expert, 1.0f);
    const auto value = [&](int i) { return sums[0][i] * scale; };
    const int32_t first = strip * kStripRows;
    if constexpr (kOwner) {
      store_output(args, expert, first, slot, owned.strip_values(args, strip), kRows, value);
    } else {
      store_output(args, expert, first, slot, args.y + first, args.hidden, value);
    }
  };
  // A block without work waits in it too: the end of this grid has to mean the end of gate_up.
  run_units<kStages>(Source(args.down), chosen, share, parts.rings, parts.pieces, tokens, store);
  if constexpr (kOwner) owned.sum(args, chosen);
}

/// Whether rings of gate_up have many stages, and its shared memory.
struct GateUpShape {
  bool many = false;
  int64_t bytes = 0;

  GateUpShape(const Args& args, const Room& room) {
    auto shared = [&](bool with_many) {
      return decode_panel_shared_bytes(args.format, args.num_tokens, args.hidden,
                                       decode_panel_stages(args.format, with_many));
    };
    many = room.takes(shared(true));
    bytes = room.alone(shared(many));
  }
};

template <OperandFormat kFormat>
cudaError_t gate_up_of(const Args& args, cudaStream_t stream, bool overlap) {
  constexpr int kFew = decode_panel_stages(kFormat, false);
  constexpr int kMany = decode_panel_stages(kFormat, true);
  Room room;
  const cudaError_t status = room.find();
  if (status != cudaSuccess) return status;
  const GateUpShape shape(args, room);
  const auto kernel = args.gated ? (shape.many ? panel_gate_up_kernel<kFormat, true, kMany>
                                               : panel_gate_up_kernel<kFormat, true, kFew>)
                                 : (shape.many ? panel_gate_up_kernel<kFormat, false, kMany>
                                               : panel_gate_up_kernel<kFormat, false, kFew>);
  return launch_rings(kernel, args, shape.bytes, stream, overlap);
}

template <OperandFormat kFormat>
cudaError_t down_of(const Args& args, cudaStream_t stream, bool overlap) {
  constexpr int kFew = decode_panel_down_stages(kFormat, false);
  constexpr int kMany = decode_panel_down_stages(kFormat, true);
  Room room;
  const cudaError_t status = room.find();
  if (status != cudaSuccess) return status;
  auto shared = [&](int32_t stages) {
    return decode_panel_shared_bytes(args.format, 0, args.hidden, stages);
  };
  const bool many = room.takes(shared(kMany));
  const bool owner = args.out != nullptr;
  const auto kernel = many ? (owner ? panel_down_kernel<kFormat, kMany, true>
                                    : panel_down_kernel<kFormat, kMany, false>)
                           : (owner ? panel_down_kernel<kFormat, kFew, true>
                                    : panel_down_kernel<kFormat, kFew, false>);
  const int64_t bytes = room.beside(GateUpShape(args, room).bytes, shared(many ? kMany : kFew));
  return launch_rings(kernel, args, bytes, stream, overlap);
}

}  // namespace

cudaError_t panel_gate_up(const Args& args, cudaStream_t stream, bool overlap) {
  switch (args.format) {
    case OperandFormat::mxfp4: return gate_up_of<OperandFormat::mxfp4>(args, stream, overlap);
    case OperandFormat::nvfp4: return gate_up_of<OperandFormat::nvfp4>(args, stream, overlap);
    case OperandFormat::mxfp8: return gate_up_of<OperandFormat::mxfp8>(args, stream, overlap);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t panel_down(const Args& args, cudaStream_t stream, bool overlap) {
  switch (args.format) {
    case OperandFormat::mxfp4: return down_of<OperandFormat::mxfp4>(args, stream, overlap);
    case OperandFormat::nvfp4: return down_of<OperandFormat::nvfp4>(args, stream, overlap);
    case OperandFormat::mxfp8: return down_of<OperandFormat::mxfp8>(args, stream, overlap);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace moekit::kernels::smxx_decode
