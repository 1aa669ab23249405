// Tensors of a layer in memory against its config: what the one announces, the other brings.
#pragma once

#include "moekit/layer.h"

namespace moekit::api {

/// Throws invalid_argument, naming the tensor and the field of the config, where one announces what
/// the other lacks, and where a tensor can't be read (tensor/view_check.h) or lies on a device;
/// unsupported for fp8_tensor inputs without a static scale. Shapes and dtypes are not looked at.
void check_announced(const MoeConfig& config, const LayerTensors& tensors);

}  // namespace moekit::api
