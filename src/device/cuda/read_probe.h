// Kernels of the read-bandwidth probe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace moekit::device {

/// Threads of a block of read_all.
inline constexpr int kReadThreads = 512;

/// Fills `bytes` (a multiple of 16) with codes that repeat nowhere near: memory that was never
/// written, or holds one value, may read faster.
cudaError_t fill_all(void* data, int64_t bytes, cudaStream_t stream);
/// Reads all of it once. `sink` is four bytes that are written only if a sum comes out as it never
/// does.
cudaError_t read_all(const void* data, int64_t bytes, int blocks, uint32_t* sink,
                     cudaStream_t stream);

}  // namespace moekit::device
