// Plan flags: the flags that decide how a layer is planned, the same for every verb that plans one.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <string>

#include "moekit/plan.h"
#include "moekit/problems.h"

namespace moekit::cli {

/// Values as the user typed them; options() turns them into what the library takes.
struct PlanFlags {
  std::string backend, prepare;
  std::string device = "auto";
  std::string arch;
  std::string activations = "checkpoint";
  int ranks = 1;
  std::string transport = "threads";
  int nodes = 0;  ///< 0: one, or over MPI the hosts
  int tp = 1;
  std::string placement;  ///< empty: linear
  int64_t slots_per_rank = 0;
  std::string combine = "slots";
  std::string combine_dtype;  ///< empty: f32, on a GPU bf16
  std::string wire = "auto";
  bool batch_invariant = false;
  std::string pack_cache;
  std::string capacity = "exact";
  std::string deadline = "30s";
  int threads = 0;
  uint64_t seed = 0;

  void add_to(CLI::App& verb);
  /// Everything but max_tokens; comm with ranks that are processes, which are joined here. Throws
  /// invalid_argument for values out of range and unsupported for what this build has no part for.
  PlanOptions options() const;
  /// What a SPEC decides holds unless a flag says otherwise.
  void apply_problem(const LayerProblem& problem, PlanOptions& options) const;

 private:
  void add_rank_flags(CLI::App& verb, const std::string& group);
};

/// "30s", "500ms", "2m", "1h"; a bare number counts seconds. Throws invalid_argument.
std::chrono::nanoseconds parse_duration(const std::string& text);

}  // namespace moekit::cli
