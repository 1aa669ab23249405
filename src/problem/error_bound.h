// The bound within which two fp32 evaluations of one layer agree, derived from formats and K.
// `check`, the combination table and the tests judge by it.
#pragma once

#include "moekit/config.h"

namespace moekit {

/// Largest relative RMS error of any output row, ||y - r|| / ||r||, of a back-end that follows the
/// exact quantization chain with fp32 sums in an order of its own. Derivation in error_bound.cc.
/// `combine_dtype`: f32 or bf16, the format in which the experts' rows travel back.
double row_error_bound(const MoeConfig& config, DType combine_dtype = DType::f32);

/// The same for a back-end whose products run on a GPU's matrix units. Twice for the sums of fp8
/// products, which keep 13 fraction bits below the largest product of an instruction; and 2^-8 for
/// the roundings of slot rows and result to bf16.
double gpu_row_error_bound(const MoeConfig& config, DType combine_dtype = DType::f32);

}  // namespace moekit
