// run_combos: runs the cases and judges them.
#include "moekit/combos.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "api/bench_routing.h"
#include "api/combo_cases.h"
#include "base/check.h"
#include "engine/plan.h"
#include "moekit/communicator.h"
#include "problem/error_bound.h"

namespace moekit {
namespace {

using api::PlannedCombo;

/// Problem as rank 0 of the case sees it.
Problem resolved(const LayerSource& source, const PlannedCombo& planned) {
  PlanOptions options = planned.options;
  options.max_tokens = 1;
  std::vector<CommunicatorHandle> ends;
  if (planned.combo.ranks > 1 && options.comm.impl == nullptr) {
    ends = make_thread_ranks(planned.combo.ranks, options.deadline, options.num_nodes);
    options.comm = ends.front();
  }
  return engine::make_problem(*source.canonical, options);
}

/// Bound of the worst row against one rank. Where each of n ranks returns a partial sum as bf16, a
/// row is rounded n times instead of once: each rounding moves its sum by half a step, 2^-8 of the
/// sum's size, at most. Partial sums of independent experts add up like their squares, so together
/// they are about as large as the row; twice that is allowed for rows in which they cancel.
double bound_of(const Problem& problem) {
  const double bound = row_error_bound(problem.config, problem.combine_dtype);
  const int64_t partials = std::min<int64_t>(problem.config.top_k, problem.num_ranks);
  if (problem.combine != Combine::rank_sums || problem.combine_dtype != DType::bf16 ||
      partials < 2) {
    return bound;
  }
  constexpr double kRounding = 0x1p-8 * (1.0 + 2.0);
  return std::sqrt(bound * bound + kRounding * kRounding);
}

class Runner {
 public:
  explicit Runner(const ComboRequest& request) : request_(request) {}

  ComboResult run(const PlannedCombo& planned) {
    ComboResult result;
    result.combo = planned.combo;
    try {
      const PairAnswer answer = api::answer_of(planned);
      if (!answer.supported) {
        result.verdict = ComboVerdict::refused;
        result.reasons = answer.reasons;
        return result;
      }
      judge(planned, result);
    } catch (const Error& e) {
      // Ranks that are processes share one group: once it is lost no further case can run.
      const bool lost = e.code() == ErrorCode::comm || e.code() == ErrorCode::timeout;
      if (lost && request_.options.comm.impl != nullptr) throw;
      result.verdict =
          e.code() == ErrorCode::unsupported ? ComboVerdict::refused : ComboVerdict::failed;
      result.reasons.push_back(fmt::format("{}: {}", to_string(e.code()), e.what()));
    } catch (const std::exception& e) {
      result.verdict = ComboVerdict::failed;
      result.reasons.push_back(fmt::format("internal: {}", e.what()));
    }
    return result;
  }

 private:
  void judge(const PlannedCombo& planned, ComboResult& result) {
    set_source(planned.problem);
    const Problem problem = resolved(source_, planned);
    set_inputs(planned, problem);
    set_reference(planned);
    const std::vector<float> output = output_of(planned.options, planned.combo.ranks);
    const int64_t tokens = planned.combo.tokens_total, width = source_.config.hidden;
    const Errors errors = compare(output.data(), reference_.data(), tokens, width);
    result.rel_rms = errors.rel_rms;
    result.worst_row_rms = errors.worst_row_rms;
    result.bound = bound_of(problem);
    if (errors.nonfinite_mismatches > 0) {
      result.reasons.push_back(fmt::format(
          "{} values are finite in one of output and reference only", errors.nonfinite_mismatches));
    }
    if (!(errors.worst_row_rms <= result.bound)) {
      result.reasons.push_back(fmt::format("row {} is {:.3g} from the reference, {:.3g} is allowed",
                                           errors.worst_row, errors.worst_row_rms, result.bound));
    }
    compare_bits(planned, output, result);
    if (!result.reasons.empty()) result.verdict = ComboVerdict::failed;
  }

  /// The same experts on one rank: with combine=slots, who serves a row never changes its bits
  /// (slices of an expert add up in an order of their own).
  void compare_bits(const PlannedCombo& planned, const std::vector<float>& output,
                    ComboResult& result) const {
    const std::vector<float> alone = output_of(on_one_rank(planned.options, ""), 1);
    const auto row_bytes = static_cast<size_t>(source_.config.hidden) * sizeof(float);
    const auto width = static_cast<size_t>(source_.config.hidden);
    for (size_t row = 0; row * width < output.size(); ++row) {
      if (std::memcmp(&output[row * width], &alone[row * width], row_bytes) == 0) continue;
      if (planned.options.combine == Combine::slots && planned.options.tp == 1) {
        result.reasons.push_back(fmt::format("row {} has other bits than with {} on one rank", row,
                                             planned.options.backend));
      }
      return;
    }
    result.same_bits = true;
  }

  static PlanOptions on_one_rank(PlanOptions options, const std::string& prepare) {
    options.prepare = prepare;
    options.placement = "linear";
    options.num_nodes = options.tp = 1;
    options.comm = {};
    return options;
  }

  void set_source(const LayerProblem& problem) {
    LayerProblem weights = problem;  // which do not depend on the load
    weights.tokens = 0;
    weights.routing = "uniform";
    weights.placement = "linear";
    const std::string key = spec_of(weights);
    if (key == source_key_) return;
    source_ = synthetic_source(problem, request_.seed, 1);
    source_key_ = key;
    reference_key_.clear();
  }

  void set_inputs(const PlannedCombo& planned, const Problem& problem) {
    const MoeConfig& config = source_.config;
    const int64_t tokens = planned.combo.tokens_total;
    hidden_ = random_hidden(tokens, config.hidden, request_.seed);
    routing_ = {};
    if (planned.problem.routing == "uniform") return;  // the layer's own router chooses
    const api::RoutingShape shape{tokens, config.top_k, config.num_experts,
                                  problem.placement->experts_of(0)};
    routing_ = api::make_routings(planned.problem.routing, shape, request_.seed, 1).front();
  }

  /// ref on one rank with the same wire and combine, kept while only the pair changes.
  void set_reference(const PlannedCombo& planned) {
    PlanOptions options = on_one_rank(planned.options, "local");
    options.backend = "ref";
    const std::string ids(reinterpret_cast<const char*>(routing_.ids.data()),
                          routing_.ids.size() * sizeof(int32_t));
    const std::string key =
        fmt::format("{} {} {} {} {}", planned.combo.tokens_total, static_cast<int>(options.wire),
                    static_cast<int>(options.combine), to_string(options.combine_dtype), ids);
    if (key == reference_key_) return;
    reference_ = output_of(options, 1);
    reference_key_ = key;
  }

  std::vector<float> output_of(const PlanOptions& options, int num_ranks) const {
    const int64_t tokens = hidden_.view.shape[0];
    const int64_t top_k = source_.config.top_k;
    RankedInputs inputs;
    inputs.hidden = hidden_.view;
    if (!routing_.ids.empty()) {
      inputs.topk_ids = TensorView::contiguous(routing_.ids.data(), DType::i32, {tokens, top_k});
      inputs.topk_weights =
          TensorView::contiguous(routing_.weights.data(), DType::f32, {tokens, top_k});
    }
    const RankedLayer layer(source_, options, num_ranks, tokens);
    RankedOutputs outputs;
    layer.run(inputs, outputs, RunOptions{.want_routing = false});
    return std::move(outputs.output);
  }

  const ComboRequest& request_;
  LayerSource source_;
  std::string source_key_, reference_key_;
  OwnedTensor hidden_;
  engine::SyntheticRouting routing_;
  std::vector<float> reference_;
};

}  // namespace

const char* to_string(ComboVerdict verdict) {
  switch (verdict) {
    case ComboVerdict::passed: return "passed";
    case ComboVerdict::refused: return "refused";
    case ComboVerdict::failed: return "failed";
  }
  return "?";
}

ComboTotals run_combos(const ComboRequest& request,
                       const std::function<void(const ComboResult&)>& report,
                       const std::function<void(int64_t, int64_t)>& progress) {
  MOEKIT_CHECK(request.options.capacity == CapacityMode::exact,
               "combos compares whole outputs: leave --capacity at exact");
  MOEKIT_CHECK(!request.tokens_total || request.problem.has_value(),
               "--tokens-total belongs to one case: give its --problem too");
  const api::ComboSpace space(request);
  Runner runner(request);
  ComboTotals totals;
  int64_t done = 0;
  space.visit([&](const PlannedCombo& planned, int64_t total) {
    if (progress) progress(done, total);
    const ComboResult result = runner.run(planned);
    ++done;
    switch (result.verdict) {
      case ComboVerdict::passed: ++totals.passed; break;
      case ComboVerdict::refused: ++totals.refused; break;
      case ComboVerdict::failed: ++totals.failed; break;
    }
    report(result);
    return result.verdict != ComboVerdict::failed || !request.stop_on_failure;
  });
  return totals;
}

}  // namespace moekit
