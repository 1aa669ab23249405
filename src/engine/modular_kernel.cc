// hidden, ids, weights -> prepare -> experts -> (weight and reduce) -> finalize -> routed rows.
#include "engine/modular_kernel.h"

#include <bit>

namespace moekit::engine {
namespace {

using trace::Span;
using trace::Stage;

/// What the experts are about to work on; counted only when somebody records it.
void describe_work(const ExpertRows& rows, int64_t num_local_experts, trace::Facts& facts) {
  facts.rows = 0;
  facts.experts = 0;
  facts.tokens = rows.num_rows;
  if (rows.layout == RowsLayout::batched) {
    for (int64_t e = 0; e < num_local_experts; ++e) {
      facts.rows += rows.expert_num_rows[e];
      facts.experts += rows.expert_num_rows[e] > 0 ? 1 : 0;
    }
    return;
  }
  // Bits of the experts that some slot names. Beyond this many they are not counted.
  constexpr int64_t kCounted = 1 << 14;
  uint64_t seen[kCounted / 64] = {};
  for (int64_t i = 0; i < rows.num_rows * rows.top_k; ++i) {
    const int64_t expert = index_of(rows.ids[i]);
    if (expert < 0) continue;
    ++facts.rows;
    if (expert < kCounted) seen[expert / 64] |= uint64_t{1} << (expert % 64);
  }
  for (const uint64_t word : seen) facts.experts += std::popcount(word);
}

/// Rows that stay on their rank may be the caller's quantized ones; rows that travel have the
/// plan's format.
RowFormat wire_of(const Call& call) {
  const Plan& plan = *call.plan;
  if (call.records == nullptr || plan.moves_rows) return plan.choice.wire;
  return RowFormat::of(plan.problem.config.gate_up_input.format,
                       plan.problem.config.routed_width());
}

ExpertRows receive_rows(Call& call) {
  const Span span(Stage::receive);
  const ExpertRows rows = call.plan->choice.prepare->prepare_receive(call.prepare_args);
  call.in_flight.close(*call.trace, Stage::rows_in_flight);
  return rows;
}

void run_experts(const Call& call, const ExpertRows& rows, const ExpertOutput& out) {
  const Plan& plan = *call.plan;
  Span span(Stage::experts);
  if (span.on()) describe_work(rows, plan.problem.num_local_experts(), span.facts());
  plan.choice.experts->run({.problem = &plan.problem,
                            .layout = &plan.layout,
                            .blob = call.blob,
                            .canonical = call.canonical,
                            .local_experts = plan.local_experts(),
                            .duty = plan.choice.reduce_duty,
                            .in = rows,
                            .out = out,
                            .workspace = call.workspace + plan.regions.experts.offset,
                            .threads = call.threads,
                            .device = call.device,
                            .stream = call.stream},
                           plan.bucket_of(call.routing.num_tokens).knobs);
}

}  // namespace

void dispatch(Call& call) {
  const Plan& plan = *call.plan;
  call.prepare_args = {.problem = &plan.problem,
                       .hidden = call.rows,
                       .records = call.records,
                       .routing = call.routing,
                       .quant_duty = plan.choice.quant_duty,
                       .reduce_duty = plan.choice.reduce_duty,
                       .wire = wire_of(call),
                       .input_scale = plan.problem.static_input_scale,
                       .dropped = &call.dropped,
                       .workspace = call.workspace + plan.regions.prepare.offset,
                       .threads = call.threads,
                       .comm = call.comm,
                       .heap = call.heap,
                       .call = call.number,
                       .layer = call.layer,
                       .plan = plan.hash};
  {
    Span span(Stage::dispatch);
    span.facts().tokens = call.routing.num_tokens;
    plan.choice.prepare->prepare_send(call.prepare_args);
  }
  if (plan.moves_rows) call.in_flight.open(*call.trace);
}

bool dispatch_ready(const Call& call) {
  return call.plan->choice.prepare->prepare_ready(call.prepare_args);
}

void experts(Call& call) {
  const Plan& plan = *call.plan;
  const ReduceDuty duty = plan.choice.reduce_duty;
  const ExpertRows rows = receive_rows(call);

  float* results = plan.choice.prepare->results(call.prepare_args);
  if (results == nullptr) results = plan.regions.expert_out.in<float>(call.workspace);
  ExpertOutput out{results, plan.problem.config.routed_width()};
  if (!call.skip_experts) run_experts(call, rows, out);
  if (plan.choice.reduce != nullptr) {
    const Span span(Stage::reduce);
    float* reduced = plan.regions.reduced.in<float>(call.workspace);
    plan.choice.reduce->run({rows, out, duty, reduced, call.threads});
    out.data = reduced;
  }

  call.finalize_args = {.problem = &plan.problem,
                        .routing = call.routing,
                        .reduce_duty = duty,
                        .rows = rows,
                        .experts = out,
                        .sum = call.routed,
                        .workspace = call.workspace + plan.regions.prepare.offset,
                        .threads = call.threads,
                        .comm = call.comm,
                        .heap = call.heap,
                        .call = call.number,
                        .layer = call.layer};
  {
    const Span span(Stage::combine_send);
    plan.choice.prepare->finalize_send(call.finalize_args);
  }
  if (plan.moves_rows) call.in_flight.open(*call.trace);
}

bool combine_ready(const Call& call) {
  return call.plan->choice.prepare->finalize_ready(call.finalize_args);
}

void combine(Call& call) {
  const Span span(Stage::combine);
  call.plan->choice.prepare->finalize_receive(call.finalize_args);
  call.in_flight.close(*call.trace, Stage::results_in_flight);
}

}  // namespace moekit::engine
