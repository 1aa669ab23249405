#include "kernels/sm90_grouped_gemm/src/panel_kernel.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

std::span<const Instance> mxfp4_instances() {
  static const Instance table[] = {
      panel_instance<Knobs{.format = Format::mxfp4, .phase = Phase::gate_up, .stages = 4}>(),
      panel_instance<Knobs{.format = Format::mxfp4, .phase = Phase::down, .stages = 4}>(),
      panel_instance<Knobs{.format = Format::mxfp4, .phase = Phase::gate_up, .groups = 4}>(),
      panel_instance<Knobs{.format = Format::mxfp4, .phase = Phase::down, .groups = 4}>(),
      panel_instance<Knobs{.format = Format::mxfp4, .phase = Phase::gate_up, .cluster = 2}>(),
      panel_instance<Knobs{.format = Format::mxfp4, .phase = Phase::down, .cluster = 2}>(),
  };
  return table;
}

}  // namespace moekit::kernels::sm90_grouped_gemm
