#include "kernels/sm90_grouped_gemm/src/panel_kernel.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

std::span<const Instance> mxfp8_instances() {
  static const Instance table[] = {
      panel_instance<Knobs{.format = Format::mxfp8, .phase = Phase::gate_up, .stages = 3}>(),
      panel_instance<Knobs{.format = Format::mxfp8, .phase = Phase::down, .stages = 3}>(),
      panel_instance<Knobs{
          .format = Format::mxfp8, .phase = Phase::gate_up, .stages = 3, .cluster = 2}>(),
      panel_instance<Knobs{
          .format = Format::mxfp8, .phase = Phase::down, .stages = 3, .cluster = 2}>(),
  };
  return table;
}

}  // namespace moekit::kernels::sm90_grouped_gemm
