#include "problem/spec_words.h"

#include <array>
#include <charconv>
#include <cmath>

#include "base/check.h"
#include "problem/spec.h"

namespace moekit {
namespace spec {
namespace {

constexpr int64_t kLargestCount = int64_t{1} << 40;

template <typename Number>
bool read_all(const std::string& text, Number& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && !text.empty();
}

bool take_suffix(std::string& text, const std::string& suffix) {
  if (text.size() <= suffix.size() || !text.ends_with(suffix)) return false;
  text.resize(text.size() - suffix.size());
  return true;
}

struct ActName {
  const char* name;
  ActivationKind kind;
  bool gated;
};
constexpr ActName kActs[] = {
    {"silu", ActivationKind::silu, true},
    {"gelu", ActivationKind::gelu, true},
    {"gelu_tanh", ActivationKind::gelu_tanh, true},
    {"swiglu_oai", ActivationKind::swiglu_oai, true},
    {"relu2", ActivationKind::relu2, false},
    {"silu_nogate", ActivationKind::silu, false},
    {"gelu_nogate", ActivationKind::gelu, false},
    {"gelu_tanh_nogate", ActivationKind::gelu_tanh, false},
};

/// GPT-OSS clamps at 7 (its limit is part of the function, not of config.json).
float default_limit(ActivationKind kind) {
  return kind == ActivationKind::swiglu_oai ? 7.0f : std::numeric_limits<float>::infinity();
}

struct Recipe {
  const char* name;
  RouterSpec router;
  bool weight_on_input = false;
};

RouterSpec recipe(Scoring scoring, SelectOn select_on, RouterWeight weight, Renormalize renormalize,
                  bool selection_bias) {
  RouterSpec r;
  r.scoring = scoring;
  r.select_on = select_on;
  r.weight = weight;
  r.renormalize = renormalize;
  // The published sigmoid routers divide by sum + 1e-20, so that scores that all underflow give
  // zeros and not NaN.
  const bool can_vanish = scoring == Scoring::sigmoid || scoring == Scoring::sqrt_softplus;
  r.epsilon = renormalize == Renormalize::sum && can_vanish ? 1e-20f : 0.0f;
  r.has_selection_bias = selection_bias;
  return r;
}

const std::vector<Recipe>& recipes() {
  using W = RouterWeight;
  using R = Renormalize;
  static const std::vector<Recipe> all = [] {
    std::vector<Recipe> list = {
        {"softmax", recipe(Scoring::softmax, SelectOn::scores, W::scores, R::none, false)},
        {"softmax_renorm", recipe(Scoring::softmax, SelectOn::scores, W::scores, R::sum, false)},
        {"softmax_pnorm", recipe(Scoring::softmax, SelectOn::scores, W::scores, R::p_norm, false)},
        {"topk_softmax",
         recipe(Scoring::logits, SelectOn::logits, W::softmax_selected, R::none, false)},
        {"topk_softmax_bias",
         recipe(Scoring::logits, SelectOn::logits, W::softmax_selected, R::none, false)},
        {"sigmoid", recipe(Scoring::sigmoid, SelectOn::scores, W::scores, R::sum, false)},
        {"sigmoid_bias", recipe(Scoring::sigmoid, SelectOn::scores, W::scores, R::sum, true)},
        {"sqrt_softplus_bias",
         recipe(Scoring::sqrt_softplus, SelectOn::scores, W::scores, R::sum, true)},
        {"sigmoid_input",
         recipe(Scoring::logits, SelectOn::logits, W::sigmoid_logit, R::none, false)},
    };
    for (Recipe& r : list) {
      if (std::string(r.name) == "topk_softmax_bias") r.router.has_logit_bias = true;
      if (std::string(r.name) == "sigmoid_input") r.weight_on_input = true;
    }
    return list;
  }();
  return all;
}

}  // namespace

int64_t parse_count(const std::string& key, const std::string& text, int64_t least) {
  int64_t value = 0;
  MOEKIT_CHECK(read_all(text, value) && value >= least && value <= kLargestCount,
               "{} takes a whole number from {} to {}, got '{}'", key, least, kLargestCount, text);
  return value;
}

double parse_number(const std::string& key, const std::string& text) {
  double value = 0;
  MOEKIT_CHECK(read_all(text, value) && std::isfinite(value), "{} takes a decimal number, got '{}'",
               key, text);
  return value;
}

std::string spell_number(float value) { return fmt::format("{}", value); }
std::string spell_number(double value) { return fmt::format("{}", value); }

ActivationSpec parse_act(const std::string& text) {
  const size_t at = text.find('@');
  const std::string name = text.substr(0, at);
  for (const ActName& known : kActs) {
    if (name != known.name) continue;
    ActivationSpec act;
    act.kind = known.kind;
    act.gated = known.gated;
    act.limit = default_limit(known.kind);
    if (at != std::string::npos) {
      act.limit = static_cast<float>(parse_number("act's limit", text.substr(at + 1)));
      MOEKIT_CHECK(act.gated && act.limit > 0,
                   "act takes a positive limit, and only with a gate, got '{}'", text);
    }
    return act;
  }
  fail(ErrorCode::invalid_argument,
       "act is silu, gelu, gelu_tanh, swiglu_oai (gated, '@LIMIT' clamps), relu2, silu_nogate, "
       "gelu_nogate or gelu_tanh_nogate, got '{}'",
       text);
}

std::string spell(const ActivationSpec& act) {
  for (const ActName& known : kActs) {
    // relu2 has one form only.
    if (known.kind != act.kind || known.gated != act.gated) continue;
    if (act.limit == default_limit(act.kind)) return known.name;
    return fmt::format("{}@{}", known.name, spell_number(act.limit));
  }
  fail(ErrorCode::unsupported, "an activation function of kind {} {} gate has no SPEC word",
       static_cast<int>(act.kind), act.gated ? "with" : "without");
}

std::string router_names() {
  std::string names;
  for (const Recipe& r : recipes()) names += (names.empty() ? "" : ", ") + std::string(r.name);
  return names;
}

RouterChoice parse_router(const std::string& text) {
  const size_t at = text.find('@');
  const std::string name = text.substr(0, at);
  for (const Recipe& known : recipes()) {
    if (name != known.name) continue;
    RouterChoice choice{known.router, known.weight_on_input};
    std::string rest = at == std::string::npos ? "" : text.substr(at);
    while (!rest.empty()) {
      const size_t next = rest.find('@', 1);
      const std::string part = rest.substr(1, next - 1);
      rest = next == std::string::npos ? "" : rest.substr(next);
      const size_t slash = part.find('/');
      if (part.starts_with("g") && slash != std::string::npos) {
        choice.router.num_groups =
            static_cast<int32_t>(parse_count("router's groups", part.substr(1, slash - 1), 1));
        choice.router.topk_groups =
            static_cast<int32_t>(parse_count("router's kept groups", part.substr(slash + 1), 1));
      } else if (part.starts_with("x")) {
        choice.router.scaling_factor =
            static_cast<float>(parse_number("router's factor", part.substr(1)));
      } else {
        fail(ErrorCode::invalid_argument,
             "router takes '@gGROUPS/KEPT' and '@xFACTOR' after its name, got '@{}'", part);
      }
    }
    return choice;
  }
  fail(ErrorCode::invalid_argument, "router is one of {} (then '@g8/4', '@x2.5'), got '{}'",
       router_names(), text);
}

std::string spell(const RouterChoice& choice) {
  for (const Recipe& known : recipes()) {
    RouterSpec plain = choice.router;
    plain.num_groups = 0;
    plain.topk_groups = 0;
    plain.scaling_factor = 1.0f;
    if (plain != known.router || choice.weight_on_input != known.weight_on_input) continue;
    std::string text = known.name;
    if (choice.router.num_groups > 0) {
      text += fmt::format("@g{}/{}", choice.router.num_groups, choice.router.topk_groups);
    }
    if (choice.router.scaling_factor != 1.0f) {
      text += "@x" + spell_number(choice.router.scaling_factor);
    }
    return text;
  }
  fail(ErrorCode::unsupported, "this router recipe has no SPEC word; the words are {}",
       router_names());
}

}  // namespace spec

WeightScheme parse_weight_scheme(const std::string& text) {
  static constexpr WeightFormat kPlain[] = {
      WeightFormat::bf16,       WeightFormat::f16,          WeightFormat::f32,
      WeightFormat::fp8_tensor, WeightFormat::fp8_channel,  WeightFormat::fp8_block,
      WeightFormat::mxfp8,      WeightFormat::mxfp8_e5m2,   WeightFormat::mxfp4,
      WeightFormat::nvfp4,      WeightFormat::int4_channel, WeightFormat::int8_channel};
  std::string name = text;
  WeightScheme scheme;
  scheme.zero_points = name.starts_with("int") && spec::take_suffix(name, "_zp");
  for (WeightFormat format : kPlain) {
    if (name != to_string(format)) continue;
    scheme.format = format;
    return scheme;
  }
  for (const char* prefix : {"int4_g", "int8_g"}) {
    if (!name.starts_with(prefix)) continue;
    const int64_t group = spec::parse_count("the group of weights", name.substr(6), 1);
    MOEKIT_CHECK(group <= 1 << 20, "the group of weights is at most 2^20, got {}", group);
    scheme.format = prefix[3] == '4' ? WeightFormat::int4_group : WeightFormat::int8_group;
    scheme.group = static_cast<int32_t>(group);
    return scheme;
  }
  fail(ErrorCode::invalid_argument,
       "weights are bf16, f16, f32, fp8_tensor, fp8_channel, fp8_block, mxfp8, mxfp8_e5m2, mxfp4, "
       "nvfp4, int4_gN, int8_gN, int4_channel or int8_channel (integers with '_zp' for zero "
       "points), got '{}'",
       text);
}

std::string spell(const WeightScheme& scheme) {
  const char* zero_points = scheme.zero_points ? "_zp" : "";
  switch (scheme.format) {
    case WeightFormat::int4_group: return fmt::format("int4_g{}{}", scheme.group, zero_points);
    case WeightFormat::int8_group: return fmt::format("int8_g{}{}", scheme.group, zero_points);
    default: return fmt::format("{}{}", to_string(scheme.format), zero_points);
  }
}

ActivationScheme parse_activation_scheme(const std::string& text) {
  std::string name = text;
  ActivationScheme scheme;
  if (spec::take_suffix(name, "_ue8m0")) scheme.ue8m0_scale = true;
  if (spec::take_suffix(name, "_divisor")) scheme.sense = ScaleSense::divisor;
  if (spec::take_suffix(name, "_static")) scheme.static_scale = true;
  for (ActivationFormat format :
       {ActivationFormat::f32, ActivationFormat::bf16, ActivationFormat::fp8_tensor,
        ActivationFormat::fp8_token, ActivationFormat::fp8_block, ActivationFormat::mxfp8,
        ActivationFormat::mxfp4, ActivationFormat::nvfp4}) {
    if (name != to_string(format)) continue;
    scheme.format = format;
    const bool rounds =
        format == ActivationFormat::fp8_token || format == ActivationFormat::fp8_block;
    const bool ok = (!scheme.ue8m0_scale || rounds) &&
                    (!scheme.static_scale || format == ActivationFormat::nvfp4) &&
                    (scheme.sense == ScaleSense::multiplier || scheme.static_scale);
    if (!ok) break;
    if (format == ActivationFormat::fp8_tensor) scheme.static_scale = true;
    return scheme;
  }
  fail(ErrorCode::invalid_argument,
       "activations are f32, bf16, fp8_tensor, fp8_token, fp8_block, mxfp8, mxfp4 or nvfp4 (also "
       "fp8_token_ue8m0, fp8_block_ue8m0, nvfp4_static, nvfp4_static_divisor), got '{}'",
       text);
}

std::string spell(const ActivationScheme& scheme) {
  std::string text = to_string(scheme.format);
  if (scheme.static_scale && scheme.format == ActivationFormat::nvfp4) {
    text += scheme.sense == ScaleSense::divisor ? "_static_divisor" : "_static";
  }
  return text + (scheme.ue8m0_scale ? "_ue8m0" : "");
}

RoutingPattern parse_routing(const std::string& text) {
  if (text == "uniform") return {RoutingKind::uniform, 1.0};
  if (text == "hot") return {RoutingKind::hot, 1.0};
  if (text == "one_rank") return {RoutingKind::one_rank, 1.0};
  if (text == "holes") return {RoutingKind::holes, 1.0};
  if (text == "zipf") return {RoutingKind::zipf, 1.0};
  MOEKIT_CHECK(text.starts_with("zipf:"),
               "routing is uniform, zipf:EXPONENT, hot, one_rank or holes, got '{}'", text);
  const double exponent = spec::parse_number("zipf's exponent", text.substr(5));
  MOEKIT_CHECK(exponent >= 0 && exponent <= 8, "zipf's exponent lies in [0, 8], got {}", exponent);
  return {RoutingKind::zipf, exponent};
}

std::string spell(const RoutingPattern& routing) {
  switch (routing.kind) {
    case RoutingKind::uniform: return "uniform";
    case RoutingKind::zipf: return "zipf:" + spec::spell_number(routing.exponent);
    case RoutingKind::hot: return "hot";
    case RoutingKind::one_rank: return "one_rank";
    case RoutingKind::holes: return "holes";
  }
  return "?";
}

}  // namespace moekit
