// The steps of building an index that its kernels share: counting ids, offsets from counts, task
// lists. All kernels that use them have kIndexThreads threads a block.
#pragma once

#include "kernels/common/limits.h"
#include "kernels/common/live_count.cuh"
#include "kernels/smxx_moe/api.h"

namespace moekit::kernels::smxx_moe {

inline constexpr int32_t kIndexThreads = 1024;
static_assert(kGroupedGemmLimits.max_experts % kIndexThreads == 0);

struct IndexArgs {
  const int32_t* ids;
  int32_t num_tokens;
  const int32_t* live_tokens;
  int32_t top_k;
  int32_t num_experts;
  Index index;

  __device__ int32_t num_slots() const { return live_count(num_tokens, live_tokens) * top_k; }
  __device__ bool is_expert(int32_t id) const {
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(num_experts);
  }
  /// Counts a slot of expert `id` (or of none). Shared memory: counts [num_experts], dropped [1].
  /// Returns how many of that expert came before, 0 without an expert.
  __device__ int32_t count(int32_t id, int32_t* counts, int32_t* dropped) const {
    if (is_expert(id)) return atomicAdd(&counts[id], 1);
    if (id != -1) atomicAdd(dropped, 1);
    return 0;
  }
};

/// Several sums at once, for every thread: of `own` over the threads before it, and over all. Once
/// in a kernel: nothing guards its shared memory against a second call.
template <int kSums>
__device__ __forceinline__ void scan_block(const int32_t (&own)[kSums], int32_t (&before)[kSums],
                                           int32_t (&total)[kSums]) {
  __shared__ int32_t warp_sums[kSums][kIndexThreads / 32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int32_t sum[kSums];
#pragma unroll
  for (int s = 0; s < kSums; ++s) sum[s] = own[s];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum[s], step);
      if (lane >= step) sum[s] += other;
    }
  }
  if (lane == 31) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) warp_sums[s][warp] = sum[s];
  }
  __syncthreads();  // every warp's sums are there for all
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    const int32_t of_warp = warp_sums[s][lane];
    total[s] = __reduce_add_sync(0xffffffffu, of_warp);
    before[s] = sum[s] - own[s] + __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
  }
}

/// From counts (shared memory, [num_experts], complete for all threads) to offsets: calls
/// store(e, before) once for every expert e and for e = num_experts, with before[0] the rows, and
/// before[1 + l] the pairs of list first_list + l, of all experts before e. store() may overwrite
/// counts[e]. num_experts <= kGroupedGemmLimits.max_experts. Once in a kernel, as scan_block().
template <int kLists, typename Store>
__device__ __forceinline__ void scan_experts(const IndexArgs& args, int first_list,
                                             const int32_t* counts, const Store& store) {
  constexpr int kSums = 1 + kLists;
  constexpr int kEach = kGroupedGemmLimits.max_experts / kIndexThreads;
  const int32_t experts = args.num_experts;
  // A thread has neighbouring experts, so that one scan serves any number of them.
  const int32_t each = (experts + kIndexThreads - 1) / kIndexThreads;
  const int32_t first = static_cast<int32_t>(threadIdx.x) * each;
  const int32_t end = first + each < experts ? first + each : experts;
  int32_t size[kEach][kSums], own[kSums] = {}, before[kSums], total[kSums];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i >= end) break;
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      const int32_t rows = counts[first + i];
      size[i][s] = s == 0 ? rows : args.index.shapes[first_list + s - 1].num_pairs(rows);
      own[s] += size[i][s];
    }
  }
  scan_block(own, before, total);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i >= end) break;
    store(first + i, before);
#pragma unroll
    for (int s = 0; s < kSums; ++s) before[s] += size[i][s];
  }
  if (threadIdx.x == 0) store(experts, total);
}

/// Writes part `part` of `parts` of a task list. offsets, pairs: shared memory, [num_experts + 1],
/// rows and pairs before each expert.
__device__ __forceinline__ void write_tasks(const IndexArgs& args, int list, const int32_t* offsets,
                                            const int32_t* pairs, uint32_t part, uint32_t parts) {
  const int32_t total = pairs[args.num_experts];
  const TaskShape& shape = args.index.shapes[list];
#pragma unroll 1
  for (int32_t p = static_cast<int32_t>(part * kIndexThreads + threadIdx.x); p < total;
       p += static_cast<int32_t>(parts) * kIndexThreads) {
    // The expert of the pair by bisection.
    int32_t low = 0, high = args.num_experts;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (pairs[middle] <= p ? low : high) = middle;
    }
    const int32_t rows = offsets[low + 1] - offsets[low];
    TileTask* to = args.index.tasks[list] + 2 * static_cast<int64_t>(p);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      to[half] = shape.task(low, offsets[low], rows, p - pairs[low], half);
    }
  }
}

}  // namespace moekit::kernels::smxx_moe
