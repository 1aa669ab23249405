// Index: ids -> rows sorted by expert, and the task lists of the grouped GEMMs. Small calls take
// one launch whose blocks know nothing of each other: each counts all slots by itself. Larger ones
// take two launches over chunks of the slots: every block counts its chunk, and the last one to
// finish turns counts into offsets; then every block puts its chunk's rows in place and writes its
// share of the tasks.
#include <algorithm>

#include "kernels/common/copy.cuh"
#include "kernels/common/launch.h"
#include "kernels/common/limits.h"
#include "kernels/smxx_moe/api.h"
#include "kernels/smxx_moe/src/index_steps.cuh"

namespace moekit::kernels::smxx_moe {
namespace {

constexpr int32_t kThreads = kIndexThreads;
constexpr int kMaxExperts = kGroupedGemmLimits.max_experts;
// Two slots a thread: enough blocks to spread a large table, few enough for one block to join.
constexpr int32_t kChunk = 2048;

// --- one launch --------------------------------------------------------------------------------

// A block's threads keep the ids of all slots in registers.
constexpr int kSlotsPerThread = kOneLaunchSlots / kThreads;
static_assert(kSlotsPerThread * kThreads == kOneLaunchSlots && kOneLaunchSlots <= UINT16_MAX + 1);
// Blocks of a task list: one iteration of write_tasks() in all but the widest layers, and most of
// the GPU left to what overlaps.
constexpr int64_t kMaxListBlocks = 16;

struct SmallArgs {
  IndexArgs args;
  uint32_t list_blocks[2];  // 0 where the list is not wanted
};

/// Dynamic shared memory in words: offsets [num_experts + 1] (counts before the scan), dropped [1],
/// and then, by what the block does, pairs [num_experts + 1] or the 16-bit slots of sorted rows.
__host__ __device__ constexpr size_t small_shared_words(int32_t num_experts, int32_t num_slots) {
  const size_t experts = static_cast<size_t>(num_experts) + 1;
  const size_t rows = (static_cast<size_t>(num_slots) + 1) / 2;
  return experts + 1 + (experts > rows ? experts : rows);
}
// With the sums of scan_block(), of one and of two values: what a block has without asking for
// more.
static_assert(4 * small_shared_words(kMaxExperts, kOneLaunchSlots) + 4 * 3 * 32 <= 48 << 10);

/// ids: of slots j * kThreads + thread, -1 for those that are not live.
struct SmallCall {
  int32_t capacity;  // slots that the call has room for
  int32_t slots;     // live ones
  int32_t ids[kSlotsPerThread];

  __device__ __forceinline__ explicit SmallCall(const IndexArgs& args)
      : capacity(args.num_tokens * args.top_k) {
    // The ids of the whole capacity come at once with the live count, not after it.
#pragma unroll
    for (int j = 0; j < kSlotsPerThread; ++j) ids[j] = slot(j) < capacity ? args.ids[slot(j)] : -1;
    slots = args.num_slots();
#pragma unroll
    for (int j = 0; j < kSlotsPerThread; ++j) {
      if (slot(j) >= slots) ids[j] = -1;
    }
  }
  __device__ __forceinline__ static int32_t slot(int j) {
    return j * kThreads + static_cast<int32_t>(threadIdx.x);
  }
};

/// The first block: rows in sorted order, offsets, counters.
__device__ __forceinline__ void place_rows(const IndexArgs& args, const SmallCall& call,
                                           int32_t* offsets, int32_t* dropped, uint16_t* sorted) {
  const Index& index = args.index;
  int32_t place[kSlotsPerThread];
#pragma unroll
  for (int j = 0; j < kSlotsPerThread; ++j) {
    if (j * kThreads >= call.slots) break;
    place[j] = args.count(call.ids[j], offsets, dropped);
  }
  __syncthreads();
  scan_experts<0>(args, 0, offsets, [&](int32_t e, const int32_t* before) {
    offsets[e] = before[0];
    index.expert_offsets[e] = before[0];
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    *index.num_rows = offsets[args.num_experts];
    if (index.dropped != nullptr) *index.dropped = *dropped;
  }
#pragma unroll
  for (int j = 0; j < kSlotsPerThread; ++j) {
    if (j * kThreads >= call.slots) break;
    const int32_t slot = call.slot(j);
    int32_t row = -1;
    if (args.is_expert(call.ids[j])) {
      row = offsets[call.ids[j]] + place[j];
      sorted[row] = static_cast<uint16_t>(slot);
    }
    if (slot < call.slots) index.slot_row[slot] = row;
  }
  __syncthreads();
  // From shared memory in order: stores of whole lines in place of single words.
  const int32_t rows = offsets[args.num_experts];
#pragma unroll 1
  for (int32_t row = static_cast<int32_t>(threadIdx.x); row < rows; row += kThreads) {
    const uint32_t slot = sorted[row];
    index.row_slot[row] = static_cast<int32_t>(slot);
    index.row_token[row] = static_cast<int32_t>(slot / static_cast<uint32_t>(args.top_k));
  }
}

/// Block `part` of a task list's `parts`.
__device__ __forceinline__ void list_tasks(const IndexArgs& args, const SmallCall& call, int list,
                                           uint32_t part, uint32_t parts, int32_t* offsets,
                                           int32_t* dropped, int32_t* pairs) {
#pragma unroll
  for (int j = 0; j < kSlotsPerThread; ++j) {
    if (j * kThreads >= call.slots) break;
    args.count(call.ids[j], offsets, dropped);
  }
  __syncthreads();
  scan_experts<1>(args, list, offsets, [&](int32_t e, const int32_t* before) {
    offsets[e] = before[0];
    pairs[e] = before[1];
  });
  __syncthreads();
  if (part == 0 && threadIdx.x == 0) *args.index.num_tasks[list] = 2 * pairs[args.num_experts];
  write_tasks(args, list, offsets, pairs, part, parts);
}

__global__ void __launch_bounds__(kThreads, 1)
    small_kernel(const __grid_constant__ SmallArgs small) {
  const IndexArgs& args = small.args;
  extern __shared__ int32_t shared[];
  int32_t* offsets = shared;
  int32_t* dropped = offsets + args.num_experts + 1;
  int32_t* own = dropped + 1;
#pragma unroll 1
  for (int32_t e = threadIdx.x; e < args.num_experts; e += kThreads) offsets[e] = 0;
  if (threadIdx.x == 0) *dropped = 0;
  wait_for_predecessor();
  release_dependents();
  const SmallCall call(args);
  __syncthreads();  // the counters are zero for all
  if (blockIdx.x == 0) {
    place_rows(args, call, offsets, dropped, reinterpret_cast<uint16_t*>(own));
    return;
  }
  const uint32_t block = blockIdx.x - 1;
  const int list = block < small.list_blocks[0] ? 0 : 1;
  list_tasks(args, call, list, block - (list == 0 ? 0 : small.list_blocks[0]),
             small.list_blocks[list], offsets, dropped, own);
}

cudaError_t build_small(const IndexArgs& args, cudaStream_t stream, bool overlap) {
  const int32_t slots = args.num_tokens * args.top_k;
  SmallArgs small{args, {}};
  for (int list = 0; list < 2; ++list) {
    if (args.index.tasks[list] == nullptr) continue;
    const int64_t pairs = task_capacity(args.index.shapes[list], slots, args.num_experts) / 2;
    small.list_blocks[list] = static_cast<uint32_t>(
        std::clamp<int64_t>((pairs + kThreads - 1) / kThreads, 1, kMaxListBlocks));
  }
  return launch(small_kernel,
                {1 + small.list_blocks[0] + small.list_blocks[1], kThreads,
                 sizeof(int32_t) * small_shared_words(args.num_experts, slots), stream, overlap},
                small);
}

// --- two launches ------------------------------------------------------------------------------

/// The last block: chunk counts become starts inside an expert; offsets, sizes of the task lists.
__device__ void join_counts(const IndexArgs& args, int32_t* values) {
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
  }
  __syncthreads();
  scan_experts<2>(args, 0, values, [&](int32_t e, const int32_t* before) {
    index.expert_offsets[e] = before[0];
    for (int list = 0; list < 2; ++list) {
      index.pair_offsets[list * (experts + 1) + e] = before[1 + list];
    }
    if (e < experts) return;
    *index.num_rows = before[0];
    for (int list = 0; list < 2; ++list) {
      if (index.tasks[list] != nullptr) *index.num_tasks[list] = 2 * before[1 + list];
    }
  });
}

__global__ void __launch_bounds__(kThreads, 1)
    count_kernel(const __grid_constant__ IndexArgs args) {
  extern __shared__ int32_t shared[];
  int32_t* counts = shared;                      // [num_experts]
  int32_t* dropped = counts + args.num_experts;  // [1]
  int32_t* is_last = dropped + 1;                // [1]
  for (int32_t e = threadIdx.x; e < args.num_experts; e += kThreads) counts[e] = 0;
  if (threadIdx.x == 0) *dropped = 0;
  wait_for_predecessor();
  release_dependents();
  __syncthreads();
  const int32_t slots = args.num_slots();
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kChunk;
  const int32_t end = slots < first + kChunk ? slots : first + kChunk;
  for (int32_t i = first + static_cast<int32_t>(threadIdx.x); i < end; i += kThreads) {
    args.count(args.ids[i], counts, dropped);
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
  join_counts(args, counts);
  if (threadIdx.x == 0) {
    if (args.index.dropped != nullptr) *args.index.dropped = __ldcg(args.index.ticket + 1);
    args.index.ticket[0] = args.index.ticket[1] = 0;
  }
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
  int32_t* pairs = cursor;  // [num_experts + 1], one list after the other
  for (int list = 0; list < 2; ++list) {
    if (index.tasks[list] == nullptr) continue;
    __syncthreads();  // what lay there has been read
    for (int32_t e = threadIdx.x; e <= args.num_experts; e += kThreads) {
      pairs[e] = index.pair_offsets[list * (args.num_experts + 1) + e];
    }
    __syncthreads();
    write_tasks(args, list, offsets, pairs, blockIdx.x, gridDim.x);
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
  if (num_tokens * top_k <= kOneLaunchSlots) return build_small(args, stream, overlap);
  const size_t experts = static_cast<size_t>(num_experts);
  const auto chunks = static_cast<unsigned>(chunk_count(num_tokens * top_k));
  const cudaError_t status = launch(
      count_kernel, {chunks, kThreads, sizeof(int32_t) * (experts + 2), stream, overlap}, args);
  if (status != cudaSuccess) return status;
  return launch(place_kernel,
                {chunks, kThreads, sizeof(int32_t) * 2 * (experts + 1), stream, overlap}, args);
}

}  // namespace moekit::kernels::smxx_moe
