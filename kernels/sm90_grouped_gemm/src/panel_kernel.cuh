// The kernel for weights in panels: roles as in kernel.cuh.
#pragma once

#include "kernels/sm90_grouped_gemm/src/instances.h"
#include "kernels/sm90_grouped_gemm/src/panel_consumer.cuh"
#include "kernels/sm90_grouped_gemm/src/panel_producer.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

// 168 for each of the block's 384 threads, handed around: see kernel.cuh.
inline constexpr int kPanelProducerRegisters = 40;
inline constexpr int kPanelConsumerRegisters = 232;
static_assert(kPanelProducerRegisters + kConsumerGroups * kPanelConsumerRegisters <=
              168 * (kConsumerGroups + 1));

template <typename Tuning>
__global__ void __launch_bounds__(kThreads, 1)
    panel_gemm(const __grid_constant__ KernelArgs kernel) {
  constexpr Knobs K = Tuning::knobs;
  extern __shared__ uint8_t dynamic[];
  PanelStorage<K>& shared = panel_storage<K>(dynamic);
  const Args& args = kernel.args;
  const int group = threadIdx.x / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup;
  if (threadIdx.x == 0) {
    for (int s = 0; s < K.stages; ++s) {
      barrier_init(&shared.full[s], 1 + kWarpgroup);
      barrier_init(&shared.empty[s], kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_predecessor();
  release_dependents();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kPanelProducerRegisters));
    produce_panels<K>(kernel, shared, thread);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kPanelConsumerRegisters));
    consume_panels<K>(args, shared, group - 1, thread);
  }
}

/// Tuning::knobs is the instance, as in kernel.cuh.
template <Knobs K>
struct PanelTuning {
  static constexpr Knobs knobs = K;
};

/// One line of an instance table. Instances of `down` serve `up` too.
template <Knobs K>
Instance panel_instance() {
  static_assert(sizeof(PanelStorage<K>) + 1024 <= 227 * 1024);
  return {K, reinterpret_cast<const void*>(&panel_gemm<PanelTuning<K>>),
          static_cast<int32_t>(sizeof(PanelStorage<K>)) + 1024};
}

}  // namespace moekit::kernels::sm90_grouped_gemm
