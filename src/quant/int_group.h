// int4 and int8 weights: one scale (and zero point) a group of inputs or an output row.
//   symmetric:   w = (q - 2^(bits-1)) * s, s = amax / (2^(bits-1) - 1)
//   zero points: w = (q - z) * s, s = (max - min) / (2^bits - 1), the range widened to hold 0
#pragma once

#include <cstdint>

#include "moekit/dtype.h"

namespace moekit::quant {

/// A scale as its storage type holds it: rounded to nearest (e8m0: up), 1 where that is zero (codes
/// are then zeros), the largest finite value where it is infinite.
float storable_scale(float scale, DType dtype);

/// Scale and zero point of w[0, n). `bits` is 4 or 8.
struct IntGroup {
  float scale = 1.0f;
  int32_t zero = 0;  ///< subtracted from codes: 2^(bits-1) when symmetric
};
IntGroup int_group_of(const float* w, int64_t n, int bits, bool zero_points, DType scale_dtype);

/// codes[i] = clamp(round(w[i] / scale) + zero, 0, 2^bits - 1).
void int_encode(const float* w, int64_t n, int bits, const IntGroup& group, uint8_t* codes);

}  // namespace moekit::quant
