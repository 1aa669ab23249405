// The kernel for weights in panels: roles as in kernel.cuh. With a cluster two blocks take the same
// rows and neighbouring columns, and go through stages together: what one loads for both needs room
// in both.
#pragma once

#include "kernels/sm90_grouped_gemm/src/instances.h"
#include "kernels/sm90_grouped_gemm/src/panel_consumer.cuh"
#include "kernels/sm90_grouped_gemm/src/panel_producer.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

constexpr int panel_threads(Knobs k) { return (k.groups + 1) * kWarpgroup; }
// Registers of a thread, handed around: see kernel.cuh.
inline constexpr int kPanelProducerRegisters = 40;
constexpr int panel_consumer_registers(Knobs k) { return k.groups == 4 ? 104 : 232; }
constexpr bool panel_registers_fit(Knobs k) {
  return kPanelProducerRegisters + k.groups * panel_consumer_registers(k) <=
         65536 / panel_threads(k) / 8 * 8 * (k.groups + 1);
}

template <typename Tuning>
__global__ void __launch_bounds__(panel_threads(Tuning::knobs), 1)
    panel_gemm(const __grid_constant__ KernelArgs kernel) {
  constexpr Knobs K = Tuning::knobs;
  static_assert(panel_registers_fit(K),
                "setmaxnreg would wait for registers that the block does not have");
  extern __shared__ uint8_t dynamic[];
  PanelStorage<K>& shared = panel_storage<K>(dynamic);
  const Args& args = kernel.args;
  const int group = threadIdx.x / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup;
  if (threadIdx.x == 0) {
    for (int s = 0; s < K.stages; ++s) {
      barrier_init(&shared.full[s], 1 + kWarpgroup);
      barrier_init(&shared.empty[s], K.groups * 4 * K.cluster);
    }
    fence_barrier_init();
  }
  if constexpr (K.cluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  // `up` takes an instance of `down`; the tasks come from its predecessor.
  const bool early = K.starts_early() && args.shape.phase == Phase::down;
  if (!early || group > 0) {
    wait_for_predecessor();
    release_dependents();
  }
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kPanelProducerRegisters));
    produce_panels<K>(kernel, shared, thread, early);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(panel_consumer_registers(K)));
    consume_panels<K>(args, shared, group - 1, thread);
  }
  // The partner's last arrivals must find this block alive.
  if constexpr (K.cluster > 1) {
    __syncwarp();
    cluster_sync();
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
