#include "api/combo_cases.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/check.h"
#include "base/math.h"

namespace moekit::api {
namespace {

// Layers unlike each other in shape, activation function, biases, shared experts, latent width and
// router. Sizes that no block of a format divides are among them; the last has fewer experts than
// most groups have ranks.
constexpr std::array kLayers = {
    "E=8,k=2,H=128,I=64,act=silu,router=softmax_renorm",
    "E=6,k=3,H=160,I=96,act=swiglu_oai,bias=both,router=topk_softmax_bias",
    "E=12,k=4,H=128,I=96,shared_I=64@gate,act=silu@2,router=sigmoid_bias@g4/2@x2.5",
    "E=9,k=3,H=192,latent=96,I=64,shared_I=96,act=relu2,router=sqrt_softplus_bias",
    "E=5,k=1,H=96,I=64,act=gelu,router=sigmoid_input",
    "E=16,k=8,H=64,I=32,act=silu_nogate,router=softmax",
    "E=3,k=2,H=300,I=170,act=gelu_tanh@5,bias=down,router=softmax_pnorm",
};
constexpr std::array kWeights = {
    "bf16",       "f16",   "f32",   "fp8_tensor", "fp8_channel", "fp8_block", "mxfp8",
    "mxfp8_e5m2", "mxfp4", "nvfp4", "int4_g32",   "int4_g32_zp", "int8_g32",  "int8_channel",
};
constexpr std::array kActivations = {
    "f32",   "bf16",  "fp8_tensor", "fp8_token",    "fp8_block",
    "mxfp8", "mxfp4", "nvfp4",      "nvfp4_static", "bf16/fp8_block",
};
constexpr std::array kPlacements = {"linear", "round_robin", "replicas"};
// Ranks, nodes, and tensor-parallel ranks that share an expert.
struct Group {
  int ranks, nodes, tp;
};
constexpr std::array<Group, 8> kGroups = {
    {{1, 1, 1}, {2, 1, 1}, {3, 1, 1}, {4, 1, 1}, {7, 1, 1}, {4, 2, 1}, {7, 3, 1}, {4, 1, 2}}};

std::string to_string(const Group& group) {
  return fmt::format("{}/{}/{}", group.ranks, group.nodes, group.tp);
}

Group parse_group(const std::string& text) {
  Group group{};
  std::sscanf(text.c_str(), "%d/%d/%d", &group.ranks, &group.nodes, &group.tp);
  return group;
}

struct WireName {
  const char* name;
  Wire wire;
};
constexpr std::array<WireName, 7> kWires = {{{"auto", Wire::automatic},
                                             {"f32", Wire::f32},
                                             {"bf16", Wire::bf16},
                                             {"fp8_token", Wire::fp8_token},
                                             {"fp8_block", Wire::fp8_block},
                                             {"mxfp8", Wire::mxfp8},
                                             {"nvfp4", Wire::nvfp4}}};

/// Tokens of one rank, or of all together, and where they go. With `uniform` the layer's own router
/// chooses.
struct Load {
  const char* name;
  const char* routing;
  int64_t tokens;        // of one rank
  int64_t total = -1;    // of all ranks instead
  int64_t per_rank = 0;  // added to `total` for each rank
};
constexpr std::array<Load, 9> kLoads = {{
    {"no tokens", "uniform", 0},
    {"one token a rank", "uniform", 1},
    {"odd", "uniform", 13},
    {"hot expert", "hot", 9},
    {"all to one rank", "one_rank", 8},
    {"zipf", "zipf:1.5", 11},
    {"ids of -1 and doubles", "holes", 15},
    {"one rank with tokens", "uniform", 1, 1, 0},
    {"unequal shares", "uniform", 3, 1, 2},
}};
constexpr const char* kGiven = "given";

template <typename Values>
std::vector<std::string> texts(const Values& values) {
  return {values.begin(), values.end()};
}

template <typename Values>
std::vector<std::string> names(const Values& values) {
  std::vector<std::string> list;
  for (const auto& value : values) list.emplace_back(value.name);
  return list;
}

const char* name_of(Wire wire) {
  for (const WireName& known : kWires) {
    if (known.wire == wire) return known.name;
  }
  return "?";
}

const char* name_of(Combine combine) { return combine == Combine::slots ? "slots" : "rank_sums"; }

std::string flags_of(const PlannedCombo& planned, const ComboRequest& request) {
  const PlanOptions& o = planned.options;
  std::string text =
      fmt::format("--prepare {} --experts {} --ranks {} --wire {} --combine {} --combine-dtype {}",
                  o.prepare, o.backend, planned.combo.ranks, name_of(o.wire), name_of(o.combine),
                  to_string(o.combine_dtype));
  if (o.num_nodes > 1) text += fmt::format(" --nodes {}", o.num_nodes);
  if (o.tp > 1) text += fmt::format(" --tp {}", o.tp);
  if (o.comm.impl != nullptr) text += " --transport mpi";
  if (planned.combo.tokens_total != planned.problem.tokens * (planned.combo.ranks / o.tp)) {
    text += fmt::format(" --tokens-total {}", planned.combo.tokens_total);
  }
  if (o.activations) text += fmt::format(" --activations {}", to_string(*o.activations));
  if (o.num_threads > 0) text += fmt::format(" --threads {}", o.num_threads);
  if (request.seed != 0) text += fmt::format(" --seed {}", request.seed);
  return text;
}

}  // namespace

ComboSpace::ComboSpace(const ComboRequest& request) : request_(request) {
  const bool given = request.problem.has_value();
  values_[layer] = given ? std::vector<std::string>{kGiven} : texts(kLayers);
  values_[weights] = given ? std::vector<std::string>{kGiven} : texts(kWeights);
  values_[activations] = given ? std::vector<std::string>{kGiven} : texts(kActivations);
  // Under an explicit --activations the layer's own do not matter.
  if (request.options.activations && !given) values_[activations] = {kActivations[0]};
  values_[load] = given ? std::vector<std::string>{kGiven} : names(kLoads);
  values_[wire] = request.wire ? std::vector<std::string>{name_of(*request.wire)} : names(kWires);
  values_[combine] = {"slots", "rank_sums"};
  if (request.combine) values_[combine] = {name_of(*request.combine)};
  values_[dtype] = {"f32", "bf16"};
  if (request.combine_dtype) values_[dtype] = {to_string(*request.combine_dtype)};
  values_[placement] = texts(kPlacements);
  if (given) values_[placement] = {request.problem->placement};
  if (request.placement) values_[placement] = {*request.placement};
  const PlanOptions& options = request.options;
  if (request.ranks) {
    values_[ranks] = {to_string(Group{*request.ranks, options.num_nodes, options.tp})};
  } else {
    MOEKIT_CHECK(options.num_nodes == 1 && options.tp == 1 && options.comm.impl == nullptr,
                 "nodes, tensor parallelism and ranks that are processes belong to a number of "
                 "ranks: give --ranks too");
    for (const Group& group : kGroups) values_[ranks].push_back(to_string(group));
  }
  set_pairs();
}

void ComboSpace::set_pairs() {
  // Any problem does: which members there are does not depend on it. A wrong name throws here.
  PlanOptions options = request_.options;
  options.prepare = request_.prepare;
  options.backend = request_.experts;
  options.num_nodes = options.tp = 1;
  options.comm = {};
  options.placement = "linear";  // a file's belongs to the problem that is given
  options.slots_per_rank = 0;
  const LayerSource any = hollow_source(parse_problem("E=2,k=1,H=64,I=32"));
  for (const PairAnswer& answer : explain_plan(any, options, 1, 1).pairs) {
    if (!request_.prepare.empty() && answer.prepare != request_.prepare) continue;
    if (!request_.experts.empty() && answer.experts != request_.experts) continue;
    pairs_.push_back({answer.prepare, answer.experts});
    values_[pair].push_back(answer.prepare + "/" + answer.experts);
  }
}

LayerProblem ComboSpace::problem_of(const Levels& levels) const {
  LayerProblem problem;
  if (request_.problem) {
    problem = *request_.problem;
  } else {
    const Load& chosen = kLoads[static_cast<size_t>(levels[load])];
    problem = parse_problem(fmt::format("{},weights={},activations={},tokens={},routing={}",
                                        text(layer, levels), text(weights, levels),
                                        text(activations, levels), chosen.tokens, chosen.routing));
  }
  problem.placement = text(placement, levels);
  return problem;
}

PlannedCombo ComboSpace::make(const Levels& levels) const {
  PlannedCombo planned;
  planned.problem = problem_of(levels);
  const Group group = parse_group(text(ranks, levels));
  const int64_t shares = group.ranks / group.tp;
  PlanOptions& options = planned.options;
  options = request_.options;
  options.prepare = pairs_[static_cast<size_t>(levels[pair])].prepare;
  options.backend = pairs_[static_cast<size_t>(levels[pair])].experts;
  options.hidden_dtype = DType::bf16;
  options.placement = planned.problem.placement;
  options.num_nodes = group.nodes;
  options.tp = group.tp;
  options.wire = request_.wire ? *request_.wire : kWires[static_cast<size_t>(levels[wire])].wire;
  options.combine = text(combine, levels) == "slots" ? Combine::slots : Combine::rank_sums;
  options.combine_dtype = text(dtype, levels) == "f32" ? DType::f32 : DType::bf16;
  ComboCase& combo = planned.combo;
  combo.ranks = group.ranks;
  combo.tokens_total = checked_mul(planned.problem.tokens, shares, "tokens of all ranks");
  if (request_.tokens_total) {
    combo.tokens_total = *request_.tokens_total;
  } else if (!request_.problem) {
    const Load& chosen = kLoads[static_cast<size_t>(levels[load])];
    if (chosen.total >= 0) combo.tokens_total = chosen.total + chosen.per_rank * shares;
  }
  combo.prepare = options.prepare;
  combo.experts = options.backend;
  combo.problem = spec_of(planned.problem);
  combo.flags = flags_of(planned, request_);
  return planned;
}

bool ComboSpace::accepts(const Levels& levels) const { return answer_of(make(levels)).supported; }

void ComboSpace::visit(const std::function<bool(const PlannedCombo&, int64_t)>& visit) const {
  request_.full ? visit_product(visit) : visit_cover(visit);
}

void ComboSpace::visit_cover(const std::function<bool(const PlannedCombo&, int64_t)>& visit) const {
  std::vector<int> sizes;
  for (const auto& values : values_) sizes.push_back(static_cast<int>(values.size()));
  // Pairs that no number of ranks makes work come once, so that their refusals do not bury the
  // rest.
  std::vector<int> working;
  std::vector<Levels> cases;
  for (int p = 0; p < sizes[pair]; ++p) {
    Levels levels(kDimensions, 0);
    levels[pair] = p;
    bool works = false;
    for (int r = 0; r < sizes[ranks] && !works; ++r) {
      levels[ranks] = r;
      for (int c = 0; c < sizes[combine] && !works; ++c) {
        levels[combine] = c;
        works = accepts(levels);
      }
    }
    if (works) {
      working.push_back(p);
    } else {
      cases.push_back(levels);
    }
  }
  if (!working.empty()) {
    sizes[pair] = static_cast<int>(working.size());
    const auto with_pair = [&](Levels levels) {
      levels[pair] = working[static_cast<size_t>(levels[pair])];
      return levels;
    };
    for (const Levels& levels : cover_pairs(
             sizes, request_.seed, [&](const Levels& l) { return accepts(with_pair(l)); })) {
      cases.push_back(with_pair(levels));
    }
  }
  for (const Levels& levels : cases) {
    if (!visit(make(levels), static_cast<int64_t>(cases.size()))) return;
  }
}

void ComboSpace::visit_product(
    const std::function<bool(const PlannedCombo&, int64_t)>& visit) const {
  int64_t total = 1;
  for (const auto& values : values_) total *= static_cast<int64_t>(values.size());
  // The last dimension turns fastest: neighbours share the layer and the reference.
  Levels levels(kDimensions, 0);
  for (;;) {
    if (!visit(make(levels), total)) return;
    int d = kDimensions - 1;
    while (d >= 0 && ++levels[d] == static_cast<int>(values_[d].size())) levels[d--] = 0;
    if (d < 0) return;
  }
}

PairAnswer answer_of(const PlannedCombo& planned) {
  PairAnswer refused{planned.options.prepare, planned.options.backend, false, false, {}, {}};
  const int64_t shares = planned.combo.ranks / planned.options.tp;
  const int64_t tokens = std::max<int64_t>(1, ceil_div(planned.combo.tokens_total, shares));
  try {
    const Explanation explanation =
        explain_plan(hollow_source(planned.problem), planned.options, planned.combo.ranks, tokens);
    for (const PairAnswer& answer : explanation.pairs) {
      if (answer.prepare == refused.prepare && answer.experts == refused.experts) return answer;
    }
  } catch (const Error& e) {
    if (e.code() != ErrorCode::unsupported) throw;
    refused.reasons.emplace_back(e.what());
  }
  return refused;
}

}  // namespace moekit::api
