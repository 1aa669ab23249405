// A plan, its explanation and the contents of a checkpoint as JSON text: what the program prints
// and the C ABI returns. Keys keep their name and meaning; new ones may be added.
#pragma once

#include <string>
#include <string_view>

#include "moekit/checkpoint.h"
#include "moekit/config.h"
#include "moekit/export.h"
#include "moekit/plan.h"

namespace moekit {

/// bytes, duties, buckets of a chosen plan.
MOEKIT_API std::string plan_json(const PlanSummary& plan);
/// `chosen` and `plan` are null when nothing could be chosen.
MOEKIT_API std::string explanation_json(const MoeConfig& config, const Explanation& explanation);
/// Lists the tensors when `info` has them.
MOEKIT_API std::string checkpoint_json(const CheckpointInfo& info);

/// `text` for a terminal: control characters and bytes that are no UTF-8 are written as \xNN, line
/// breaks as \n, tabs as \t. Names in a stranger's file may hold any of them.
MOEKIT_API std::string printable(std::string_view text);

}  // namespace moekit
