// Rows to e4m3 with a scale for every 128 columns, where they are or sorted by expert: a pass over
// memory that prefill pays for. A warp takes 1024 columns of a row at a time, eight a lane and
// load, so that half a warp has a block. The bits are those of quant::encode_row.
#include "kernels/common/live_count.cuh"
#include "kernels/common/quotients.cuh"
#include "kernels/smxx_moe/src/floats.cuh"
#include "kernels/smxx_moe/src/quantize.cuh"

namespace moekit::kernels::smxx_moe {
namespace {

constexpr int kLaneColumns = 8;
constexpr int kLoads = 4;
constexpr int kChunk = kLoads * 32 * kLaneColumns;
constexpr uint32_t kAll = 0xffffffffu;

/// Eight columns, from L2: where nothing was waited for, L1 may still have what lay there before.
template <RowType kType>
__device__ __forceinline__ void load8(const void* row, int64_t column, float (&v)[kLaneColumns]) {
  if constexpr (kType == RowType::f32) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(row) + column);
    const float4 low = __ldcg(from), high = __ldcg(from + 1);
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  } else {
    const uint4 raw =
        __ldcg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(row) + column));
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

/// Codes of a lane's eight values.
__device__ __forceinline__ uint2 encode8(const float (&v)[kLaneColumns], float divisor) {
  const Quotients by(divisor);
  if (!by.covered()) {
    return {encode4_e4m3({v[0], v[1], v[2], v[3]}, divisor),
            encode4_e4m3({v[4], v[5], v[6], v[7]}, divisor)};
  }
  return {encode4_e4m3(by, v[0], v[1], v[2], v[3]), encode4_e4m3(by, v[4], v[5], v[6], v[7])};
}

/// Columns [base, base + kChunk) of a row, quantized: codes of this lane, and the scale of block
/// base / 128 + lane in lanes 0 to 7.
struct Chunk {
  uint2 codes[kLoads];
  float scale = 0.0f;

  template <RowType kType>
  __device__ __forceinline__ void make(const void* row, int64_t base, int64_t width, bool ue8m0,
                                       int lane) {
    float v[kLoads][kLaneColumns];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t column = base + (i * 32 + lane) * kLaneColumns;
      if (column < width) {
        load8<kType>(row, column, v[i]);
      } else {
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) v[i][j] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float amax = 0.0f;
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) amax = max_or_nan(amax, fabsf(v[i][j]));
      const float divisor = fp8_scale(group_magnitude<16>(amax), ue8m0);
      codes[i] = encode8(v[i], divisor);
      const float of_half = __shfl_sync(kAll, divisor, lane % 2 * 16);
      if (lane / 2 == i) scale = of_half;
    }
  }

  __device__ __forceinline__ void store(const QuantizedRows& out, int64_t row, int64_t base,
                                        int lane) const {
    auto* to = static_cast<uint8_t*>(out.codes) + row * out.row_bytes + base;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t column = (i * 32 + lane) * kLaneColumns;
      if (base + column < out.width) *reinterpret_cast<uint2*>(to + column) = codes[i];
    }
    if (lane < kChunk / 128 && base + lane * 128 < out.width) {
      auto* scales = static_cast<uint8_t*>(out.scales) + row * out.scale_row_bytes;
      reinterpret_cast<float*>(scales)[base / 128 + lane] = scale;
    }
  }
};

template <RowType kType>
__device__ __forceinline__ void quantize_share(const QuantizeArgs& args) {
  const QuantizedRows& out = args.out;
  const int lane = threadIdx.x % 32;
  const auto chunks = static_cast<uint32_t>((out.width + kChunk - 1) / kChunk);
  const int64_t units = live_count(args.num_rows, args.live_rows) * int64_t{chunks};
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kQuantizeThreads + threadIdx.x) / 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kQuantizeThreads / 32;
  for (int64_t i = first; i < units; i += step) {
    const int64_t row = i < UINT32_MAX ? static_cast<uint32_t>(i) / chunks : i / chunks;
    const int64_t base = (i - row * chunks) * kChunk;
    Chunk chunk;
    chunk.make<kType>(static_cast<const uint8_t*>(args.rows) + row * args.row_bytes, base,
                      out.width, out.scheme.ue8m0_scale, lane);
    if (out.slot_row == nullptr) {
      chunk.store(out, row, base, lane);
      continue;
    }
    for (int32_t j = 0; j < out.slots; j += 32) {
      const int32_t own =
          j + lane < out.slots ? __ldcg(out.slot_row + row * out.slots + j + lane) : -1;
      for (int32_t k = 0; k < 32 && j + k < out.slots; ++k) {
        const int32_t to = __shfl_sync(kAll, own, k);
        if (to >= 0) chunk.store(out, to, base, lane);
      }
    }
  }
}

template <RowType kType>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_fp8_block_kernel(const __grid_constant__ QuantizeArgs args) {
  between_launches(args, [&] { quantize_share<kType>(args); });
}

}  // namespace

cudaError_t launch_quantize_fp8_block(RowType type, const QuantizeArgs& args, cudaStream_t stream,
                                      bool overlap) {
  const LaunchShape shape = quantize_shape(args, kChunk, stream, overlap);
  return type == RowType::f32 ? launch(quantize_fp8_block_kernel<RowType::f32>, shape, args)
                              : launch(quantize_fp8_block_kernel<RowType::bf16>, shape, args);
}

}  // namespace moekit::kernels::smxx_moe
