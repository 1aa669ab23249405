// Whole rows between fp32 and the float types that callers' tensors hold.
#pragma once

#include "moekit/tensor.h"

namespace moekit {

/// out[i] = view(row, i), i in [0, shape[1]). `view` is [rows, width] f64, f32, f16 or bf16 in host
/// memory, any strides. Throws invalid_argument for other types, ranks or rows. f64 is rounded to
/// nearest.
void load_row_f32(const TensorView& view, int64_t row, float* out);

/// view(row, i) = in[i], rounded to nearest even. `view` is [rows, width] f32, f16 or bf16 in host
/// memory. Throws invalid_argument otherwise.
void store_row_f32(const TensorView& view, int64_t row, const float* in);

}  // namespace moekit
