// The fields of a plan on which ranks must agree. Every aggregate is taken apart by a structured
// binding: a new member breaks the line that must decide whether ranks have to agree on it.
#include <fmt/ranges.h>

#include <type_traits>
#include <utility>

#include "base/check.h"
#include "engine/plan.h"
#include "engine/plan_agreement.h"
#include "linear/cpu_isa.h"
#include "moekit/version.h"

namespace moekit::engine {
namespace {

/// Of messages between ranks: their order, layouts and meanings.
constexpr int kProtocolRevision = 1;

class Fields {
 public:
  template <typename T>
  void add(const char* name, const T& value) {
    fields_.push_back({name, fmt::format("{}", value)});
  }
  template <typename T>
  requires std::is_enum_v<T>
  void add_enum(const char* name, T value) { add(name, static_cast<int64_t>(value)); }
  std::vector<PlanField> take() { return std::move(fields_); }

 private:
  std::vector<PlanField> fields_;
};

std::string text_of(const WeightScheme& scheme) {
  const auto& [format, group, zero_points] = scheme;
  return fmt::format("{} (groups of {}, {})", to_string(format), group,
                     zero_points ? "zero points" : "symmetric");
}

std::string text_of(const ActivationScheme& scheme) {
  const auto& [format, static_scale, sense, ue8m0] = scheme;
  return fmt::format("{} ({} scale{}{})", to_string(format), static_scale ? "static" : "dynamic",
                     sense == ScaleSense::divisor ? ", divides" : "", ue8m0 ? ", ue8m0" : "");
}

const char* name_of(Combine combine) { return combine == Combine::slots ? "slots" : "rank_sums"; }

const char* name_of(Wire wire) {
  switch (wire) {
    case Wire::automatic: return "automatic";
    case Wire::f32: return "f32";
    case Wire::bf16: return "bf16";
    case Wire::fp8_token: return "fp8_token";
    case Wire::fp8_block: return "fp8_block";
    case Wire::mxfp8: return "mxfp8";
    case Wire::nvfp4: return "nvfp4";
  }
  return "?";
}

const char* name_of(CapacityPolicy policy) {
  return policy == CapacityPolicy::exact    ? "exact"
         : policy == CapacityPolicy::refuse ? "refuse"
                                            : "drop";
}

void add_activation(Fields& fields, const ActivationSpec& spec) {
  const auto& [kind, gated, limit, alpha, beta] = spec;
  fields.add_enum("activation function", kind);
  fields.add("activation gated", gated);
  fields.add("activation limit", limit);
  fields.add("activation alpha", alpha);
  fields.add("activation beta", beta);
}

void add_router(Fields& fields, const RouterSpec& spec) {
  const auto& [scoring, select_on, weight, renormalize, epsilon, p, scaling_factor, num_groups,
               topk_groups, group_score, has_logit_bias, has_selection_bias, hash_routing] = spec;
  fields.add_enum("router scoring", scoring);
  fields.add_enum("router select_on", select_on);
  fields.add_enum("router weight", weight);
  fields.add_enum("router renormalize", renormalize);
  fields.add("router epsilon", epsilon);
  fields.add("router p", p);
  fields.add("router scaling_factor", scaling_factor);
  fields.add("router num_groups", num_groups);
  fields.add("router topk_groups", topk_groups);
  fields.add_enum("router group_score", group_score);
  fields.add("router logit bias", has_logit_bias);
  fields.add("router selection bias", has_selection_bias);
  fields.add("router hash_routing", hash_routing);
}

void add_shared(Fields& fields, const SharedSpec& spec) {
  const auto& [inter, sigmoid_gate, gate_up_weights, down_weights, gate_up_input, down_input] =
      spec;
  fields.add("shared inter", inter);
  fields.add("shared sigmoid_gate", sigmoid_gate);
  fields.add("shared gate_up_weights", text_of(gate_up_weights));
  fields.add("shared down_weights", text_of(down_weights));
  fields.add("shared gate_up_input", text_of(gate_up_input));
  fields.add("shared down_input", text_of(down_input));
}

/// What differs between tensor-parallel ranks.
void add_slice(Fields& fields, const MoeConfig& config) {
  fields.add("inter", config.inter);
  fields.add("down bias", config.has_down_bias);
  add_shared(fields, config.shared);
}

void add_config(Fields& fields, const MoeConfig& config) {
  const auto& [num_experts, top_k, hidden, inter, latent, activation, has_gate_up_bias,
               has_down_bias, weight_on_input, gate_up_weights, down_weights, gate_up_input,
               down_input, router, shared] = config;
  fields.add("num_experts", num_experts);
  fields.add("top_k", top_k);
  fields.add("hidden", hidden);
  fields.add("latent", latent);
  add_activation(fields, activation);
  fields.add("gate_up bias", has_gate_up_bias);
  fields.add("weight_on_input", weight_on_input);
  fields.add("gate_up_weights", text_of(gate_up_weights));
  fields.add("down_weights", text_of(down_weights));
  fields.add("gate_up_input", text_of(gate_up_input));
  fields.add("down_input", text_of(down_input));
  add_router(fields, router);
}

void add_placement(Fields& fields, const ExpertPlacement& placement) {
  // In the order of slots: senders count on it.
  for (int r = 0; r < placement.num_ranks(); ++r) {
    const std::string name = fmt::format("placement, experts of rank {}", r);
    fields.add(name.c_str(), fmt::format("[{}]", fmt::join(placement.experts_of(r), ",")));
  }
}

void add_problem(Fields& fields, const Problem& problem) {
  const auto& [config, max_tokens, num_ranks, rank, tp_size, tp_rank, nodes, placement,
               slots_per_rank, staging_slots, combine, combine_dtype, wire, batch_invariant,
               capacity, device, gpu, hidden_dtype, one_static_input_scale, static_input_scale,
               checked] = problem;
  fields.add("num_ranks", num_ranks);
  fields.add("tp", tp_size);
  // Ranks that exchange rows see the same nodes; those of another slice may lie on others.
  if (tp_size == 1) fields.add("num_nodes", nodes.num_nodes());
  add_config(fields, config);
  if (tp_size == 1) add_slice(fields, config);
  fields.add("max_tokens", max_tokens);
  fields.add("slots_per_rank", slots_per_rank);
  fields.add("staging_slots", staging_slots);
  add_placement(fields, *placement);
  fields.add("combine", name_of(combine));
  fields.add("combine_dtype", to_string(combine_dtype));
  fields.add("wire", name_of(wire));
  fields.add("batch_invariant", batch_invariant);
  const auto& [policy, max_rows] = capacity;
  fields.add("capacity", name_of(policy));
  fields.add("capacity_rows", max_rows);
  fields.add("device", device.type == DeviceType::cpu ? "cpu" : "cuda");
  fields.add("arch", gpu.arch ? to_string(*gpu.arch) : "none");
  fields.add("hidden_dtype", to_string(hidden_dtype));
  fields.add("one static input scale", one_static_input_scale);
  fields.add("static_input_scale", static_input_scale);
  fields.add("checked", checked);
}

}  // namespace

void add_sliced_parts(const MoeConfig& whole, std::vector<PlanField>& fields) {
  Fields parts;
  add_slice(parts, whole);
  for (PlanField& field : parts.take()) fields.push_back(std::move(field));
}

std::vector<PlanField> plan_fields(const CanonicalLayer& layer, const Plan& plan) {
  Fields fields;
  fields.add("version", MOEKIT_VERSION);
  fields.add("protocol revision", kProtocolRevision);
  fields.add("model family", layer.family);
  fields.add("decoder layer", layer.layer);
  add_problem(fields, plan.problem);
  const select::Choice& choice = plan.choice;
  fields.add("prepare", choice.prepare->name());
  fields.add("experts", choice.experts->name());
  fields.add("reduce", choice.reduce != nullptr ? choice.reduce->name() : "none");
  fields.add("weigher", to_string(choice.reduce_duty.weigher));
  fields.add("summer", to_string(choice.reduce_duty.summer));
  fields.add("sum order", to_string(choice.reduce_duty.order));
  fields.add("quant_duty", to_string(choice.quant_duty));
  fields.add("wire format", to_string(choice.wire.format));
  fields.add("wire width", choice.wire.width);
  if (plan.problem.device.type == DeviceType::cpu) {
    // Matrix instructions differ in how they round, so ranks with other ones have other bits.
    fields.add("instruction set", to_string(linear::default_isa()));
  }
  return fields.take();
}

}  // namespace moekit::engine
