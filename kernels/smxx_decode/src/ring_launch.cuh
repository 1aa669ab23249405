// Launches of the decode kernels that stream weights through rings: how much shared memory a block
// takes decides who shares an SM with whom.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/smxx_decode/api.h"
#include "kernels/smxx_decode/src/units.cuh"

namespace moekit::kernels::smxx_decode {

/// Shared memory of the current GPU.
struct Room {
  int block = 0;  ///< that a block may have
  int sm = 0;     ///< of an SM

  cudaError_t find() {
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    status = cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess) return status;
    return cudaDeviceGetAttribute(&sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  bool takes(int64_t bytes) const { return bytes + kDecodeStaticBytes <= block; }

  /// At least so many that an SM of Hopper or Blackwell holds one such block: blocks that find
  /// others' leavings on an SM must not come in pairs, which would leave other SMs idle.
  int64_t alone(int64_t bytes) const {
    constexpr int64_t kAlone = int64_t{117} << 10;
    return bytes < kAlone && block >= 2 * kAlone - 16384 ? kAlone : bytes;
  }
  /// What a block of down takes: `bytes` where that fits beside a block of gate_up, with a KiB for
  /// the system and less than one of static variables each.
  int64_t beside(int64_t gate_up_bytes, int64_t bytes) const {
    return gate_up_bytes + bytes + 4096 <= sm ? bytes : alone(bytes);
  }
};

inline cudaError_t launch_rings(void (*kernel)(Args), const Args& args, int64_t shared,
                                cudaStream_t stream, bool overlap) {
  const auto* function = reinterpret_cast<const void*>(kernel);
  cudaError_t status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared));
  // All of it, so that the next kernel's block finds room beside this one's.
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
  }
  if (status != cudaSuccess) return status;
  const LaunchShape shape{dim3(static_cast<unsigned>(args.num_sms)), kThreads,
                          static_cast<size_t>(shared), stream, overlap};
  return launch(kernel, shape, args);
}

}  // namespace moekit::kernels::smxx_decode
