#include "engine/plan.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace moekit::engine {
namespace {

const char* name_of(RowOrder order) {
  switch (order) {
    case RowOrder::gate_up: return "gate_up";
    case RowOrder::up_gate: return "up_gate";
    case RowOrder::interleaved: return "interleaved";
    case RowOrder::panels: return "panels";
    case RowOrder::not_gated: return "not_gated";
  }
  return "?";
}

/// Decode, small batches, prefill: powers of eight up to the capacity.
std::vector<int64_t> ladder(int64_t max_tokens) {
  std::vector<int64_t> steps;
  for (int64_t step = 1; step < max_tokens; step *= 8) steps.push_back(step);
  steps.push_back(max_tokens);
  return steps;
}

int64_t expert_out_rows(const Plan& plan, const Problem& problem, const prepare::Traits& prepare) {
  if (prepare.rows == RowsLayout::batched) {
    return checked_mul(prepare.max_rows, problem.num_local_experts(), "batched rows");
  }
  if (plan.choice.reduce_duty.summer == Summer::experts) return prepare.max_rows;
  return checked_mul(prepare.max_rows, plan.problem.config.top_k, "slot rows");
}

/// What memory must suffice for: the problem itself, or one where every rank has all its slots
/// full. Sizes only grow with the experts of a rank.
Problem largest_problem(const Problem& problem) {
  Problem largest = problem;
  if (problem.slots_per_rank > 0) {
    largest.placement = std::make_shared<const ExpertPlacement>(ExpertPlacement::fullest(
        problem.config.num_experts, problem.num_ranks, problem.slots_per_rank));
  }
  return largest;
}

/// The layout that memory must suffice for: of the rank's experts, or of all where they may change.
WeightLayout largest_layout(const CanonicalLayer& layer, const Plan& plan) {
  if (plan.problem.slots_per_rank == 0) return plan.layout;
  std::vector<int32_t> all(static_cast<size_t>(plan.problem.config.num_experts));
  std::iota(all.begin(), all.end(), 0);
  return plan.choice.experts->weight_layout(layer, all);
}

/// Places of the size that suits all experts of the layer.
StorePlan plan_store(const Plan& plan, const WeightLayout& layout) {
  const Problem& problem = plan.problem;
  if (problem.slots_per_rank == 0) {
    return {layout.head_bytes(), layout.expert_bytes(), layout.num_local_experts, 0};
  }
  if (layout.total_bytes() == 0) return {};
  return {layout.head_bytes(), layout.expert_bytes(), problem.slots_per_rank,
          problem.staging_slots + 1};
}

void lay_out_workspace(Plan& plan, const WeightLayout& weights) {
  const Problem problem = largest_problem(plan.problem);
  const select::Choice& choice = plan.choice;
  const prepare::Traits prepare = choice.prepare->traits(problem);
  const int64_t width = problem.config.routed_width();
  WorkspaceLayout& layout = plan.workspace;
  plan.heap = choice.prepare->heap_need(problem, choice.wire, choice.quant_duty);
  plan.regions.prepare =
      layout.add(choice.prepare->workspace_bytes(problem, choice.wire, choice.quant_duty), 1);
  plan.regions.experts = layout.add(
      choice.experts->workspace_bytes(problem, weights, prepare.max_rows, plan.num_threads), 1);
  MOEKIT_CHECK_AS(ErrorCode::internal, !prepare.holds_results || choice.reduce == nullptr,
                  "{} holds the experts' results, but {} would reduce them first",
                  choice.prepare->name(), choice.reduce->name());
  if (!prepare.holds_results) {
    plan.regions.expert_out =
        layout.add(checked_mul(expert_out_rows(plan, problem, prepare), width, "expert output"),
                   sizeof(float));
  }
  if (choice.reduce != nullptr) {
    plan.regions.reduced =
        layout.add(checked_mul(prepare.max_sum_rows, width, "reduced rows"), sizeof(float));
  }
}

/// Of a full call: parts to the other slices' ranks, and from the first one the shared rows.
int64_t tensor_parallel_bytes(const Problem& problem) {
  const MoeConfig& c = problem.config;
  const int64_t width = c.routed_width() + (c.shared.inter > 0 ? c.hidden : 0);
  return checked_mul(problem.max_tokens, (problem.tp_size - 1) * width * int64_t{sizeof(float)},
                     "parts of slices");
}

PlanSummary summarize(const Plan& plan) {
  const select::Choice& choice = plan.choice;
  PlanSummary summary;
  summary.backend = choice.experts->name();
  summary.prepare = choice.prepare->name();
  summary.reduce = choice.reduce != nullptr ? choice.reduce->name() : "none";
  summary.weights_bytes = plan.layout.total_bytes();
  summary.placement_bytes = plan.store.total_bytes() - plan.layout.total_bytes();
  summary.workspace_bytes = plan.workspace.total() + plan.device_workspace_bytes;
  summary.heap_bytes = plan.heap.bytes;
  summary.wire_bytes = wire_bytes_of(plan, plan.problem);
  summary.weight_layout = plan.layout.name;
  summary.row_order = name_of(plan.layout.row_order);
  summary.weigher = to_string(choice.reduce_duty.weigher);
  summary.summer = to_string(choice.reduce_duty.summer);
  summary.sum_order = to_string(choice.reduce_duty.order);
  summary.quant_duty = to_string(choice.quant_duty);
  summary.quant_reason = choice.quant_reason;
  summary.wire_format = to_string(choice.wire.format);
  summary.hash = hash_text(plan.hash);
  for (const Bucket& bucket : plan.buckets) {
    summary.buckets.push_back({bucket.max_tokens, summary.backend, bucket.knobs});
  }
  return summary;
}

Plan build_plan(const CanonicalLayer& layer, const Problem& problem, const select::Choice& choice,
                int num_threads) {
  Plan plan;
  plan.problem = problem;
  plan.choice = choice;
  plan.num_threads = num_threads;
  plan.moves_rows = choice.prepare->traits(problem).moves_rows;
  plan.layout = choice.experts->weight_layout(layer, plan.local_experts());
  const WeightLayout largest = largest_layout(layer, plan);
  plan.store = plan_store(plan, largest);
  for (int64_t step : ladder(problem.max_tokens)) {
    plan.buckets.push_back({step, choice.experts->candidates(problem, step).front()});
  }
  lay_out_workspace(plan, largest);
  plan.device_workspace_bytes =
      plan.layout.on_device ? choice.experts->device_workspace_bytes(problem) : 0;
  lay_out_layer(layer, plan);
  plan.fields = plan_fields(layer, plan);
  plan.hash = hash_of(plan.fields);
  return plan;
}

PairAnswer answer_of(const select::PairVerdict& verdict, const select::Selection& selection,
                     const PlanOptions& options) {
  PairAnswer pair;
  pair.prepare = verdict.prepare;
  pair.experts = verdict.experts;
  pair.supported = verdict.support.ok();
  for (const Reason& reason : verdict.support.reasons()) pair.reasons.push_back(reason.text);
  if (!pair.supported) return pair;
  const bool asked = (options.prepare.empty() || options.prepare == pair.prepare) &&
                     (options.backend.empty() || options.backend == pair.experts);
  pair.chosen = selection.choice.has_value() && selection.choice->prepare->name() == pair.prepare &&
                selection.choice->experts->name() == pair.experts;
  if (!pair.chosen) {
    pair.note =
        asked ? "works; the chosen pair comes first" : "works; another was asked for by name";
  }
  return pair;
}

}  // namespace

int64_t wire_bytes_of(const Plan& plan, const Problem& problem) {
  return plan.choice.prepare->wire_bytes(problem, plan.choice.wire) +
         tensor_parallel_bytes(problem);
}

int64_t StorePlan::total_bytes() const {
  return head_bytes + checked_mul(slots + staged, expert_bytes, "packed experts");
}

Plan make_plan(const CanonicalLayer& layer, const Problem& problem, const PlanOptions& options) {
  const select::Selection selection = select::select(problem, {options.prepare, options.backend});
  MOEKIT_CHECK_AS(ErrorCode::unsupported, selection.choice.has_value(),
                  "no back-end takes this layer as asked; {}; 'moekit explain' lists all reasons",
                  select::describe(selection));
  return build_plan(layer, problem, *selection.choice, resolve_threads(options));
}

Explanation explain(const CanonicalLayer& layer, const Problem& problem, const PlanOptions& options,
                    std::unique_ptr<Plan>* plan) {
  const select::Selection selection = select::select(problem, {options.prepare, options.backend});
  Explanation explanation;
  for (const select::Verdict& verdict : selection.verdicts) {
    Candidate candidate{verdict.name, verdict.kind, verdict.support.ok(), {}, {}};
    for (const Reason& reason : verdict.support.reasons()) candidate.reasons.push_back(reason.text);
    explanation.candidates.push_back(std::move(candidate));
  }
  for (const select::PairVerdict& verdict : selection.pairs) {
    explanation.pairs.push_back(answer_of(verdict, selection, options));
  }
  explanation.chosen = selection.choice.has_value();
  if (!explanation.chosen) return explanation;
  auto built = std::make_unique<Plan>(
      build_plan(layer, problem, *selection.choice, resolve_threads(options)));
  explanation.plan = summarize(*built);
  const comm::Communicator* comm = options.comm.impl.get();
  explanation.plan.transport = comm != nullptr && comm->size() > 1 ? comm->name() : "none";
  for (Candidate& candidate : explanation.candidates) {
    if (candidate.name == explanation.plan.backend) candidate.note = built->layout.note;
  }
  if (plan != nullptr) *plan = std::move(built);
  return explanation;
}

}  // namespace moekit::engine
