// Doctor's looks at the machine, one function each. Every look is guarded by its caller: files that
// are not there, libraries that do not load and drivers that refuse leave their part of the report
// empty.
#pragma once

#include "moekit/machine.h"

namespace moekit::api {

CpuReport look_at_cpu();
MemoryReport look_at_memory();

/// GPUs through the driver's own library, opened on demand; fills gpus, driver and cuda_driver_api.
void look_at_gpus(MachineReport& report);

/// Toolkit, NCCL and MPI, wherever the loader or the usual places find them.
void look_at_components(MachineReport& report);

/// What is not there and what that costs, derived from the rest of the report.
void judge(MachineReport& report);

}  // namespace moekit::api
