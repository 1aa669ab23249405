// The reference experts: the exact quantization chain in plain loops, the definition that every
// other member is held to.
#pragma once

#include "experts/experts.h"

namespace moekit::experts {

/// fp32 products and sums, Standard rows. Reads canonical weights in place.
const Experts& ref_experts();
/// The same chain with products, sums and activation function in fp64.
const Experts& ref64_experts();
/// fp32, Batched rows.
const Experts& ref_batched_experts();

}  // namespace moekit::experts
