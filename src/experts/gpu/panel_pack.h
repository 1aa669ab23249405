// Packs stored matrices into weight panels (kernels/common/weight_panels.h), whatever their
// storage.
#pragma once

#include <cstddef>
#include <string_view>

#include "kernels/common/weight_panels.h"
#include "quant/stored_matrix.h"

namespace moekit::experts::cuda {

/// Writes the panels of `m` at `to`: panel_matrix_bytes(format, m.rows, m.cols), zeros before.
/// Returns what sums over the packed weights are multiplied by. `m` has `format`'s codes and whole
/// columns of 32; its scales may be of any type and lie in any order, one per group of columns.
/// Groups whose scale is NaN, and mxfp8 groups with a NaN code, are all NaN. Throws unsupported,
/// naming the matrix as `name`, for scales that the format does not have and for weights that bf16
/// cannot hold exactly under one multiplier of the matrix.
float pack_panels(const StoredMatrix& m, kernels::OperandFormat format, std::string_view name,
                  std::byte* to);

}  // namespace moekit::experts::cuda
