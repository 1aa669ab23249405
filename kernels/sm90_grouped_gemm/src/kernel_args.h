// What the kernels take: Args with its TMA descriptors made.
#pragma once

#include <cuda.h>

#include "kernels/sm90_grouped_gemm/api.h"

namespace moekit::kernels::sm90_grouped_gemm {

struct KernelArgs {
  CUtensorMap weights;
  CUtensorMap rows;  ///< where rows are not gathered
  Args args;
};

}  // namespace moekit::kernels::sm90_grouped_gemm
