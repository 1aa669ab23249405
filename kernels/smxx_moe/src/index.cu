// Index: ids -> rows sorted by expert, and the task lists of the grouped GEMMs. Two launches over
// chunks of the slots: every block counts its chunk, and the last one to finish turns counts into
// offsets; then every block puts its chunk's rows in place and writes its share of the tasks.
#include "kernels/common/copy.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/limits.h"
#include "kernels/common/live_count.cuh"
#include "kernels/smxx_moe/api.h"

namespace moekit::kernels::smxx_moe {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxExperts = kGroupedGemmLimits.max_experts;
// Two slots a thread: enough blocks to spread a large table, few enough for one block to join.
constexpr int32_t kChunk = 2048;

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
};

/// Exclusive prefix sums over values[0, count) in place; returns the total. All threads.
__device__ int32_t exclusive_scan(int32_t* values, int32_t count, int32_t* warp_sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int32_t carry = 0;
  for (int32_t base = 0; base < count; base += kThreads) {
    const int32_t i = base + static_cast<int32_t>(threadIdx.x);
    const int32_t own = i < count ? values[i] : 0;
    int32_t sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      int32_t total = warp_sums[lane];
      for (int step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, total, step);
        if (lane >= step) total += other;
      }
      warp_sums[lane] = total;
    }
    __syncthreads();
    if (i < count) values[i] = carry + sum - own + (warp > 0 ? warp_sums[warp - 1] : 0);
    carry += warp_sums[31];
    __syncthreads();
  }
  return carry;
}

/// The last block: chunk counts become starts inside an expert; offsets, sizes of the task lists.
__device__ void join_counts(const IndexArgs& args, int32_t* values, int32_t* warp_sums) {
  const Index& index = args.index;
  const int32_t experts = args.num_experts;
  for (int32_t e = threadIdx.x; e < experts; e += kThreads) {
    int32_t sum = 0;
    for (uint32_t chunk = 0; chunk < gridDim.x; ++chunk) {
      int32_t* count = index.chunk_counts + static_cast<int64_t>(chunk) * experts + e;
      const int32_t own = __ldcg(count);
      *count = sum;
      sum += own;
    }
    values[e] = sum;
    for (int which = 0; which < 2; ++which) {
      index.pair_offsets[which * (experts + 1) + e] = index.shapes[which].num_pairs(sum);
    }
  }
  __syncthreads();
  const int32_t rows = exclusive_scan(values, experts, warp_sums);
  for (int32_t e = threadIdx.x; e < experts; e += kThreads) index.expert_offsets[e] = values[e];
  if (threadIdx.x == 0) {
    index.expert_offsets[experts] = rows;
    *index.num_rows = rows;
  }
  for (int which = 0; which < 2; ++which) {
    if (index.tasks[which] == nullptr) continue;
    int32_t* offsets = index.pair_offsets + which * (experts + 1);
    __syncthreads();
    for (int32_t e = threadIdx.x; e < experts; e += kThreads) values[e] = offsets[e];
    __syncthreads();
    const int32_t pairs = exclusive_scan(values, experts, warp_sums);
    for (int32_t e = threadIdx.x; e < experts; e += kThreads) offsets[e] = values[e];
    if (threadIdx.x == 0) {
      offsets[experts] = pairs;
      *index.num_tasks[which] = 2 * pairs;
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    count_kernel(const __grid_constant__ IndexArgs args) {
  extern __shared__ int32_t shared[];
  int32_t* counts = shared;                        // [num_experts]
  int32_t* warp_sums = counts + args.num_experts;  // [32]
  int32_t* dropped = warp_sums + 32;               // [1]
  int32_t* is_last = dropped + 1;                  // [1]
  for (int32_t e = threadIdx.x; e < args.num_experts; e += kThreads) counts[e] = 0;
  if (threadIdx.x == 0) *dropped = 0;
  wait_for_predecessor();
  release_dependents();
  __syncthreads();
  const int32_t slots = args.num_slots();
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kChunk;
  const int32_t end = slots < first + kChunk ? slots : first + kChunk;
  for (int32_t i = first + static_cast<int32_t>(threadIdx.x); i < end; i += kThreads) {
    const int32_t id = args.ids[i];
    if (args.is_expert(id)) {
      atomicAdd(&counts[id], 1);
    } else if (id != -1) {
      atomicAdd(dropped, 1);
    }
  }
  __syncthreads();
  for (int32_t e = threadIdx.x; e < args.num_experts; e += kThreads) {
    args.index.chunk_counts[static_cast<int64_t>(blockIdx.x) * args.num_experts + e] = counts[e];
  }
  if (threadIdx.x == 0 && *dropped > 0) atomicAdd(args.index.ticket + 1, *dropped);
  // Publishes this block's counts to whichever block comes last; the ticket's own order tells
  // which.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = atomicAdd(args.index.ticket, 1) == static_cast<int32_t>(gridDim.x) - 1;
  }
  __syncthreads();
  if (*is_last == 0) return;
  __threadfence();
  join_counts(args, counts, warp_sums);
  if (threadIdx.x == 0) {
    if (args.index.dropped != nullptr) *args.index.dropped = __ldcg(args.index.ticket + 1);
    args.index.ticket[0] = args.index.ticket[1] = 0;
  }
}

__device__ void write_tasks(const IndexArgs& args, int which, int32_t* offsets, int32_t* pairs) {
  const Index& index = args.index;
  const int32_t experts = args.num_experts;
  for (int32_t e = threadIdx.x; e <= experts; e += kThreads) {
    pairs[e] = index.pair_offsets[which * (experts + 1) + e];
  }
  __syncthreads();
  const int32_t total = pairs[experts];
  for (int32_t p = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x); p < total;
       p += static_cast<int32_t>(gridDim.x) * kThreads) {
    // The expert of the pair by bisection.
    int32_t low = 0, high = experts;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (pairs[middle] <= p ? low : high) = middle;
    }
    const int32_t rows = offsets[low + 1] - offsets[low];
    for (int32_t half = 0; half < 2; ++half) {
      index.tasks[which][2 * static_cast<int64_t>(p) + half] =
          index.shapes[which].task(low, offsets[low], rows, p - pairs[low], half);
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1)
    place_kernel(const __grid_constant__ IndexArgs args) {
  extern __shared__ int32_t shared[];
  int32_t* offsets = shared;                         // [num_experts + 1]
  int32_t* cursor = offsets + args.num_experts + 1;  // [num_experts + 1]
  wait_for_predecessor();
  release_dependents();
  const Index& index = args.index;
  for (int32_t e = threadIdx.x; e <= args.num_experts; e += kThreads) {
    offsets[e] = index.expert_offsets[e];
    if (e < args.num_experts) {
      cursor[e] =
          offsets[e] + index.chunk_counts[static_cast<int64_t>(blockIdx.x) * args.num_experts + e];
    }
  }
  __syncthreads();
  const int32_t slots = args.num_slots();
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kChunk;
  const int32_t end = slots < first + kChunk ? slots : first + kChunk;
  for (int32_t i = first + static_cast<int32_t>(threadIdx.x); i < end; i += kThreads) {
    const int32_t id = args.ids[i];
    int32_t row = -1;
    if (args.is_expert(id)) {
      row = atomicAdd(&cursor[id], 1);
      index.row_slot[row] = i;
      index.row_token[row] = i / args.top_k;
    }
    index.slot_row[i] = row;
  }
  __syncthreads();
  for (int which = 0; which < 2; ++which) {
    if (index.tasks[which] != nullptr) write_tasks(args, which, offsets, cursor);
  }
}

}  // namespace

int64_t task_capacity(const TaskShape& shape, int64_t num_slots, int64_t num_experts) {
  // Every slot in a row tile of its own at worst, as long as there are experts for it; a full tile
  // holds tile_rows of them. One more column block for the odd half of a pair.
  const int64_t touched = num_slots < num_experts ? num_slots : num_experts;
  return (num_slots / shape.tile_rows + touched) * (static_cast<int64_t>(shape.n_blocks) + 1);
}

int64_t chunk_count(int64_t num_slots) {
  return num_slots <= kChunk ? 1 : (num_slots + kChunk - 1) / kChunk;
}

cudaError_t build_index(const int32_t* ids, int64_t num_tokens, const int32_t* live_tokens,
                        int32_t top_k, int32_t num_experts, const Index& index, cudaStream_t stream,
                        bool overlap) {
  if (num_experts < 1 || num_experts > kMaxExperts || top_k < 1 || num_tokens < 0 ||
      num_tokens * top_k > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const IndexArgs args{ids,  static_cast<int32_t>(num_tokens), live_tokens, top_k, num_experts,
                       index};
  const size_t experts = static_cast<size_t>(num_experts);
  const auto chunks = static_cast<unsigned>(chunk_count(num_tokens * top_k));
  const cudaError_t status = launch(
      count_kernel, {chunks, kThreads, sizeof(int32_t) * (experts + 34), stream, overlap}, args);
  if (status != cudaSuccess) return status;
  return launch(place_kernel,
                {chunks, kThreads, sizeof(int32_t) * 2 * (experts + 1), stream, overlap}, args);
}

}  // namespace moekit::kernels::smxx_moe
