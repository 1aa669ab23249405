// How the blocks of a launch come by their tasks: in the order of the list, whoever is free next.
// So neighbours in the list, who read the same weights, run at about the same time and L2 serves
// all but the first; and no block stands idle while another has two tasks left.
//
// The first producer thread takes numbers from a counter in device memory, one ahead, and hands
// tasks to the block's readers through two slots in shared memory. With a cluster the first block
// takes a pair and hands the second block its half.
#pragma once

#include "kernels/common/barrier.cuh"
#include "kernels/sm90_grouped_gemm/src/kernel_args.h"
#include "kernels/sm90_grouped_gemm/src/knobs.h"

namespace moekit::kernels::sm90_grouped_gemm {

inline constexpr int kTaskSlots = 2;
/// In n_block: both tasks of the pair read the same weight tile.
inline constexpr int32_t kSharedWeights = 1 << 30;
/// The expert that stands for the end.
inline constexpr int32_t kNoMoreTasks = -1;

struct TaskQueue {
  TileTask task[kTaskSlots];
  uint64_t full[kTaskSlots];
  uint64_t empty[kTaskSlots];  // with a cluster the first block's, for the readers of both

  /// One thread, before fence_barrier_init(). `readers`: warps of a block that take tasks.
  template <Knobs K>
  __device__ __forceinline__ void init(uint32_t readers) {
    for (int s = 0; s < kTaskSlots; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], readers * K.cluster);
    }
  }
};

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// One of the readers: a whole warp, or (kAlone) one thread of a warp that does nothing else.
template <Knobs K, bool kAlone = false>
class TaskReader {
 public:
  __device__ __forceinline__ explicit TaskReader(TaskQueue& queue) : queue_(queue) {}

  /// False after the last task.
  __device__ __forceinline__ bool take(TileTask& task) {
    barrier_wait(&queue_.full[ring_.stage], ring_.parity);
    const int4 raw = *reinterpret_cast<const int4*>(&queue_.task[ring_.stage]);
    task = {raw.x, raw.y, raw.z, raw.w & ~kSharedWeights};
    shares_weights_ = (raw.w & kSharedWeights) != 0;
    if constexpr (!kAlone) __syncwarp();
    if (kAlone || threadIdx.x % 32 == 0) {
      if constexpr (K.cluster == 1) {
        barrier_arrive(&queue_.empty[ring_.stage]);
      } else {
        barrier_arrive_cluster(&queue_.empty[ring_.stage], 0);
      }
    }
    ring_.advance<kTaskSlots>();
    return task.expert != kNoMoreTasks;
  }
  /// Of the task taken last.
  __device__ __forceinline__ bool shares_weights() const { return shares_weights_; }

 private:
  TaskQueue& queue_;
  RingPosition ring_;
  bool shares_weights_ = false;
};

/// The first producer thread's part: first(), then for every task taken request(), perhaps look()
/// when the number has arrived, and publish() at its end; after the last one finish().
template <Knobs K>
class TaskFeed {
 public:
  __device__ __forceinline__ TaskFeed(const Args& args, TaskQueue& queue)
      : args_(args), queue_(queue), leads_(K.cluster == 1 || cluster_rank() == 0) {
    if (leads_) count_ = __ldcg(args.num_tasks) / K.cluster;
  }

  /// The first tasks go round without the counter.
  __device__ __forceinline__ void first() {
    number_ = static_cast<int32_t>(blockIdx.x) / K.cluster;
    publish();
  }

  /// Takes a number. It arrives while other work is done.
  __device__ __forceinline__ void request() {
    if (leads_) number_ = num_feeds() + atomicAdd(args_.next_task, 1);
    looked_ = false;
  }

  /// Loads the task of that number, likewise.
  __device__ __forceinline__ void look() {
    looked_ = true;
    if (!leads_) return;
    const auto* entries = reinterpret_cast<const int4*>(args_.tasks) + number_ * K.cluster;
    const bool more = number_ < count_;
#pragma unroll
    for (int i = 0; i < K.cluster; ++i) {
      task_[i] = more ? __ldcg(entries + i) : int4{kNoMoreTasks, 0, 0, 0};
    }
  }

  /// Hands the task to the readers.
  __device__ __forceinline__ void publish() {
    if (!looked_) look();
    uint64_t* full = &queue_.full[ring_.stage];
    TileTask* slot = &queue_.task[ring_.stage];
    if (leads_) {
      barrier_wait(&queue_.empty[ring_.stage], ring_.parity ^ 1);
      if constexpr (K.cluster == 2) {
        const int4 &a = task_[0], &b = task_[1];
        if (a.x == b.x && a.w == b.w && a.z > 0 && b.z > 0) {
          task_[0].w |= kSharedWeights;
          task_[1].w |= kSharedWeights;
        }
        store_to_second(slot, full, task_[1]);
      }
      *reinterpret_cast<int4*>(slot) = task_[0];
      barrier_arrive(full);
    } else {
      barrier_arrive_expect(full, sizeof(TileTask));
    }
    ring_.advance<kTaskSlots>();
  }

  /// After the end: the last feed of the launch leaves the counters as they were.
  __device__ __forceinline__ void finish() {
    if (!leads_) return;
    if (atomicAdd(args_.next_task + 1, 1) == num_feeds() - 1) {
      atomicExch(args_.next_task, 0);
      atomicExch(args_.next_task + 1, 0);
    }
  }

 private:
  static __device__ __forceinline__ int32_t num_feeds() {
    return static_cast<int32_t>(gridDim.x) / K.cluster;
  }
  /// Stores into the slot of the cluster's second block and counts the bytes on its barrier.
  static __device__ __forceinline__ void store_to_second(TileTask* slot, uint64_t* full,
                                                         const int4& v) {
    asm volatile(
        "{\n"
        ".reg .b32 to, barrier;\n"
        "mapa.shared::cluster.u32 to, %0, 1;\n"
        "mapa.shared::cluster.u32 barrier, %1, 1;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%2, %3, %4, %5}, "
        "[barrier];\n"
        "}" ::"r"(shared_address(slot)),
        "r"(shared_address(full)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
  }

  const Args& args_;
  TaskQueue& queue_;
  bool leads_, looked_ = false;
  int32_t count_ = 0, number_ = 0;
  int4 task_[K.cluster];
  RingPosition ring_;
};

}  // namespace moekit::kernels::sm90_grouped_gemm
