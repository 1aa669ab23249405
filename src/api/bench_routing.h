// Routings for timing: a named pattern of the SPEC grammar, or a file of expert ids.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/synthetic.h"

namespace moekit::api {

struct RoutingShape {
  int64_t num_tokens = 0;  ///< of all ranks
  int64_t top_k = 0;
  int64_t num_experts = 0;
  std::vector<int32_t> first_rank_experts;  ///< of rank 0: where one_rank sends everything
};

/// Whether `name` is a pattern of the SPEC grammar (a single word, with a number after a colon at
/// most); everything else names a file.
bool is_pattern(const std::string& name);

/// `count` calls' worth of routing, each of its own tokens; a file gives one, whose rows repeat
/// when there are fewer than tokens. Throws invalid_argument for a name that is neither a pattern
/// nor a file, and for ids that do not fit.
std::vector<engine::SyntheticRouting> make_routings(const std::string& name,
                                                    const RoutingShape& shape, uint64_t seed,
                                                    int count);

/// Experts that some row names.
int64_t count_active(const std::vector<int32_t>& ids, int64_t num_experts);

}  // namespace moekit::api
