#include "kernels/sm90_grouped_gemm/src/kernel.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

std::span<const Instance> bf16_up_instances() {
  static const Instance table[] = {
      instance<Knobs{.format = Format::bf16, .phase = Phase::up, .cluster = 1}>(),
  };
  return table;
}

}  // namespace moekit::kernels::sm90_grouped_gemm
