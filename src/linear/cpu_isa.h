// The ISA that members of the registries run on.
#pragma once

#include "base/cpu_features.h"

namespace moekit::linear {

/// chosen_cpu_isa(), asked once for the life of the process; throws as it does until it succeeds.
/// Plans ask first, so run() finds the answer there.
CpuIsa default_isa();

}  // namespace moekit::linear
