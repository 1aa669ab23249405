// Runs a synthetic layer through the public path (plan, pack, route, run) on any number of
// in-process ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moekit/tools.h"
#include "problem/spec.h"

namespace moekit::test {

/// A layer of `spec` with experts of unlike magnitude; the same for equal arguments.
LayerSource make_layer(const std::string& spec, uint64_t seed = 7);

/// Rows of a batch; `tokens` rows of the layer's hidden width.
std::vector<float> make_rows(const LayerSource& layer, int64_t tokens, uint64_t seed = 11);

/// Output [tokens, hidden] of a run over `num_ranks` ranks.
std::vector<float> run_layer(const LayerSource& layer, const PlanOptions& options, int num_ranks,
                             const std::vector<float>& rows);

/// Options with a back-end and a thread count, everything else at its default.
PlanOptions options_for(const std::string& backend, int num_threads = 2);

/// ||y - r|| / ||r|| of the worst row.
double worst_row(const std::vector<float>& y, const std::vector<float>& r, int64_t width);

}  // namespace moekit::test
