#include "kernels/sm90_grouped_gemm/src/kernel.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

std::span<const Instance> fp8_gate_up_instances() {
  static const Instance table[] = {
      instance<Knobs{.format = Format::fp8_block, .phase = Phase::gate_up}>(),
      instance<Knobs{
          .format = Format::fp8_block, .phase = Phase::gate_up, .cluster = 2, .gather = false}>(),
  };
  return table;
}

}  // namespace moekit::kernels::sm90_grouped_gemm
