// The instances: one line each. Adding a tile is adding a line here and to the file of its format.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/sm90_grouped_gemm/src/kernel_args.h"
#include "kernels/sm90_grouped_gemm/src/knobs.h"

namespace moekit::kernels::sm90_grouped_gemm {

struct Instance {
  Knobs knobs;
  const void* kernel;
  int32_t shared_bytes;
};

// A file a row of these, so that they compile side by side. Four stages of 48 KiB and 32 KiB of
// staging fill the 227 KiB that a block may have.
std::span<const Instance> bf16_gate_up_instances();
std::span<const Instance> bf16_up_instances();
std::span<const Instance> bf16_down_instances();
std::span<const Instance> fp8_gate_up_instances();
std::span<const Instance> fp8_down_instances();
// Weights in panels: gate_up and down.
std::span<const Instance> mxfp4_instances();
std::span<const Instance> nvfp4_instances();
std::span<const Instance> mxfp8_instances();

}  // namespace moekit::kernels::sm90_grouped_gemm
