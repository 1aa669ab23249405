// WeightView: expert weights in device memory, in place, as the matrix kernels read them.
#pragma once

#include <cstdint>

namespace moekit::kernels {

/// Operands of a product: bf16; e4m3 with fp32 scales (rows 1x128, weights 128x128); or weights in
/// panels (weight_panels.h) with bf16 rows.
enum class OperandFormat : int32_t { bf16, fp8_block, mxfp4, nvfp4, mxfp8 };

/// Weights of all local experts: element (half, n, k) of expert e at base + e * expert_bytes +
/// half * half_bytes + n * row_bytes + k, so that any row order of gate and up is read in place.
/// Strides are multiples of 16. In panels: half's first block at base + e * expert_bytes + half *
/// half_bytes; row_bytes is not used.
struct WeightView {
  const void* base = nullptr;
  int64_t expert_bytes = 0;
  int64_t half_bytes = 0;  ///< gate to up; 0 without a gate
  int64_t row_bytes = 0;
  // fp8_block: scale of block (half, n / 128, k / 128)
  const float* scales = nullptr;
  int64_t scale_expert = 0;  ///< elements
  int64_t scale_half = 0;
  int64_t scale_row = 0;
  // Panels: what the sums of expert e are multiplied by, [num_experts]; with a gate `multipliers`
  // is the gate's.
  const float* multipliers = nullptr;
  const float* up_multipliers = nullptr;
};

}  // namespace moekit::kernels
