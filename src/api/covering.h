// Covering arrays: few cases of many dimensions in which every two values of two dimensions meet.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace moekit::api {

/// A value of each dimension.
using Levels = std::vector<int>;

/// Greedy pairwise cover of `sizes` (values of each dimension, 1 or more each). `accepts` says
/// whether a case can run: pairs are looked for in cases that can; a pair for which none is found
/// in some tries comes once, in a case that cannot. Deterministic for equal arguments.
std::vector<Levels> cover_pairs(const std::vector<int>& sizes, uint64_t seed,
                                const std::function<bool(const Levels&)>& accepts);

}  // namespace moekit::api
