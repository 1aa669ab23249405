// What run and profile share: their flags, and the report of what a run was and what came out.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "json_writers.h"
#include "layer_flags.h"
#include "moekit/tools.h"
#include "plan_flags.h"

namespace moekit::cli {

struct RunFlags {
  std::string model, output;
  int layer = -1;
  int repeat = 1;
  std::string rebalance, save_placement;
  InputFlags input;
  PlanFlags plan;

  void add_to(CLI::App& verb);
  void add_placement_flags(CLI::App& verb);
};

/// What --rebalance did.
struct Rebalanced {
  std::string policy;  ///< empty: nothing
  double imbalance_before = 1.0;
  PlacementChange change;
};

/// What a run is called and what came out of it.
struct RunReport {
  const LayerSource& source;
  const PlanFlags& flags;
  const Explanation& explanation;
  const RankedOutputs& outputs;
  int64_t num_tokens;
  LoadStatistics load;
  Rebalanced rebalanced;
};

void print_report(const RunReport& report);
OrderedJson to_json(const RunReport& report);

}  // namespace moekit::cli
