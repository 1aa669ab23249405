// Checks of tensor views that come from outside: where their elements lie in memory.
#pragma once

#include "moekit/tensor.h"

namespace moekit {

/// Throws invalid_argument, naming the tensor, unless its rank is 0 to kMaxRank, no axis is
/// negative, its elements can be counted and have data, and all of them (negative strides included)
/// lie within 2^47 bytes of `data` and inside the address space. Whether that memory is the
/// caller's can't be told. A view without elements has no strides to check.
void check_view(const TensorView& view, const char* name);

/// check_view, and no two elements of the view share memory: it is going to be written.
void check_written_view(const TensorView& view, const char* name);

}  // namespace moekit
