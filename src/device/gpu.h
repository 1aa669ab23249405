// GpuTarget: the GPU that a plan is for: one of this machine, or one that only has a name.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "device/arch.h"

namespace moekit::device {

struct GpuTarget {
  std::optional<Arch> arch;  ///< none: no GPU is visible, and none was named
  bool in_build = false;     ///< the CUDA plug-in is here
  std::string missing;       ///< why not, and what to do
  std::string targets;       ///< that the kernels are compiled for
};

/// GPU `index` of this machine, or with `arch_name` ("90a") one that need not be here. Throws
/// invalid_argument for a name that no GPU has and for a GPU that is not among those here.
GpuTarget find_gpu(int index, std::string_view arch_name);

/// Whether code compiled for `targets` ("80,90a") runs on `arch`: an exact match for targets with
/// an `a`, the same major and no lower minor number for the others.
bool has_code_for(std::string_view targets, const Arch& arch);

/// What the kernels are compiled for unless MOEKIT_CUDA_ARCHITECTURES says otherwise.
inline constexpr std::string_view kUsualTargets = "80,90a,100a,120a";

}  // namespace moekit::device
