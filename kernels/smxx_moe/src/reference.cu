// The reference product: a warp an output value, canonical weights decoded element by element. Slow
// and certain; every other kernel of the layer can be held to it on the device.
#include <cuda_fp16.h>

#include "kernels/smxx_moe/api.h"
#include "kernels/smxx_moe/src/floats.cuh"

namespace moekit::kernels::smxx_moe {
namespace {

constexpr int kThreads = 256;

/// Value (row, col) of expert e: code times block scale, then times or divided by the global.
__device__ float weight_value(const ExpertMatrices& m, int64_t e, int64_t row, int64_t col) {
  using enum WeightFormat;
  const auto* codes = static_cast<const uint8_t*>(m.codes) + e * m.expert_code_bytes;
  const auto* scales = static_cast<const uint8_t*>(m.scales) + e * m.expert_scale_bytes;
  const int64_t i = row * m.cols + col;
  switch (m.scheme.format) {
    case bf16:
      return __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(codes)[i])
                             << 16);
    case f16: return __half2float(reinterpret_cast<const __half*>(codes)[i]);
    case f32: return reinterpret_cast<const float*>(codes)[i];
    case fp8_tensor: return decode_e4m3(codes[i]) * *reinterpret_cast<const float*>(scales);
    case fp8_channel: return decode_e4m3(codes[i]) * reinterpret_cast<const float*>(scales)[row];
    case fp8_block:
      return decode_e4m3(codes[i]) *
             reinterpret_cast<const float*>(scales)[row / 128 * ((m.cols + 127) / 128) + col / 128];
    case mxfp8: return decode_e4m3(codes[i]) * decode_e8m0(scales[row * (m.cols / 32) + col / 32]);
    case mxfp8_e5m2:
      return decode_e5m2(codes[i]) * decode_e8m0(scales[row * (m.cols / 32) + col / 32]);
    case mxfp4: {
      const uint32_t code = codes[i / 2] >> (i % 2 * 4) & 15;
      return decode_e2m1(code) * decode_e8m0(scales[row * (m.cols / 32) + col / 32]);
    }
    case nvfp4: {
      const uint32_t code = codes[i / 2] >> (i % 2 * 4) & 15;
      const float v = decode_e2m1(code) * decode_e4m3(scales[row * (m.cols / 16) + col / 16]);
      const float global = m.globals[e];
      return m.global_sense == ScaleSense::divisor ? __fdiv_rn(v, global) : v * global;
    }
    case int4_group:
    case int8_group:
    case int4_channel:
    case int8_channel: break;
  }
  return 0.0f;
}

__global__ void __launch_bounds__(kThreads)
    reference_kernel(const float* in, int32_t slots_per_row, const int32_t* ids, int64_t num_slots,
                     int32_t num_experts, const ExpertMatrices m, float* out, int64_t out_stride) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kThreads / 32;
  for (int64_t w = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
       w < num_slots * m.rows; w += warps) {
    const int64_t slot = w / m.rows, n = w % m.rows;
    const int32_t e = ids[slot];
    if (static_cast<uint32_t>(e) >= static_cast<uint32_t>(num_experts)) continue;
    const float* row = in + slot / slots_per_row * m.cols;
    float sum = 0.0f;
    for (int64_t k = lane; k < m.cols; k += 32) sum += row[k] * weight_value(m, e, n, k);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) {
      if (m.bias != nullptr) sum += m.bias[e * m.rows + n];
      out[slot * out_stride + n] = sum;
    }
  }
}

}  // namespace

const char* reference_refusal(const ExpertMatrices& m) {
  switch (m.scheme.format) {
    case WeightFormat::int4_group:
    case WeightFormat::int8_group:
    case WeightFormat::int4_channel:
    case WeightFormat::int8_channel: return "integer weights are not covered on the device";
    case WeightFormat::mxfp8:
    case WeightFormat::mxfp8_e5m2:
    case WeightFormat::mxfp4:
      return m.cols % 32 == 0 ? nullptr : "mx weights need a depth that is a multiple of 32";
    case WeightFormat::nvfp4:
      return m.cols % 16 == 0 ? nullptr : "nvfp4 weights need a depth that is a multiple of 16";
    default: return nullptr;
  }
}

cudaError_t reference_product(const float* in, int32_t slots_per_row, const int32_t* ids,
                              int64_t num_slots, int32_t num_experts,
                              const ExpertMatrices& matrices, float* out, int64_t out_stride,
                              cudaStream_t stream) {
  if (reference_refusal(matrices) != nullptr || slots_per_row < 1) return cudaErrorInvalidValue;
  if (num_slots * matrices.rows == 0) return cudaSuccess;
  const int64_t wanted = (num_slots * matrices.rows + kThreads / 32 - 1) / (kThreads / 32);
  const int blocks = static_cast<int>(wanted < 8192 ? wanted : 8192);
  reference_kernel<<<blocks, kThreads, 0, stream>>>(in, slots_per_row, ids, num_slots, num_experts,
                                                    matrices, out, out_stride);
  return cudaGetLastError();
}

}  // namespace moekit::kernels::smxx_moe
