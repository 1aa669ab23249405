// Weight codec: fp32 matrices into any WeightScheme, round to nearest even, in one canonical
// storage per format. What `quantize` writes and what tests and synthetic layers are made of.
#pragma once

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "quant/stored_matrix.h"

namespace moekit::quant {

/// What a scheme leaves open.
struct EncodeOptions {
  /// Of fp8 and integer scales: f32, bf16, f16, or f8_e8m0 (fp8 only, rounded up to a power of
  /// two). Codes are computed under the scale as stored.
  DType scale_dtype = DType::f32;
  ScaleSense global_sense = ScaleSense::multiplier;  ///< of nvfp4's global
  /// nvfp4: the global is made for this magnitude where it is larger than the matrix's own, so that
  /// matrices (gate and up) can share one.
  float amax = 0.0f;
};

/// Canonical storage of a rows x cols matrix: codes row-major (FP4 two a byte, low nibble first;
/// integers in 32-bit words along the inputs), then scales row-major, then zero points (a byte
/// each). Groups at an edge may be partial.
struct EncodedLayout {
  WeightScheme scheme;
  EncodeOptions options;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t code_row_bytes = 0;
  DType scale_unit = DType::f32;
  int64_t row_group = 0;  ///< as in ScaleGrid
  int64_t col_group = 0;
  int64_t scale_rows = 0;  ///< 0 where the format has no scales
  int64_t scale_cols = 0;
  int64_t scales_offset = 0;
  int64_t zeros_offset = 0;
  int64_t total_bytes = 0;

  /// Throws invalid_argument for a group that is not positive, a scale type that the format can't
  /// have, or empty sizes.
  static EncodedLayout of(const WeightScheme& scheme, int64_t rows, int64_t cols,
                          const EncodeOptions& options = {});
  /// A StoredMatrix over `storage` (total_bytes). The global is 1.
  StoredMatrix view(const std::byte* storage) const;
};

/// Encodes w [layout.rows, layout.cols] row-major into `storage` and returns its view, the global
/// included. Throws invalid_argument for a weight to quantize that is not finite, naming it. Zero
/// groups give exact zeros. `threads` is optional; the result does not depend on it.
StoredMatrix encode_weights(const EncodedLayout& layout, const float* w, std::byte* storage,
                            ThreadPool* threads = nullptr);

/// An encoded matrix that owns its memory.
struct EncodedMatrix {
  Buffer storage;
  StoredMatrix view;
};
EncodedMatrix encode_matrix(const float* w, int64_t rows, int64_t cols, const WeightScheme& scheme,
                            const EncodeOptions& options = {}, ThreadPool* threads = nullptr);

}  // namespace moekit::quant
