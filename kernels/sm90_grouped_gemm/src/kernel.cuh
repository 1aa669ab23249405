// The kernel: carves shared memory, makes barriers, and lets each warpgroup take its role.
#pragma once

#include "kernels/sm90_grouped_gemm/src/epilogue.cuh"
#include "kernels/sm90_grouped_gemm/src/instances.h"
#include "kernels/sm90_grouped_gemm/src/producer.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

// Registers a thread. A block starts with 168 for each of its 384 threads (65536 / 384, rounded
// down to a multiple of 8) and can only hand those around: asking for one more waits for ever.
// fp8's two sets of sums take more than bf16's one.
constexpr int consumer_registers(Knobs k) {
  return k.format == Format::fp8_block && !k.gathers() ? 232 : 224;
}
constexpr int producer_registers(Knobs k) {
  return 168 * (kConsumerGroups + 1) - kConsumerGroups * consumer_registers(k);
}

/// Where a thread's scales of a task are, the first ones under way.
template <Knobs K>
__device__ __forceinline__ ScaleCursor start_scales(const Args& args, const TileTask& task,
                                                    int group, int warp, int lane) {
  constexpr int64_t kScaleBytes = sizeof(float);
  ScaleCursor cursor;
  const bool half = task.num_rows <= 64;
  const int32_t first = (half ? 0 : group * 64) + warp * 16 + lane / 4;
  const int32_t blocks = (args.shape.columns + 127) / 128;
  const int64_t weights = task.expert * args.weights.scale_expert;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t r = first + 8 * i < task.num_rows ? first + 8 * i : task.num_rows - 1;
    int64_t row = task.first_row + r;
    if constexpr (K.gathers()) row = __ldg(args.row_index + row);
    cursor.row[i] = static_cast<uint32_t>(row * args.row_scale_stride * kScaleBytes);
    if constexpr (K.gated()) {
      cursor.weight[i] = static_cast<uint32_t>(
          (weights + i * args.weights.scale_half + task.n_block * args.weights.scale_row) *
          kScaleBytes);
    } else {
      const int32_t block = task.n_block * 2 + (half ? group : i);
      cursor.weight[i] = static_cast<uint32_t>(
          (weights + (block < blocks ? block : blocks - 1) * args.weights.scale_row) * kScaleBytes);
    }
  }
  cursor.fetch(args, 0);
  return cursor;
}

/// One consumer warp's way through its tasks. The next task is taken before the present one's sums
/// are finished, so that its first scales, cold as they may be, arrive meanwhile.
template <Knobs K>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Args& args, SharedStorage<K>& shared, int group,
                                      int thread)
      : args_(args),
        shared_(shared),
        reader_(shared.tasks),
        steps_((args.shape.depth * K.element_bytes() + 127) / 128),
        group_(group),
        warp_(thread / 32),
        lane_(thread % 32) {}

  __device__ __forceinline__ void run() {
    take();
    while (more_) {
      if (task_.num_rows == 0) {
        if constexpr (K.cluster > 1) skip_task<K>(shared_, ring_, steps_, lane_);
        take();
      } else if (task_.num_rows > 64) {
        consume<false>();
      } else {
        consume<true>();
      }
    }
  }

 private:
  __device__ __forceinline__ void take() {
    more_ = reader_.take(task_);
    if constexpr (K.format == Format::fp8_block) {
      if (more_ && task_.num_rows > 0) {
        scales_ = start_scales<K>(args_, task_, group_, warp_, lane_);
      }
    }
  }

  /// The task; kHalf: see mainloop.cuh. Takes the next one.
  template <bool kHalf>
  __device__ __forceinline__ void consume() {
    constexpr int kBlocks = kHalf ? 1 : 2;
    WarpRows rows;
    rows.find(args_, task_, kHalf, group_, warp_, lane_);
    Sums sums;
    if constexpr (K.format == Format::bf16) {
      multiply_bf16<K, kHalf>(shared_, ring_, steps_, group_, lane_, sums);
    } else {
      multiply_fp8<K, kHalf>(args_, shared_, ring_, steps_, group_, lane_, scales_, sums);
    }
    const TileTask task = task_;
    take();
    uint8_t* staging = shared_.out[group_ * 4 + warp_];
    const int column = task.n_block * K.tile().columns + (kHalf ? group_ * K.box_rows() : 0);
    if constexpr (K.gated() && K.format == Format::fp8_block) {
      finish_gated_fp8<kBlocks>(args_, task, rows, column, group_, warp_, staging, shared_.amax,
                                lane_, sums);
    } else if constexpr (K.gated()) {
      finish_gated_bf16<kBlocks>(args_, task, rows, column, staging, lane_, sums);
    } else {
      finish_plain_bf16<kBlocks, K.phase == Phase::up>(args_, task, rows, column, staging, lane_,
                                                       sums);
    }
  }

  const Args& args_;
  SharedStorage<K>& shared_;
  TaskReader<K> reader_;
  TileTask task_;
  ScaleCursor scales_;
  RingPosition ring_;
  const int32_t steps_;
  const int group_, warp_, lane_;
  bool more_ = false;
};

/// Tuning::knobs is the instance. (The entry takes a type because the host compiler's half of nvcc
/// 13.0 does not find a namespaced class-type argument of a kernel.)
template <typename Tuning>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm(const __grid_constant__ KernelArgs args) {
  constexpr Knobs K = Tuning::knobs;
  extern __shared__ uint8_t dynamic[];
  SharedStorage<K>& shared = shared_storage<K>(dynamic);
  const int group = threadIdx.x / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&args.weights);
    if constexpr (!K.gathers()) prefetch_tensor_map(&args.rows);
    for (int s = 0; s < K.stages; ++s) {
      barrier_init(&shared.full[s], full_arrivals<K>());
      barrier_init(&shared.empty[s], kConsumerWarps * K.cluster);
    }
    shared.tasks.init<K>(kConsumerWarps + (K.gathers() ? 4 : 1));
    fence_barrier_init();
  }
  if constexpr (K.cluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  if (!K.starts_early() || group > 0) {
    wait_for_predecessor();
    release_dependents();
  }
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(producer_registers(K)));
    if (K.gathers() || thread == 0) produce<K>(args, shared, thread);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(consumer_registers(K)));
    Consumer<K>(args.args, shared, group - 1, thread).run();
  }
  // The partner's last arrivals must find this block alive.
  if constexpr (K.cluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}

template <Knobs K>
struct Tuning {
  static constexpr Knobs knobs = K;
};

/// One line of an instance table.
template <Knobs K>
Instance instance() {
  return {K, reinterpret_cast<const void*>(&grouped_gemm<Tuning<K>>), shared_bytes<K>()};
}

}  // namespace moekit::kernels::sm90_grouped_gemm
