// Row quantizers, but for fp8_block (quantize_fp8_block.cu): a warp takes 128 columns at a time,
// four a lane, so that a scale group is eight lanes (mx) or four (nvfp4), and its maximum a few
// shuffles. Exact divisions: the bits are those of quant::encode_row.
#include "kernels/common/live_count.cuh"
#include "kernels/smxx_moe/api.h"
#include "kernels/smxx_moe/src/floats.cuh"
#include "kernels/smxx_moe/src/quantize.cuh"

namespace moekit::kernels::smxx_moe {
namespace {

/// From L2: where nothing was waited for, L1 may still have what lay there before.
template <RowType kType>
__device__ __forceinline__ float4 load4(const void* row, int64_t column) {
  if constexpr (kType == RowType::f32) {
    return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(row) + column));
  } else {
    const uint2 raw =
        __ldcg(reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(row) + column));
    return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
            __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u)};
  }
}

__device__ __forceinline__ float magnitude(const float4& v) {
  return max_or_nan(max_or_nan(fabsf(v.x), fabsf(v.y)), max_or_nan(fabsf(v.z), fabsf(v.w)));
}

template <RowType kType>
__device__ float row_magnitude(const void* row, int64_t width, int lane) {
  float m = 0.0f;
  for (int64_t c = lane * 4; c < width; c += 128)
    m = max_or_nan(m, magnitude(load4<kType>(row, c)));
  return group_magnitude<32>(m);
}

__device__ __forceinline__ uint16_t encode4_e2m1(float x, float y, float z, float w) {
  return static_cast<uint16_t>(encode_e2m1(x) | encode_e2m1(y) << 4 | encode_e2m1(z) << 8 |
                               encode_e2m1(w) << 12);
}

/// 255 where amax is not finite; see src/quant/mx.h for the rule.
__device__ __forceinline__ uint8_t mx_scale(float amax, int emax) {
  if (!is_finite(amax)) return 255;
  const uint32_t bits = __float_as_uint(amax);
  const int bump = (bits & 0x00600000u) == 0x00600000u ? 1 : 0;
  const int byte = static_cast<int>(bits >> 23) + bump - emax;
  return static_cast<uint8_t>(byte < 0 ? 0 : byte);
}

struct Nvfp4Group {
  bool divisor_sense;
  float global;
  __device__ __forceinline__ float multiplier() const {
    return divisor_sense ? __fdiv_rn(1.0f, global) : global;
  }
  /// Scale byte of a group and its four codes of this lane.
  __device__ __forceinline__ uint8_t encode(float amax, const float4& v, uint16_t& codes) const {
    codes = 0;
    if (amax != amax || global != global) return 0x7f;
    if (divisor_sense) {
      uint8_t scale = encode_e4m3(__fdiv_rn(amax, 6.0f) * global);
      if (scale == 0) scale = 0x20;
      const float f = __fdiv_rn(global, decode_e4m3(scale));
      codes = encode4_e2m1(v.x * f, v.y * f, v.z * f, v.w * f);
      return scale;
    }
    const uint8_t scale = encode_e4m3(__fdiv_rn(__fdiv_rn(amax, 6.0f), global));
    const float d = scale == 0 ? __uint_as_float(0x7f800000) : decode_e4m3(scale) * global;
    codes =
        encode4_e2m1(__fdiv_rn(v.x, d), __fdiv_rn(v.y, d), __fdiv_rn(v.z, d), __fdiv_rn(v.w, d));
    return scale;
  }
};

/// What the columns of a row share: the scale of a whole row, or nvfp4's global.
struct RowScale {
  float scale;
  Nvfp4Group group;
};

/// Whether columns can be quantized without a look at the whole row.
template <ActivationFormat kFormat>
__device__ __forceinline__ bool columns_stand_alone(const ActivationScheme& scheme) {
  if constexpr (kFormat == ActivationFormat::nvfp4) return scheme.static_scale;
  return kFormat != ActivationFormat::fp8_token;
}

template <RowType kType, ActivationFormat kFormat>
__device__ RowScale row_scale(const QuantizeArgs& args, const void* row, int lane) {
  using enum ActivationFormat;
  const ActivationScheme& scheme = args.out.scheme;
  const bool divides = scheme.sense == ScaleSense::divisor;
  RowScale result{1.0f, {}};
  if constexpr (kFormat == fp8_tensor) {
    result.scale = divides ? __fdiv_rn(1.0f, args.out.static_scale) : args.out.static_scale;
  } else if constexpr (kFormat == fp8_token) {
    result.scale = fp8_scale(row_magnitude<kType>(row, args.out.width, lane), scheme.ue8m0_scale);
  } else if constexpr (kFormat == nvfp4) {
    if (scheme.static_scale) {
      result.group = {divides, args.out.static_scale};
    } else {
      const float amax = row_magnitude<kType>(row, args.out.width, lane);
      result.group = {false, is_finite(amax) ? fmaxf(__fdiv_rn(amax, 2688.0f), kScaleFloor)
                                             : __uint_as_float(0x7fc00000)};
    }
  }
  return result;
}

/// Four columns of this lane in row r, zeros past its end.
template <RowType kType>
__device__ __forceinline__ float4 load_columns(const QuantizeArgs& args, int64_t r, int64_t base,
                                               int lane) {
  const int64_t c = base + lane * 4;
  const void* row = static_cast<const uint8_t*>(args.rows) + r * args.row_bytes;
  return c < args.out.width ? load4<kType>(row, c) : float4{0.0f, 0.0f, 0.0f, 0.0f};
}

/// Columns [base, base + 128) of row r, of which `v` are this lane's.
template <ActivationFormat kFormat>
__device__ __forceinline__ void quantize_columns(const QuantizeArgs& args, int64_t r, int64_t base,
                                                 const RowScale& shared, const float4& v,
                                                 int lane) {
  using enum ActivationFormat;
  auto* codes = static_cast<uint8_t*>(args.out.codes) + r * args.out.row_bytes;
  auto* scales = static_cast<uint8_t*>(args.out.scales) + r * args.out.scale_row_bytes;
  const int64_t width = args.out.width;
  const int64_t c = base + lane * 4;
  const bool inside = c < width;
  if constexpr (kFormat == fp8_tensor || kFormat == fp8_token) {
    if (inside) *reinterpret_cast<uint32_t*>(codes + c) = encode4_e4m3(v, shared.scale);
    if (base == 0 && lane == 0) *reinterpret_cast<float*>(scales) = shared.scale;
  } else if constexpr (kFormat == mxfp8 || kFormat == mxfp4) {
    const uint8_t byte = mx_scale(group_magnitude<8>(magnitude(v)), kFormat == mxfp8 ? 8 : 2);
    const float divisor = decode_e8m0(byte);
    if (inside && lane % 8 == 0) scales[c / 32] = byte;
    if constexpr (kFormat == mxfp8) {
      if (inside) *reinterpret_cast<uint32_t*>(codes + c) = encode4_e4m3(v, divisor);
    } else if (inside) {
      *reinterpret_cast<uint16_t*>(codes + c / 2) =
          byte == 255 ? 0
                      : encode4_e2m1(__fdiv_rn(v.x, divisor), __fdiv_rn(v.y, divisor),
                                     __fdiv_rn(v.z, divisor), __fdiv_rn(v.w, divisor));
    }
  } else {
    uint16_t four;
    const uint8_t byte = shared.group.encode(group_magnitude<4>(magnitude(v)), v, four);
    if (inside && lane % 4 == 0) scales[c / 16] = byte;
    if (inside) *reinterpret_cast<uint16_t*>(codes + c / 2) = four;
    if (base == 0 && lane == 0) {
      const int64_t offset = ((width + 15) / 16 + 3) / 4 * 4;
      *reinterpret_cast<float*>(scales + offset) = shared.group.multiplier();
    }
  }
}

template <RowType kType, ActivationFormat kFormat>
__device__ __forceinline__ void quantize_share(const QuantizeArgs& args) {
  const int64_t rows = live_count(args.num_rows, args.live_rows);
  const int lane = threadIdx.x % 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kQuantizeThreads + threadIdx.x) / 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kQuantizeThreads / 32;
  if (columns_stand_alone<kFormat>(args.out.scheme)) {
    // A warp a piece of 128 columns: short calls spread over the whole GPU. Four pieces in flight.
    const RowScale scale = row_scale<kType, kFormat>(args, nullptr, lane);
    const auto pieces = static_cast<uint32_t>((args.out.width + 127) / 128);
    constexpr int kBatch = 4;
    for (int64_t i = first; i < rows * pieces; i += kBatch * step) {
      float4 v[kBatch];
      int64_t row[kBatch];
      uint32_t piece[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int64_t at = i + j * step;
        row[j] = at < UINT32_MAX ? static_cast<uint32_t>(at) / pieces : at / pieces;
        piece[j] = static_cast<uint32_t>(at - row[j] * pieces);
        if (row[j] < rows) v[j] = load_columns<kType>(args, row[j], int64_t{piece[j]} * 128, lane);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (row[j] >= rows) break;
        quantize_columns<kFormat>(args, row[j], int64_t{piece[j]} * 128, scale, v[j], lane);
      }
    }
    return;
  }
  for (int64_t r = first; r < rows; r += step) {
    const void* row = static_cast<const uint8_t*>(args.rows) + r * args.row_bytes;
    const RowScale scale = row_scale<kType, kFormat>(args, row, lane);
    for (int64_t base = 0; base < args.out.width; base += 128) {
      quantize_columns<kFormat>(args, r, base, scale, load_columns<kType>(args, r, base, lane),
                                lane);
    }
  }
}

template <RowType kType, ActivationFormat kFormat>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_kernel(const __grid_constant__ QuantizeArgs args) {
  between_launches(args, [&] { quantize_share<kType, kFormat>(args); });
}

template <RowType kType>
cudaError_t launch_format(const QuantizeArgs& args, cudaStream_t stream, bool overlap) {
  using enum ActivationFormat;
  const LaunchShape shape = quantize_shape(args, 128, stream, overlap);
  switch (args.out.scheme.format) {
    case fp8_tensor: return launch(quantize_kernel<kType, fp8_tensor>, shape, args);
    case fp8_token: return launch(quantize_kernel<kType, fp8_token>, shape, args);
    case fp8_block: return launch_quantize_fp8_block(kType, args, stream, overlap);
    case mxfp8: return launch(quantize_kernel<kType, mxfp8>, shape, args);
    case mxfp4: return launch(quantize_kernel<kType, mxfp4>, shape, args);
    case nvfp4: return launch(quantize_kernel<kType, nvfp4>, shape, args);
    case f32:
    case bf16: break;
  }
  return cudaErrorInvalidValue;
}

__global__ void dequantize_kernel(const QuantizedRows in, int64_t num_rows, float* out) {
  using enum ActivationFormat;
  const int64_t total = num_rows * in.width;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t r = i / in.width, c = i % in.width;
    const auto* codes = static_cast<const uint8_t*>(in.codes) + r * in.row_bytes;
    const auto* scales = static_cast<const uint8_t*>(in.scales) + r * in.scale_row_bytes;
    const uint32_t nibble = codes[c / 2] >> (c % 2 * 4) & 15;
    switch (in.scheme.format) {
      case f32: out[i] = reinterpret_cast<const float*>(codes)[c]; break;
      case bf16:
        out[i] = __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(codes)[c])
                                 << 16);
        break;
      case fp8_tensor:
      case fp8_token:
        out[i] = decode_e4m3(codes[c]) * *reinterpret_cast<const float*>(scales);
        break;
      case fp8_block:
        out[i] = decode_e4m3(codes[c]) * reinterpret_cast<const float*>(scales)[c / 128];
        break;
      case mxfp8: out[i] = decode_e4m3(codes[c]) * decode_e8m0(scales[c / 32]); break;
      case mxfp4: out[i] = decode_e2m1(nibble) * decode_e8m0(scales[c / 32]); break;
      case nvfp4: {
        const int64_t offset = ((in.width + 15) / 16 + 3) / 4 * 4;
        out[i] = decode_e2m1(nibble) * decode_e4m3(scales[c / 16]) *
                 *reinterpret_cast<const float*>(scales + offset);
        break;
      }
    }
  }
}

}  // namespace

cudaError_t quantize_rows(const void* rows, RowType type, int64_t row_bytes, int64_t num_rows,
                          const int32_t* live_rows, const QuantizedRows& out, cudaStream_t stream,
                          bool overlap, bool independent_of_predecessor) {
  if (out.width <= 0 || out.width % 16 != 0 || row_bytes % 16 != 0 || out.row_bytes % 4 != 0 ||
      (out.scheme.format == ActivationFormat::fp8_block ? out.row_bytes % 8 != 0
                                                        : out.slot_row != nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (num_rows == 0) return cudaSuccess;
  const QuantizeArgs args{rows, row_bytes, num_rows, live_rows, out, independent_of_predecessor};
  return type == RowType::f32 ? launch_format<RowType::f32>(args, stream, overlap)
                              : launch_format<RowType::bf16>(args, stream, overlap);
}

cudaError_t dequantize_rows(const QuantizedRows& in, int64_t num_rows, float* out,
                            cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  const int64_t wanted = (num_rows * in.width + 255) / 256;
  dequantize_kernel<<<static_cast<int>(wanted < 4096 ? wanted : 4096), 256, 0, stream>>>(
      in, num_rows, out);
  return cudaGetLastError();
}

}  // namespace moekit::kernels::smxx_moe
