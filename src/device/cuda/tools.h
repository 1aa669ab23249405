// GpuTools over the CUDA runtime.
#pragma once

#include "device/gpu_tools.h"

namespace moekit::device {

const GpuTools& cuda_tools();

}  // namespace moekit::device
