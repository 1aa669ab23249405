// Tensor parallelism: the slice of each expert's intermediate columns that one rank holds. Slices
// are views: nothing is copied.
#pragma once

#include <cstdint>

#include "problem/canonical_layer.h"

namespace moekit {

/// Columns [first, first + count) of the intermediate size.
struct TensorSlice {
  int64_t first = 0;
  int64_t count = 0;
  friend bool operator==(const TensorSlice&, const TensorSlice&) = default;
};

/// Columns that must stay together: whole blocks of weight scales, of packed codes and of the
/// activation's scales (`down_input`: the format in which down reads them).
int64_t slice_granule(const CanonicalLayer& layer, const ActivationScheme& down_input);

/// The slice of rank `tp` of `tp_size`: whole granules, shares that differ by at most one, the
/// ragged tail in the last. Throws unsupported, with the reason, where the layer can't be split so.
TensorSlice tensor_slice(const CanonicalLayer& layer, const ActivationScheme& down_input,
                         int tp_size, int tp);

/// The layer as that rank sees it: gate and up rows and their biases, down columns. What is added
/// once for all slices, down's bias and the shared experts, stays with rank 0.
CanonicalLayer slice_layer(const CanonicalLayer& layer, TensorSlice slice, int tp);

}  // namespace moekit
