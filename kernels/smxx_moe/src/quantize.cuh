// What the row quantizers of quantize.cu and quantize_fp8_block.cu share.
#pragma once

#include "kernels/common/copy.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/quotients.cuh"
#include "kernels/smxx_moe/api.h"
#include "kernels/smxx_moe/src/floats.cuh"

namespace moekit::kernels::smxx_moe {

inline constexpr int kQuantizeThreads = 256;

struct QuantizeArgs {
  const void* rows;
  int64_t row_bytes;
  int64_t num_rows;
  const int32_t* live_rows;
  QuantizedRows out;
  bool independent_of_predecessor;
};

cudaError_t launch_quantize_fp8_block(RowType type, const QuantizeArgs& args, cudaStream_t stream,
                                      bool overlap);

/// A warp for every `columns` columns of a row, on as many multiprocessors as there are.
inline LaunchShape quantize_shape(const QuantizeArgs& args, int64_t columns, cudaStream_t stream,
                                  bool overlap) {
  constexpr int64_t kWarps = kQuantizeThreads / 32, kMost = 132 * 8;
  const int64_t units = args.num_rows * ((args.out.width + columns - 1) / columns);
  const int64_t wanted = (units + kWarps - 1) / kWarps;
  return {static_cast<unsigned>(wanted < kMost ? wanted : kMost), kQuantizeThreads, 0, stream,
          overlap};
}

/// The larger magnitude of groups of kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float group_magnitude(float m) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    m = max_or_nan(m, __shfl_xor_sync(0xffffffffu, m, step));
  }
  return m;
}

/// A kernel's body in its place between the launches before and after it on the stream.
template <typename Work>
__device__ __forceinline__ void between_launches(const QuantizeArgs& args, const Work& work) {
  if (!args.independent_of_predecessor) wait_for_predecessor();
  release_dependents();
  work();
  // Whoever waits for this kernel relies on all that came before it.
  if (args.independent_of_predecessor) wait_for_predecessor();
}

}  // namespace moekit::kernels::smxx_moe
