// Makes TMA descriptors through the driver's entry point, so that nothing links to libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kernels/common/tensor_map_spec.h"

namespace moekit::kernels {

/// Host work only: no device memory is touched. cudaErrorInvalidValue where broken_rule() objects
/// or the driver refuses, cudaErrorNotSupported where the driver has no TMA.
cudaError_t encode_tensor_map(const TensorMapSpec& spec, CUtensorMap* map);

}  // namespace moekit::kernels
