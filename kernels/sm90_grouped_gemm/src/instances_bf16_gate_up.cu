#include "kernels/sm90_grouped_gemm/src/kernel.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

std::span<const Instance> bf16_gate_up_instances() {
  static const Instance table[] = {
      instance<Knobs{.format = Format::bf16, .phase = Phase::gate_up, .cluster = 1}>(),
      instance<Knobs{.format = Format::bf16, .phase = Phase::gate_up, .cluster = 2}>(),
  };
  return table;
}

}  // namespace moekit::kernels::sm90_grouped_gemm
