// A CanonicalLayer over tensors that the caller holds in memory.
#pragma once

#include <memory>

#include "moekit/layer.h"
#include "problem/canonical_layer.h"

namespace moekit::api {

/// Views into `tensors`; nothing is copied, so they must outlive the layer. Throws invalid_argument
/// naming the tensor.
std::shared_ptr<const CanonicalLayer> layer_from_tensors(const MoeConfig& config,
                                                         const LayerTensors& tensors);

/// One matrix [rows, cols] in `scheme`, as a layer would read it. Throws like layer_from_tensors.
StoredMatrix matrix_from_tensors(const MatrixTensors& tensors, const WeightScheme& scheme,
                                 int64_t rows, int64_t cols, ScaleSense global_sense);

}  // namespace moekit::api
