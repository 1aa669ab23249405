#include "checkpoint/families.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "checkpoint/error_codes.h"
#include "checkpoint/family_table.h"

namespace moekit::checkpoint {
namespace {

// Bounds that no model reaches; they keep a damaged config from asking for memory.
constexpr int64_t kMaxSize = int64_t{1} << 31;
constexpr int64_t kMaxExperts = 65536;
constexpr int64_t kMaxLayers = 10000;

/// The value at a path like "ffn_config.moe_top_k|moe_top_k": the first spelling that is present.
/// Two spellings with different integers contradict each other.
JsonPlace lookup(const JsonPlace& config, std::string_view keys) {
  JsonPlace found = config.at("");
  bool any = false;
  while (!keys.empty()) {
    const size_t bar = std::min(keys.find('|'), keys.size());
    std::string_view path = keys.substr(0, bar);
    keys.remove_prefix(std::min(bar + 1, keys.size()));
    JsonPlace place = config;
    while (!path.empty()) {
      const size_t dot = std::min(path.find('.'), path.size());
      place = place.at(path.substr(0, dot));
      path.remove_prefix(std::min(dot + 1, path.size()));
    }
    if (!any || (!found.present() && place.present())) {
      if (!found.present()) found = place;
      any = true;
    } else if (place.is(Json::Kind::number) && found.is(Json::Kind::number) &&
               place.as_int() != found.as_int()) {
      fail(kCorrupt, "{} = {} contradicts {} = {}", place.where(), place.as_int(), found.where(),
           found.as_int());
    }
  }
  return found;
}

int64_t size_of(const JsonPlace& config, std::string_view keys, int64_t high = kMaxSize) {
  return lookup(config, keys).as_int(1, high);
}

ActivationKind activation_of(const JsonPlace& name, ActivationKind otherwise) {
  if (!name.present()) return otherwise;
  const std::string& text = name.as_string();
  if (text == "silu" || text == "swish") return ActivationKind::silu;
  if (text == "gelu") return ActivationKind::gelu;
  if (text == "gelu_pytorch_tanh" || text == "gelu_new") return ActivationKind::gelu_tanh;
  if (text == "relu2") return ActivationKind::relu2;
  fail(kUnsupported,
       "{}: activation {} is not covered (covered: silu, gelu, gelu_pytorch_tanh, relu2)",
       name.where(), json_quote(text));
}

// ---- which layers are MoE

std::vector<LayerKind> kinds_by_names(const std::vector<JsonPlace>& names,
                                      std::string_view moe_name, std::string_view hash_name) {
  std::vector<LayerKind> kinds;
  for (const JsonPlace& place : names) {
    const std::string& name = place.as_string();
    kinds.push_back(name == moe_name                          ? LayerKind::moe
                    : !hash_name.empty() && name == hash_name ? LayerKind::hash_moe
                                                              : LayerKind::dense);
  }
  return kinds;
}

/// layers_block_type lists a name a layer; hybrid_override_pattern has a letter a layer, E = MoE.
std::vector<LayerKind> kinds_by_block_types(const JsonPlace& config) {
  const JsonPlace types = config.at("layers_block_type");
  if (types.present()) return kinds_by_names(types.elements(), "moe", "");
  const std::string pattern = config.at("hybrid_override_pattern").as_string();
  std::vector<LayerKind> kinds;
  for (const char c : pattern) kinds.push_back(c == 'E' ? LayerKind::moe : LayerKind::dense);
  return kinds;
}

void mark_listed(const JsonPlace& config, std::vector<LayerKind>& kinds) {
  const int64_t last = static_cast<int64_t>(kinds.size()) - 1;
  const JsonPlace list = config.at("moe_layers");
  if (list.present()) {
    for (const JsonPlace& place : list.elements()) {
      kinds[static_cast<size_t>(place.as_int(0, last))] = LayerKind::moe;
    }
    return;
  }
  const int64_t step = config.at("interleave_moe_layer_step").as_int(0, kMaxLayers);
  for (int64_t i = step - 1; step > 0 && i <= last; i += step) {
    kinds[static_cast<size_t>(i)] = LayerKind::moe;
  }
}

void mark_sparse_step(const JsonPlace& config, std::vector<LayerKind>& kinds) {
  const int64_t step = config.at("decoder_sparse_step").int_or(1, kMaxLayers, 1);
  for (size_t i = 0; i < kinds.size(); ++i) {
    if ((static_cast<int64_t>(i) + 1) % step == 0) kinds[i] = LayerKind::moe;
  }
  const JsonPlace dense = config.at("mlp_only_layers");
  if (!dense.present()) return;
  for (const JsonPlace& place : dense.elements()) {
    const int64_t i = place.as_int(0, kMaxLayers);
    if (i < static_cast<int64_t>(kinds.size())) kinds[static_cast<size_t>(i)] = LayerKind::dense;
  }
}

std::vector<LayerKind> layer_kinds(const JsonPlace& config, const Family& family) {
  if (family.moe_layers == MoeLayers::block_types) {
    std::vector<LayerKind> kinds = kinds_by_block_types(config);
    MOEKIT_CHECK_AS(kCorrupt, kinds.size() <= kMaxLayers, "{}: expected at most {} layers, came {}",
                    config.where(), kMaxLayers, kinds.size());
    return kinds;
  }
  const int64_t count = size_of(config, family.layers_key, kMaxLayers);
  std::vector<LayerKind> kinds(static_cast<size_t>(count), LayerKind::dense);
  switch (family.moe_layers) {
    case MoeLayers::all: std::ranges::fill(kinds, LayerKind::moe); break;
    case MoeLayers::first_dense: {
      const int64_t first = config.at("first_k_dense_replace").int_or(0, kMaxLayers, 0);
      const int64_t step = config.at("moe_layer_freq").int_or(1, kMaxLayers, 1);
      for (int64_t i = first; i < count; ++i) {
        if (i % step == 0) kinds[static_cast<size_t>(i)] = LayerKind::moe;
      }
      break;
    }
    case MoeLayers::sparse_step: mark_sparse_step(config, kinds); break;
    case MoeLayers::listed: mark_listed(config, kinds); break;
    case MoeLayers::period: {
      const int64_t step = config.at("expert_layer_period").as_int(1, kMaxLayers);
      const int64_t offset = config.at("expert_layer_offset").as_int(0, kMaxLayers);
      for (int64_t i = 0; i < count; ++i) {
        if (i % step == offset) kinds[static_cast<size_t>(i)] = LayerKind::moe;
      }
      break;
    }
    case MoeLayers::mlp_types: {
      const JsonPlace types = config.at("mlp_layer_types");
      if (types.present()) {
        kinds = kinds_by_names(types.elements(), "moe", "hash_moe");
        MOEKIT_CHECK_AS(kCorrupt, static_cast<int64_t>(kinds.size()) == count,
                        "{}: expected {} entries, one a layer, came {}", types.where(), count,
                        kinds.size());
        break;
      }
      const int64_t hashed = config.at("num_hash_layers").as_int(0, kMaxLayers);
      for (int64_t i = 0; i < count; ++i) {
        kinds[static_cast<size_t>(i)] = i < hashed ? LayerKind::hash_moe : LayerKind::moe;
      }
      break;
    }
    case MoeLayers::block_types: break;  // handled above
  }
  return kinds;
}

// ---- router recipe

Scoring scoring_of(const JsonPlace& name, Scoring otherwise) {
  if (!name.present()) return otherwise;
  const std::string& text = name.as_string();
  if (text == "softmax") return Scoring::softmax;
  if (text == "sigmoid") return Scoring::sigmoid;
  if (text == "sqrtsoftplus") return Scoring::sqrt_softplus;
  fail(kUnsupported,
       "{}: scoring function {} is not covered (covered: softmax, sigmoid, "
       "sqrtsoftplus)",
       name.where(), json_quote(text));
}

/// Grouped selection: how many groups, how many are kept, what a group's score is.
void read_groups(const JsonPlace& config, const Family& family, const MoeConfig& moe,
                 RouterSpec& router) {
  if (family.groups == GroupRule::none) return;
  const JsonPlace method = config.at("topk_method");
  bool grouped = true;
  if (family.groups == GroupRule::bias_top2) {
    MOEKIT_CHECK_AS(kUnsupported, method.string_or("noaux_tc") == "noaux_tc",
                    "{}: selection {} is not covered for {} (covered: noaux_tc)", method.where(),
                    json_quote(method.string_or("")), family.model_type);
    router.group_score = GroupScore::top2_sum;
  } else {
    const std::string& name = method.as_string();
    MOEKIT_CHECK_AS(kUnsupported, name == "greedy" || name == "group_limited_greedy",
                    "{}: selection {} is not covered for {} (covered: greedy, "
                    "group_limited_greedy)",
                    method.where(), json_quote(name), family.model_type);
    grouped = name == "group_limited_greedy";
    router.group_score = GroupScore::max;
  }
  if (!grouped) return;
  const JsonPlace groups_place = config.at("n_group");
  const int64_t groups = groups_place.as_int(1, moe.num_experts);
  const JsonPlace kept_place = config.at("topk_group");
  if (groups == 1 && !kept_place.present()) return;
  const int64_t kept = kept_place.as_int(1, groups);
  if (groups == 1) return;
  MOEKIT_CHECK_AS(kCorrupt, moe.num_experts % groups == 0,
                  "{}: {} experts do not divide into {} groups", groups_place.where(),
                  moe.num_experts, groups);
  const int64_t group = moe.num_experts / groups;
  MOEKIT_CHECK_AS(kCorrupt, moe.top_k <= kept * group,
                  "{}: {} experts a token cannot come from {} groups of {}", groups_place.where(),
                  moe.top_k, kept, group);
  MOEKIT_CHECK_AS(kCorrupt, router.group_score == GroupScore::max || group >= 2,
                  "{}: groups are scored by their two best experts, but hold {}",
                  groups_place.where(), group);
  router.num_groups = static_cast<int32_t>(groups);
  router.topk_groups = static_cast<int32_t>(kept);
}

RouterSpec read_router(const JsonPlace& config, const Family& family, const MoeConfig& moe) {
  RouterSpec router = family.router;
  router.has_logit_bias = !family.logit_bias.empty();
  const JsonPlace scoring = config.at("scoring_func");
  const Scoring declared = scoring_of(scoring, router.scoring);
  if (family.groups == GroupRule::topk_method || family.moe_layers == MoeLayers::mlp_types) {
    router.scoring = declared;
  } else {
    MOEKIT_CHECK_AS(kUnsupported, declared == router.scoring || router.scoring == Scoring::logits,
                    "{}: scoring function {} is not covered for {}", scoring.where(),
                    json_quote(scoring.string_or("")), family.model_type);
  }
  switch (family.norm) {
    case NormRule::fixed: break;
    case NormRule::if_norm_topk_prob:
      if (config.at("norm_topk_prob").as_bool()) router.renormalize = Renormalize::sum;
      break;
    case NormRule::p_norm_key: {
      const JsonPlace p = lookup(config, "ffn_config.moe_normalize_expert_weights");
      if (!p.present()) break;
      router.renormalize = Renormalize::p_norm;
      router.p = static_cast<float>(p.as_double());
      if (!(router.p > 0.0f) || std::isinf(router.p)) p.expected("a positive number or null");
      break;
    }
  }
  if (family.scaled) {
    const JsonPlace place = config.at("routed_scaling_factor");
    router.scaling_factor = static_cast<float>(place.as_double());
    if (!std::isfinite(router.scaling_factor)) place.expected("a finite number");
  }
  read_groups(config, family, moe, router);
  return router;
}

void read_shared(const JsonPlace& config, const Family& family, MoeConfig& moe) {
  switch (family.shared_rule) {
    case SharedInter::none: return;
    case SharedInter::key: {
      // Nemotron-H may have no shared expert at all; the others always have one.
      const JsonPlace count = config.at("n_shared_experts");
      if (count.present() && count.as_int(0, kMaxExperts) == 0) return;
      moe.shared.inter = lookup(config, family.shared_inter_key).as_int(0, kMaxSize);
      break;
    }
    case SharedInter::count_times_inter: {
      const JsonPlace count = config.at("n_shared_experts");
      moe.shared.inter = checked_mul(count.int_or(0, kMaxExperts, 0), moe.inter,
                                     "shared experts' width", kCorrupt);
      break;
    }
  }
  moe.shared.sigmoid_gate = moe.shared.inter > 0 && !family.shared_gate.empty();
}

std::string known_types() {
  std::string names;
  for (const Family& f : families()) {
    if (!names.empty()) names += ", ";
    names += f.model_type;
  }
  return names;
}

}  // namespace

std::string fill(std::string_view text, std::string_view key, int64_t value) {
  std::string out(text);
  const std::string token = fmt::format("{{{}}}", key);
  const size_t at = out.find(token);
  if (at != std::string::npos) out.replace(at, token.size(), fmt::format("{}", value));
  return out;
}

JsonPlace text_config(const JsonPlace& config, const Family& family) {
  return family.text_key.empty() ? config : config.at(family.text_key);
}

std::string Model::block(int layer) const { return fill(family->block, "L", layer); }

MoeConfig Model::config_of(int layer) const {
  MoeConfig moe = config;
  if (layers[static_cast<size_t>(layer)] == LayerKind::hash_moe) {
    moe.router.hash_routing = true;
    moe.router.has_selection_bias = false;
  }
  return moe;
}

Model read_model(const JsonPlace& root) {
  Model model;
  model.model_type = root.at("model_type").as_string();
  const auto row = std::ranges::find(families(), model.model_type, &Family::model_type);
  MOEKIT_CHECK_AS(kUnsupported, row != families().end(),
                  "{}: model_type {} is not covered (covered: {})", root.where(),
                  json_quote(model.model_type), known_types());
  const Family& family = *row;
  model.family = &family;
  const JsonPlace config = text_config(root, family);
  if (!config.present()) config.expected("the text model's configuration");

  MoeConfig& moe = model.config;
  moe.num_experts = size_of(config, family.experts_key, kMaxExperts);
  moe.top_k = size_of(config, family.top_k_key);
  moe.hidden = size_of(config, family.hidden_key);
  moe.inter = size_of(config, family.inter_key);
  if (moe.top_k > moe.num_experts) {
    lookup(config, family.top_k_key)
        .expected(fmt::format("at most {} experts a token (k), the number of experts there are",
                              moe.num_experts));
  }
  if (!family.latent_key.empty()) {
    moe.latent = lookup(config, family.latent_key).int_or(0, kMaxSize, 0);
  }
  model.vocabulary = config.at("vocab_size").int_or(0, kMaxSize, 0);
  moe.activation = family.activation;
  if (!family.fixed_activation) {
    moe.activation.kind = activation_of(lookup(config, family.activation_key), moe.activation.kind);
  }
  if (!family.limit_key.empty()) {
    const JsonPlace limit = config.at(family.limit_key);
    if (limit.present() || family.limit_required) {
      moe.activation.limit = static_cast<float>(limit.as_double());
      if (!(moe.activation.limit > 0.0f)) limit.expected("a positive number");
    }
  }
  moe.has_gate_up_bias = moe.has_down_bias = family.expert_biases;
  moe.weight_on_input = family.weight_on_input;
  MOEKIT_CHECK_AS(kUnsupported, !moe.weight_on_input || moe.top_k == 1,
                  "{}: {} weights the experts' input, which is covered for one expert a token, "
                  "came {}",
                  config.where(), family.model_type, moe.top_k);
  moe.router = read_router(config, family, moe);
  read_shared(config, family, moe);
  model.layers = layer_kinds(config, family);
  return model;
}

}  // namespace moekit::checkpoint
