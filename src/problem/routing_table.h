// RoutingTable: the router's result, one row of top_k slots a token.
#pragma once

#include <cstdint>

#include "problem/expert_id.h"

namespace moekit {

/// Views; [num_tokens, top_k], row-major.
struct RoutingTable {
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  const GlobalExpert* ids = nullptr;
  const float* weights = nullptr;
};

}  // namespace moekit
