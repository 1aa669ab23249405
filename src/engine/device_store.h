// Weights of a plan's experts on their way to a device.
#pragma once

#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "device/cuda_plugin.h"
#include "engine/plan.h"
#include "moekit/allocator.h"

namespace moekit::engine {

/// The plan's local experts in `copies` places of the device's memory, each packed once, into host
/// memory of `allocator`. Throws out_of_memory, cuda.
std::vector<std::unique_ptr<device::DeviceExperts>> upload_experts(const CanonicalLayer& layer,
                                                                   const Plan& plan, int copies,
                                                                   ThreadPool& threads,
                                                                   Allocator* allocator);

}  // namespace moekit::engine
