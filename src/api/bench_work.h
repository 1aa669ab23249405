// What a timed call of a layer reads and computes.
#pragma once

#include <cstdint>
#include <vector>

#include "moekit/bench.h"

namespace moekit::api {

/// Bytes of a stored [rows, cols] matrix: codes and scales.
int64_t matrix_bytes(const WeightScheme& scheme, int64_t rows, int64_t cols);
/// Of one routed expert.
int64_t expert_bytes(const MoeConfig& config);
/// Of the routed experts' products, for one (token, slot) pair.
double flops_per_slot(const MoeConfig& config);

/// The layer to time: without its shared experts unless they are wanted.
LayerSource timed_source(const BenchRequest& request);

/// What a rotation through routings touches, as means over its variants.
struct Touched {
  double active = 0;        ///< distinct experts of a call
  double slots = 0;         ///< (token, slot) pairs with an expert
  int64_t in_rotation = 0;  ///< distinct experts of all variants
};

/// Of each variant the expert ids, below 0 where a slot has none.
Touched count_touched(const std::vector<std::vector<int32_t>>& all, int64_t num_experts);

}  // namespace moekit::api
