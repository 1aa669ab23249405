// The members of the registry, one file each.
#pragma once

#include "prepare/prepare_finalize.h"

namespace moekit::prepare {

const PrepareFinalize& local_member();
const PrepareFinalize& local_batched_member();
const PrepareFinalize& allgather_member();
const PrepareFinalize& all2all_member();
const PrepareFinalize& all2all_batched_member();
const PrepareFinalize& hierarchical_member();
const PrepareFinalize& push_member();
const PrepareFinalize& low_latency_member();

}  // namespace moekit::prepare
