#include "moekit/describe.h"

#include <nlohmann/json.hpp>

#include "base/utf8.h"
#include "moekit/tools.h"

namespace moekit {
namespace {

// Keys in the order in which they are written: a reader sees the important ones first.
using Json = nlohmann::ordered_json;

Json json_of(const MoeConfig& c) {
  Json scheme = {{"weights", weights_name(c)}, {"activations", activations_name(c)}};
  if (c.shared.inter > 0) scheme["shared_weights"] = scheme_name(c.shared.gate_up_weights);
  return {{"experts", c.num_experts},
          {"top_k", c.top_k},
          {"hidden", c.hidden},
          {"intermediate", c.inter},
          {"latent", c.latent},
          {"activation", activation_name(c.activation)},
          {"gated", c.activation.gated},
          {"shared_experts", c.shared.inter > 0 ? 1 : 0},
          {"shared_intermediate", c.shared.inter},
          {"scheme", scheme}};
}

Json json_of(const PlanSummary& p) {
  Json buckets = Json::array();
  for (const PlanBucket& b : p.buckets) {
    buckets.push_back({{"max_tokens", b.max_tokens}, {"backend", b.backend}, {"knobs", b.knobs}});
  }
  return {{"hash", p.hash},
          {"weights_bytes", p.weights_bytes},
          {"placement_bytes", p.placement_bytes},
          {"workspace_bytes", p.workspace_bytes},
          {"heap_bytes", p.heap_bytes},
          {"wire_bytes", p.wire_bytes},
          {"reduce_duty", {{"weigher", p.weigher}, {"summer", p.summer}, {"order", p.sum_order}}},
          {"quant_duty", p.quant_duty},
          {"quant_reason", p.quant_reason},
          {"wire_format", p.wire_format},
          {"transport", p.transport},
          {"weight_layout", p.weight_layout},
          {"pack_cache", p.pack_cache},
          {"row_order", p.row_order},
          {"reduce", p.reduce},
          {"buckets", buckets}};
}

// Names of files and tensors may hold any bytes; JSON may not.
std::string dump(const Json& j) { return j.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

std::string plan_json(const PlanSummary& plan) { return dump(json_of(plan)); }

std::string explanation_json(const MoeConfig& config, const Explanation& e) {
  Json candidates = Json::array();
  for (const Candidate& c : e.candidates) {
    candidates.push_back({{"name", c.name},
                          {"kind", c.kind},
                          {"supported", c.supported},
                          {"reasons", c.reasons},
                          {"note", c.note}});
  }
  Json pairs = Json::array();
  for (const PairAnswer& pair : e.pairs) {
    pairs.push_back({{"prepare", pair.prepare},
                     {"experts", pair.experts},
                     {"supported", pair.supported},
                     {"chosen", pair.chosen},
                     {"reasons", pair.reasons},
                     {"note", pair.note}});
  }
  Json j = {{"problem", json_of(config)}, {"candidates", candidates}, {"pairs", pairs}};
  if (e.chosen) {
    j["chosen"] = {{"backend", e.plan.backend}, {"prepare", e.plan.prepare}};
    j["plan"] = json_of(e.plan);
  } else {
    j["chosen"] = nullptr;
    j["plan"] = nullptr;
  }
  return dump(j);
}

std::string checkpoint_json(const CheckpointInfo& info) {
  Json layers = Json::array();
  for (const LayerInfo& layer : info.layers) {
    Json entry = {{"index", layer.index}, {"kind", layer.kind}};
    if (layer.moe) entry.update(json_of(layer.config));
    entry["bytes"] = layer.bytes;
    layers.push_back(entry);
  }
  Json conventions = Json::object();
  for (const auto& [key, value] : info.conventions) conventions[key] = value;
  Json j = {{"family", info.family},
            {"quant_method", info.quant_method},
            {"quant_format", info.quant_format},
            {"layers", layers},
            {"conventions", conventions},
            {"ignored", info.ignored}};
  if (!info.tensors.empty()) {
    Json tensors = Json::array();
    for (const TensorInfo& t : info.tensors) {
      tensors.push_back({{"name", t.name},
                         {"dtype", t.dtype},
                         {"shape", t.shape},
                         {"file", t.file},
                         {"bytes", t.bytes}});
    }
    j["tensors"] = tensors;
  }
  return dump(j);
}

std::string printable(std::string_view text) { return printable_text(text); }

}  // namespace moekit
