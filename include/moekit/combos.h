// Combinations: every prepare member with every experts member, over formats, placements, loads and
// ranks, each case held to the single-rank reference. What `moekit combos` runs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moekit/export.h"
#include "moekit/plan.h"
#include "moekit/problems.h"

namespace moekit {

/// What is fixed does not vary; what is not fixed takes every value of its dimension.
struct ComboRequest {
  std::string prepare, experts;         ///< a member by name; empty: every one
  std::optional<LayerProblem> problem;  ///< layer, formats, load and placement of every case
  std::optional<int> ranks;
  std::optional<Wire> wire;
  std::optional<Combine> combine;
  std::optional<DType> combine_dtype;
  std::optional<std::string> placement;
  std::optional<int64_t> tokens_total;  ///< with problem: of all ranks together, instead of its
                                        ///< tokens a rank
  PlanOptions options;                  ///< everything else of the plans
  bool full = false;                    ///< the whole product instead of a pairwise cover
  bool stop_on_failure = false;
  uint64_t seed = 0;  ///< of weights, inputs and the choice of cases
};

/// One case, enough to run it again: `problem` is a SPEC, `flags` are plan flags as text.
struct ComboCase {
  std::string prepare, experts;
  std::string problem;
  std::string flags;
  int ranks = 1;
  int64_t tokens_total = 0;
};

enum class ComboVerdict : uint8_t { passed, refused, failed };
MOEKIT_API const char* to_string(ComboVerdict verdict);

struct ComboResult {
  ComboCase combo;
  ComboVerdict verdict = ComboVerdict::passed;
  std::vector<std::string> reasons;  ///< why it was refused, or what did not hold
  double rel_rms = 0;                ///< of the whole output against the reference on one rank
  double worst_row_rms = 0;
  double bound = 0;        ///< of worst_row_rms, derived from formats and sizes
  bool same_bits = false;  ///< as the same experts member with a local prepare on one rank; combine
                           ///< slots demands it of whole experts (tp = 1)
};

struct ComboTotals {
  int64_t passed = 0, refused = 0, failed = 0;
};

/// Runs the cases one after the other and reports each. A case fails when its output leaves the
/// bound, when its bits differ where they may not, or when it throws anything but `unsupported`.
/// `progress(done, total)` is called between cases. Throws invalid_argument for a name that no
/// member has and for a capacity other than exact.
MOEKIT_API ComboTotals run_combos(const ComboRequest& request,
                                  const std::function<void(const ComboResult&)>& report,
                                  const std::function<void(int64_t, int64_t)>& progress = {});

}  // namespace moekit
