#include "problem/spec.h"

#include <algorithm>
#include <set>

#include "base/check.h"
#include "base/math.h"
#include "problem/spec_words.h"

namespace moekit {
namespace {

/// "a/b" or "a": values of the gate/up and of the down matrix.
std::pair<std::string, std::string> split_pair(const std::string& text) {
  const size_t slash = text.find('/');
  if (slash == std::string::npos) return {text, text};
  return {text.substr(0, slash), text.substr(slash + 1)};
}
std::string join_pair(const std::string& a, const std::string& b) {
  return a == b ? a : a + "/" + b;
}

void set_weights(MoeConfig& c, const std::string& text) {
  const auto [gate_up, down] = split_pair(text);
  c.gate_up_weights = c.shared.gate_up_weights = parse_weight_scheme(gate_up);
  c.down_weights = c.shared.down_weights = parse_weight_scheme(down);
}

void set_activations(MoeConfig& c, const std::string& text) {
  const auto [gate_up, down] = split_pair(text);
  c.gate_up_input = c.shared.gate_up_input = parse_activation_scheme(gate_up);
  c.down_input = c.shared.down_input = parse_activation_scheme(down);
}

void set_bias(MoeConfig& c, const std::string& text) {
  static constexpr const char* kWords[] = {"none", "gate_up", "down", "both"};
  const std::string word = text == "0" ? "none" : text == "1" ? "both" : text;
  const auto* found = std::find(std::begin(kWords), std::end(kWords), word);
  MOEKIT_CHECK(found != std::end(kWords), "bias is none, gate_up, down or both, got '{}'", text);
  c.has_gate_up_bias = word == "gate_up" || word == "both";
  c.has_down_bias = word == "down" || word == "both";
}

std::string spell_bias(const MoeConfig& c) {
  if (c.has_gate_up_bias) return c.has_down_bias ? "both" : "gate_up";
  return c.has_down_bias ? "down" : "none";
}

void set_shared(MoeConfig& c, std::string text) {
  const std::string suffix = "@gate";
  c.shared.sigmoid_gate = text.ends_with(suffix);
  if (c.shared.sigmoid_gate) text.resize(text.size() - suffix.size());
  c.shared.inter = spec::parse_count("shared_I", text, c.shared.sigmoid_gate ? 1 : 0);
}

constexpr const char* kKeys[] = {"E",           "k",      "H",       "I",        "shared_I",
                                 "latent",      "act",    "bias",    "router",   "weights",
                                 "activations", "tokens", "routing", "placement"};

void set_value(ProblemSpec& s, const std::string& key, const std::string& value) {
  MoeConfig& c = s.config;
  if (key == "E") {
    c.num_experts = spec::parse_count(key, value, 1);
  } else if (key == "k") {
    c.top_k = spec::parse_count(key, value, 1);
  } else if (key == "H") {
    c.hidden = spec::parse_count(key, value, 1);
  } else if (key == "I") {
    c.inter = spec::parse_count(key, value, 1);
  } else if (key == "shared_I") {
    set_shared(c, value);
  } else if (key == "latent") {
    c.latent = spec::parse_count(key, value, 0);
  } else if (key == "act") {
    c.activation = spec::parse_act(value);
  } else if (key == "bias") {
    set_bias(c, value);
  } else if (key == "router") {
    const spec::RouterChoice choice = spec::parse_router(value);
    c.router = choice.router;
    c.weight_on_input = choice.weight_on_input;
  } else if (key == "weights") {
    set_weights(c, value);
  } else if (key == "activations") {
    set_activations(c, value);
  } else if (key == "tokens") {
    s.tokens = spec::parse_count(key, value, 0);
  } else if (key == "routing") {
    s.routing = parse_routing(value);
  } else if (key == "placement") {
    MOEKIT_CHECK(!value.empty(), "placement is linear, round_robin or a file, got nothing");
    s.placement = value;
  } else {
    std::string keys;
    for (const char* k : kKeys) keys += (keys.empty() ? "" : ", ") + std::string(k);
    fail(ErrorCode::invalid_argument, "a problem has the keys {}, got '{}'", keys, key);
  }
}

void apply_overrides(ProblemSpec& s, const std::string& text) {
  std::set<std::string> seen;
  for (size_t start = 0; start <= text.size();) {
    const size_t comma = std::min(text.find(',', start), text.size());
    const std::string item = text.substr(start, comma - start);
    start = comma + 1;
    const size_t equals = item.find('=');
    MOEKIT_CHECK(equals != std::string::npos && equals > 0,
                 "a problem is NAME, NAME:key=value,... or key=value,...; got '{}' where a "
                 "key=value was due",
                 item);
    const std::string key = item.substr(0, equals);
    MOEKIT_CHECK(seen.insert(key).second, "problem key {} is given twice", key);
    set_value(s, key, item.substr(equals + 1));
  }
}

void check_router(const MoeConfig& c) {
  const RouterSpec& r = c.router;
  if (r.num_groups > 0) {
    MOEKIT_CHECK(c.num_experts % r.num_groups == 0,
                 "router groups must divide the experts: {} experts in {} groups", c.num_experts,
                 r.num_groups);
    MOEKIT_CHECK(r.topk_groups >= 1 && r.topk_groups <= r.num_groups,
                 "a router keeps 1 to {} groups, got {}", r.num_groups, r.topk_groups);
    const int64_t kept = c.num_experts / r.num_groups * r.topk_groups;
    MOEKIT_CHECK(c.top_k <= kept, "k = {} must not exceed the {} experts of the kept groups",
                 c.top_k, kept);
  }
  MOEKIT_CHECK(!c.weight_on_input || c.top_k == 1,
               "router sigmoid_input weights the experts' input, which needs k = 1, got k = {}",
               c.top_k);
}

void check(const ProblemSpec& s) {
  const MoeConfig& c = s.config;
  const std::pair<const char*, int64_t> needed[] = {
      {"E", c.num_experts}, {"k", c.top_k}, {"H", c.hidden}, {"I", c.inter}};
  for (const auto& [key, value] : needed) {
    MOEKIT_CHECK(value > 0, "a problem without a model's name needs E, k, H and I; {} is missing",
                 key);
  }
  MOEKIT_CHECK(c.top_k <= c.num_experts, "k = {} must not exceed E = {}", c.top_k, c.num_experts);
  check_router(c);
  MOEKIT_CHECK(c.num_experts <= 1 << 20, "E is at most 2^20, got {}", c.num_experts);
  const int64_t matrix = checked_mul(c.routed_width(), c.inter, "H * I");
  checked_mul(checked_mul(matrix, c.num_experts, "E * H * I"), 16, "bytes of E * H * I weights");
  checked_mul(checked_mul(std::max<int64_t>(s.tokens, 1), c.top_k, "tokens * k"),
              std::max(c.hidden, c.inter) * 16, "bytes of tokens * k rows");
}

ProblemSpec named(const char* name, const char* values) {
  ProblemSpec s;
  s.name = name;
  apply_overrides(s, values);
  check(s);
  return s;
}

}  // namespace

const std::vector<ProblemSpec>& named_problems() {
  // Shapes and routers of the released checkpoints; weights as released where moekit has the
  // format.
  static const std::vector<ProblemSpec> all = {
      named("qwen3-30b-a3b", "E=128,k=8,H=2048,I=768,router=softmax_renorm"),
      named("mixtral-8x7b", "E=8,k=2,H=4096,I=14336,router=softmax_renorm"),
      named("deepseek-v3",
            "E=256,k=8,H=7168,I=2048,shared_I=2048,router=sigmoid_bias@g8/4@x2.5,"
            "weights=fp8_block"),
      named("qwen3-235b-a22b", "E=128,k=8,H=4096,I=1536,router=softmax_renorm"),
      named("gpt-oss-120b",
            "E=128,k=4,H=2880,I=2880,act=swiglu_oai,bias=both,router=topk_softmax_bias,"
            "weights=mxfp4"),
      named("nemotron-3-nano",
            "E=128,k=6,H=2688,I=1856,shared_I=3712,act=relu2,router=sigmoid_bias@g1/1@x2.5"),
      named("kimi-k2",
            "E=384,k=8,H=7168,I=2048,shared_I=2048,router=sigmoid_bias@g1/1@x2.827,"
            "weights=fp8_block"),
  };
  return all;
}

ProblemSpec parse_spec(const std::string& text) {
  const size_t colon = text.find(':');
  const size_t equals = text.find('=');
  ProblemSpec s;
  if (equals < colon) {  // key=value,...: a later colon belongs to a value
    s.config.router.renormalize = Renormalize::sum;
    apply_overrides(s, text);
  } else {
    const std::string name = text.substr(0, colon);
    std::string names;
    for (const ProblemSpec& known : named_problems()) {
      names += (names.empty() ? "" : ", ") + known.name;
      if (known.name == name) s = known;
    }
    MOEKIT_CHECK(!s.name.empty(),
                 "a problem is one of {}, with ':key=value,...' after it, or key=value,...; got "
                 "'{}'",
                 names, text);
    if (colon != std::string::npos) apply_overrides(s, text.substr(colon + 1));
  }
  check(s);
  return s;
}

std::vector<std::pair<std::string, std::string>> spec_values(const ProblemSpec& s) {
  const MoeConfig& c = s.config;
  return {{"E", std::to_string(c.num_experts)},
          {"k", std::to_string(c.top_k)},
          {"H", std::to_string(c.hidden)},
          {"I", std::to_string(c.inter)},
          {"shared_I", std::to_string(c.shared.inter) + (c.shared.sigmoid_gate ? "@gate" : "")},
          {"latent", std::to_string(c.latent)},
          {"act", spec::spell(c.activation)},
          {"bias", spell_bias(c)},
          {"router", spec::spell(spec::RouterChoice{c.router, c.weight_on_input})},
          {"weights", join_pair(spell(c.gate_up_weights), spell(c.down_weights))},
          {"activations", join_pair(spell(c.gate_up_input), spell(c.down_input))},
          {"tokens", std::to_string(s.tokens)},
          {"routing", spell(s.routing)},
          {"placement", s.placement}};
}

std::string to_string(const ProblemSpec& s) {
  // What a reader would have anyway: the named model's values, or the defaults.
  ProblemSpec base;
  base.config.router.renormalize = Renormalize::sum;
  for (const ProblemSpec& known : named_problems()) {
    if (known.name == s.name) base = known;
  }
  const auto assumed = spec_values(base);
  const auto values = spec_values(s);
  std::string text = base.name.empty() ? "" : base.name + ":";
  const char* separator = "";
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& [key, value] = values[i];
    if (value == assumed[i].second && key != "weights" && key != "tokens") continue;
    text += separator + key + "=" + value;
    separator = ",";
  }
  return text;
}

std::string describe_spec_keys() {
  return "E experts, k of them a token, H hidden, I inner size, latent width (0 = none)\n"
         "shared_I inner size of the shared expert (0 = none), '@gate' for a sigmoid gate\n"
         "act silu | gelu | gelu_tanh | swiglu_oai | relu2 | silu_nogate | gelu_nogate | "
         "gelu_tanh_nogate, '@LIMIT' clamps gated ones\n"
         "bias none | gate_up | down | both\n"
         "router " +
         spec::router_names() +
         "; then '@gGROUPS/KEPT', '@xFACTOR'\n"
         "weights bf16 | f16 | f32 | fp8_tensor | fp8_channel | fp8_block | mxfp8 | mxfp8_e5m2 | "
         "mxfp4 | nvfp4 | int4_gN | int8_gN | int4_channel | int8_channel; '_zp' after integers "
         "adds zero points; A/B gives gate/up and down unlike formats\n"
         "activations f32 | bf16 | fp8_tensor | fp8_token | fp8_block | mxfp8 | mxfp4 | nvfp4; "
         "'_ue8m0' after fp8_token and fp8_block, '_static' or '_static_divisor' after nvfp4\n"
         "tokens of one rank\n"
         "routing uniform | zipf:EXPONENT | hot | one_rank | holes (ids of -1, and one twice)\n"
         "placement linear | round_robin | replicas | FILE\n";
}

}  // namespace moekit
