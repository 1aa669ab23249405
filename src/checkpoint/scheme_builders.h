// Scheme values for each method: what its tensors are called and what they mean.
#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "checkpoint/scheme.h"

namespace moekit::checkpoint {

/// FP8 codes: per tensor, channel or 128x128 block, or mxfp8.
Scheme fp8(WeightFormat format);
/// NVFP4 or MXFP4: two codes a byte along the inputs.
Scheme fp4(WeightFormat format);
/// 4- or 8-bit integers in 32-bit words; group 0 means one scale a row.
Scheme integers(int64_t bits, int64_t group, bool zero_points);

/// A group of compressed-tensors' config_groups. Throws unsupported for what is not covered.
Scheme ct_scheme(const std::string& name, const JsonPlace& group, const std::string& format);
/// Throws unsupported for rotations and sparsity, which change what the stored numbers mean.
void refuse_transforms(const JsonPlace& config);
/// A quant_algo of ModelOpt. Throws unsupported for others than those that are covered.
Scheme modelopt_scheme(const JsonPlace& place);

/// A group size; 0 where the file writes -1, one group a row.
int64_t group_size(const JsonPlace& place);
std::string lower(std::string text);

}  // namespace moekit::checkpoint
