// The joint between a prepare member and an experts member: who quantizes, in which format rows
// travel, who weighs, who sums.
#include "problem/duty.h"
#include "select/oracle.h"

namespace moekit::select {
namespace {

ActivationFormat format_of(Wire wire) {
  switch (wire) {
    case Wire::bf16: return ActivationFormat::bf16;
    case Wire::fp8_token: return ActivationFormat::fp8_token;
    case Wire::fp8_block: return ActivationFormat::fp8_block;
    case Wire::mxfp8: return ActivationFormat::mxfp8;
    case Wire::nvfp4: return ActivationFormat::nvfp4;
    case Wire::f32:
    case Wire::automatic: break;
  }
  return ActivationFormat::f32;
}

/// Why the source may not quantize; empty when it may.
std::string source_objection(const Problem& problem, const experts::Traits& experts) {
  const ActivationScheme& scheme = problem.config.gate_up_input;
  if (!experts.reads_quantized_rows) return "the experts do not read quantized rows";
  if (problem.config.weight_on_input)
    return "the router weight multiplies the input before it is quantized";
  if (scheme.static_scale && !problem.one_static_input_scale) {
    return "the static input scale depends on the expert";
  }
  return {};
}

void negotiate_quantization(const Problem& problem, const prepare::Traits& prepare,
                            const experts::Traits& experts, Agreement& agreement) {
  const ActivationFormat reads = problem.config.gate_up_input.format;
  Choice& choice = agreement.choice;
  const bool bf16_rows = problem.hidden_dtype == DType::bf16 && problem.config.latent == 0;
  // Unrounded rows: as they are where they are bf16 values, or where the experts would round them
  // to bf16 anyway.
  ActivationFormat plain = bf16_rows ? ActivationFormat::bf16 : ActivationFormat::f32;

  if (problem.wire != Wire::automatic) {
    plain = format_of(problem.wire);
    choice.quant_duty = is_quantized(reads) ? QuantDuty::experts : QuantDuty::none;
    choice.quant_reason =
        fmt::format("rows travel as --wire asks; the experts read {}", to_string(reads));
  } else if (!is_quantized(reads)) {
    choice.quant_duty = QuantDuty::none;
    choice.quant_reason = fmt::format("the experts read {}", to_string(reads));
    if (reads == ActivationFormat::bf16 && prepare.moves_rows && !problem.config.weight_on_input) {
      plain = ActivationFormat::bf16;
    }
  } else if (const std::string objection = source_objection(problem, experts);
             prepare.moves_rows && objection.empty()) {
    choice.quant_duty = QuantDuty::source;
    choice.quant_reason = "the scale does not depend on the expert: quantized rows travel";
    plain = reads;
  } else if (experts.quantizes_input) {
    choice.quant_duty = QuantDuty::experts;
    choice.quant_reason =
        prepare.moves_rows ? "rows travel unquantized: " + objection : "no rows travel";
  } else {
    choice.quant_duty = QuantDuty::destination;
    choice.quant_reason = "the experts read quantized rows only";
    agreement.support.require(source_objection(problem, experts).empty(), ReasonCode::quant_duty,
                              "prepare would have to quantize, but {}",
                              source_objection(problem, experts));
  }
  choice.wire = RowFormat::of(plain, problem.config.routed_width());
}

void negotiate_reduction(const Problem& problem, const prepare::Traits& prepare,
                         const experts::Traits& experts, Agreement& agreement) {
  Choice& choice = agreement.choice;
  ReduceDuty& duty = choice.reduce_duty;
  Support& support = agreement.support;
  const bool weight_input = problem.config.weight_on_input;
  support.require(!weight_input || experts.can_weight_input, ReasonCode::reduce_duty,
                  "the experts cannot apply the router weight to their input");

  duty.order = problem.combine == Combine::slots ? SumOrder::slots : SumOrder::rank_sums;
  // Rows that come back as bf16 over ranks are rounded one slot at a time, on one rank too.
  const bool one_rank_sums =
      !prepare.moves_rows && (problem.combine_dtype == DType::f32 || experts.sums_bf16_rows);
  const bool sum_here = one_rank_sums || problem.combine == Combine::rank_sums;
  if (sum_here && experts.can_weight_and_sum) {
    duty.summer = Summer::experts;
    duty.weigher = Weigher::experts;
  } else if (sum_here && problem.combine == Combine::rank_sums && prepare.moves_rows) {
    duty.summer = Summer::reduce;
    duty.weigher = Weigher::combine;
  } else {
    duty.summer = Summer::combine;
    duty.weigher = Weigher::combine;
    support.require(prepare.combine_weighs, ReasonCode::reduce_duty,
                    "the experts leave slot rows and this prepare cannot weigh and sum them");
  }
  if (weight_input) duty.weigher = Weigher::input;
  if (prepare.moves_rows && problem.combine == Combine::rank_sums) {
    support.require(prepare.takes_partial_sums, ReasonCode::combine,
                    "combine=rank_sums needs a prepare member that takes partial sums");
  }
  if (duty.summer != Summer::reduce) return;
  for (const auto* member : reduce::registry()) {
    if (choice.reduce == nullptr && member->accepts(duty, experts.rows)) choice.reduce = member;
  }
  support.require(choice.reduce != nullptr, ReasonCode::reduce_duty,
                  "no weight-and-reduce member takes {} rows with weigher={}",
                  to_string(experts.rows), to_string(duty.weigher));
}

}  // namespace

Agreement negotiate(const Problem& problem, const prepare::PrepareFinalize& prepare,
                    const experts::Experts& experts) {
  Agreement agreement;
  agreement.choice.prepare = &prepare;
  agreement.choice.experts = &experts;
  const prepare::Traits p = prepare.traits(problem);
  const experts::Traits x = experts.traits(problem);
  agreement.support.require(p.rows == x.rows, ReasonCode::rows_format,
                            "{} delivers {} rows, {} takes {} rows", prepare.name(),
                            to_string(p.rows), experts.name(), to_string(x.rows));
  negotiate_quantization(problem, p, x, agreement);
  negotiate_reduction(problem, p, x, agreement);
  return agreement;
}

}  // namespace moekit::select
