// Problems by name or by their values ("qwen3-30b-a3b:weights=fp8_block,tokens=512"): layers that
// no checkpoint holds, for planning and timing.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moekit/config.h"
#include "moekit/export.h"
#include "moekit/tools.h"

namespace moekit {

/// A parsed SPEC.
struct LayerProblem {
  std::string name;     ///< of the model that the values came from, or empty
  MoeConfig config;     ///< activation schemes included
  int64_t tokens = 16;  ///< of one rank
  std::string routing = "uniform";
  std::string placement = "linear";
};

/// Throws invalid_argument naming the key that does not fit.
MOEKIT_API LayerProblem parse_problem(const std::string& spec);

/// All of a problem as a SPEC that parse_problem takes back, weights= always spelled out.
MOEKIT_API std::string spec_of(const LayerProblem& problem);

/// Known names, each with all its values as a SPEC.
MOEKIT_API std::vector<std::pair<std::string, std::string>> list_problems();

/// What each key of a SPEC takes, a line a key.
MOEKIT_API std::string describe_problem_keys();

/// Shapes and schemes only: enough to plan, no memory for weights.
MOEKIT_API LayerSource hollow_source(const LayerProblem& problem);

/// With random weights of the problem's formats, the same on every machine.
MOEKIT_API LayerSource synthetic_source(const LayerProblem& problem, uint64_t seed,
                                        int num_threads);

}  // namespace moekit
