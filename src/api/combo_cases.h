// The cases of run_combos: their dimensions and values, and the choice of which to run.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "api/covering.h"
#include "moekit/combos.h"

namespace moekit::api {

/// A case with everything that running it needs.
struct PlannedCombo {
  ComboCase combo;
  LayerProblem problem;
  PlanOptions options;  ///< prepare, backend and the varied flags set
};

/// Dimensions of a request, each with the values that it takes.
class ComboSpace {
 public:
  /// Throws invalid_argument for names that no member has.
  explicit ComboSpace(const ComboRequest& request);

  /// Calls `visit` for each case to run: a pairwise cover of cases that can be planned, with each
  /// refusal of two values once; or the whole product. Stops when it returns false.
  void visit(const std::function<bool(const PlannedCombo&, int64_t total)>& visit) const;

 private:
  enum Dimension {
    layer,
    weights,
    activations,
    load,
    wire,
    combine,
    dtype,
    placement,
    ranks,
    pair
  };
  static constexpr int kDimensions = pair + 1;

  struct Pair {
    std::string prepare, experts;
  };

  void set_pairs();
  PlannedCombo make(const Levels& levels) const;
  LayerProblem problem_of(const Levels& levels) const;
  /// Whether the case can be planned at all.
  bool accepts(const Levels& levels) const;
  void visit_cover(const std::function<bool(const PlannedCombo&, int64_t)>& visit) const;
  void visit_product(const std::function<bool(const PlannedCombo&, int64_t)>& visit) const;
  const std::string& text(Dimension d, const Levels& levels) const {
    return values_[d][static_cast<size_t>(levels[d])];
  }

  const ComboRequest& request_;
  std::vector<std::string> values_[kDimensions];
  std::vector<Pair> pairs_;
};

/// The answer of the planner for the case's pair, from shapes alone.
PairAnswer answer_of(const PlannedCombo& planned);

}  // namespace moekit::api
