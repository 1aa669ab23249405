// JSON of reports about machines; that of plans and checkpoints is the library's own
// (moekit/describe.h).
#pragma once

#include <nlohmann/json.hpp>

#include "moekit/machine.h"
#include "moekit/plan.h"

namespace moekit::cli {

using OrderedJson = nlohmann::ordered_json;

/// doctor's object, also the first line of bench.
OrderedJson to_json(const MachineReport& report);
OrderedJson to_json(const ProbeResult& probe);
/// Knobs of the bucket that serves calls of `tokens`.
const PlanBucket* bucket_of(const PlanSummary& plan, int64_t tokens);

}  // namespace moekit::cli
