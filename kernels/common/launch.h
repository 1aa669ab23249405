// Launches a kernel with the attributes that our chains use.
#pragma once

#include <cuda_runtime_api.h>

namespace moekit::kernels {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
  /// Programmatic dependent launch: may start while its predecessor on the stream ends. The kernel
  /// must call wait_for_predecessor() before it touches memory that others write or read.
  bool overlap = false;
  unsigned cluster = 1;
};

inline cudaError_t launch_raw(const void* kernel, const LaunchShape& shape, void** arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    auto& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim.x = shape.cluster;
    a.val.clusterDim.y = a.val.clusterDim.z = 1;
  }
  if (shape.overlap) {
    auto& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

/// A kernel of one argument struct.
template <typename Args>
cudaError_t launch(void (*kernel)(Args), const LaunchShape& shape, const Args& args) {
  void* arguments[] = {const_cast<Args*>(&args)};
  return launch_raw(reinterpret_cast<const void*>(kernel), shape, arguments);
}

}  // namespace moekit::kernels
