#include "kernels/sm90_grouped_gemm/src/kernel.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

std::span<const Instance> bf16_down_instances() {
  static const Instance table[] = {
      instance<Knobs{.format = Format::bf16, .phase = Phase::down, .cluster = 1}>(),
      instance<Knobs{.format = Format::bf16, .phase = Phase::down, .cluster = 2}>(),
  };
  return table;
}

}  // namespace moekit::kernels::sm90_grouped_gemm
