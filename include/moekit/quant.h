// Number formats of weights and of GEMM inputs ("activations"). Exact definitions:
// docs/numerics.md; codecs: src/quant.
#pragma once

#include <cstdint>

#include "moekit/export.h"

namespace moekit {

/// How one weight matrix is stored. Every scale multiplies unless a ScaleSense says that it
/// divides.
enum class WeightFormat : uint8_t {
  bf16,
  f16,
  f32,
  fp8_tensor,   ///< e4m3, one scale a matrix
  fp8_channel,  ///< e4m3, one scale an output row
  fp8_block,    ///< e4m3, one scale per 128x128 block; edge blocks may be partial
  mxfp8,        ///< e4m3 + e8m0 per 32 along K
  mxfp8_e5m2,   ///< e5m2 + e8m0 per 32 along K
  mxfp4,        ///< e2m1 + e8m0 per 32 along K
  nvfp4,        ///< e2m1 + e4m3 per 16 along K + one fp32 global a matrix (gate and up apart)
  int4_group,   ///< 4-bit integers, one scale (and zero point) per `group` along K
  int8_group,
  int4_channel,  ///< 4-bit integers, one scale (and zero point) an output row
  int8_channel,
};

/// Format of a matrix and what varies inside the format.
struct WeightScheme {
  WeightFormat format = WeightFormat::bf16;
  int32_t group = 0;         ///< K elements a scale for int*_group, else 0
  bool zero_points = false;  ///< int formats: w = (q - z) * s; symmetric otherwise
  friend bool operator==(const WeightScheme&, const WeightScheme&) = default;
};

/// The format in which a GEMM reads its input.
enum class ActivationFormat : uint8_t {
  f32,
  bf16,
  fp8_tensor,  ///< e4m3 with a static scale
  fp8_token,   ///< e4m3, dynamic scale a row: amax / 448
  fp8_block,   ///< e4m3, dynamic scale per 1x128
  mxfp8,       ///< e4m3 + e8m0 per 32
  mxfp4,       ///< e2m1 + e8m0 per 32
  nvfp4,       ///< e2m1 + e4m3 per 16 + fp32 global: static, or dynamic per row
};

/// Formats with codes and scales: a row in one of them can't be scaled or summed as it is.
constexpr bool is_quantized(ActivationFormat format) {
  return format != ActivationFormat::f32 && format != ActivationFormat::bf16;
}

/// Whether a stored global or static scale multiplies codes (ModelOpt) or divides them
/// (compressed-tensors NVFP4).
enum class ScaleSense : uint8_t { multiplier, divisor };

/// How the input of a matrix is quantized. The static scale's value travels with the matrix
/// (StoredMatrix::input_scale).
struct ActivationScheme {
  ActivationFormat format = ActivationFormat::bf16;
  bool static_scale = false;  ///< fp8_tensor: always; nvfp4: where the checkpoint has a global
  ScaleSense sense = ScaleSense::multiplier;  ///< of the static scale
  bool ue8m0_scale = false;  ///< fp8_block, fp8_token: scale rounded up to a power of two
  friend bool operator==(const ActivationScheme&, const ActivationScheme&) = default;
};

MOEKIT_API const char* to_string(WeightFormat format);
MOEKIT_API const char* to_string(ActivationFormat format);

}  // namespace moekit
