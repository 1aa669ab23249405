// Every fixture's golden choice and weights, recipes read from its config.json.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "cpu/router/run_router.h"
#include "support/safetensors_reader.h"
#include "tensor/float_formats.h"

namespace moekit::router {
namespace {

using nlohmann::json;
using Tensors = std::map<std::string, test::GoldenTensor>;

struct Recipe {
  RouterSpec spec;
  int64_t top_k = 0;
  std::string bias_suffix;  ///< of the selection bias, below the layer
};

RouterSpec softmax_spec(bool renormalize) {
  RouterSpec s;
  s.renormalize = renormalize ? Renormalize::sum : Renormalize::none;
  return s;
}

RouterSpec biased_spec(Scoring scoring, float epsilon, float scale) {
  RouterSpec s;
  s.scoring = scoring;
  s.renormalize = Renormalize::sum;
  s.epsilon = epsilon;
  s.scaling_factor = scale;
  s.has_selection_bias = true;
  return s;
}

Recipe recipe_of(const json& config) {
  const std::string family = config["model_type"];
  Recipe r;
  r.top_k = family == "dbrx" ? config["ffn_config"]["moe_top_k"].get<int64_t>()
                             : config["num_experts_per_tok"].get<int64_t>();
  if (family == "mixtral") {
    r.spec = softmax_spec(true);
  } else if (family == "qwen3_moe" || family == "qwen2_moe" || family == "olmoe") {
    r.spec = softmax_spec(config["norm_topk_prob"]);
  } else if (family == "jamba") {
    r.spec = softmax_spec(false);
  } else if (family == "dbrx") {
    r.spec.renormalize = Renormalize::p_norm;
    r.spec.p = config["ffn_config"]["moe_normalize_expert_weights"];
  } else if (family == "gpt_oss" || family == "granitemoe") {
    r.spec.scoring = Scoring::logits;
    r.spec.select_on = SelectOn::logits;
    r.spec.weight = RouterWeight::softmax_selected;
  } else if (family == "llama4_text") {
    r.spec.scoring = Scoring::sigmoid;
    r.spec.select_on = SelectOn::logits;
    r.spec.weight = RouterWeight::sigmoid_logit;
  } else if (family == "deepseek_v3" || family == "nemotron_h") {
    r.spec = biased_spec(Scoring::sigmoid, 1e-20f, config["routed_scaling_factor"]);
    r.spec.num_groups = config["n_group"];
    r.spec.topk_groups = config["topk_group"];
    if (!config["norm_topk_prob"]) r.spec.renormalize = Renormalize::none;
    r.bias_suffix = "gate.e_score_correction_bias";
  } else if (family == "minimax_m2") {
    r.spec = biased_spec(Scoring::sigmoid, 0.0f, 1.0f);
    r.bias_suffix = "e_score_correction_bias";
  } else if (family == "deepseek_v4") {
    r.spec = biased_spec(Scoring::sqrt_softplus, 1e-20f, config["routed_scaling_factor"]);
    r.bias_suffix = "ffn.gate.bias";
  } else {
    ADD_FAILURE() << "no recipe for " << family;
  }
  return r;
}

std::vector<float> selection_bias(const std::string& folder, const std::string& layer,
                                  const std::string& suffix) {
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    const std::string name = file.path().filename();
    if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
    for (const auto& [key, tensor] : test::read_safetensors(file.path())) {
      if (!key.ends_with(suffix) || key.find("." + layer + ".") == std::string::npos) continue;
      if (tensor.dtype == "F32") return tensor.f32();
      std::vector<float> widened;
      for (uint16_t bits : tensor.u16()) widened.push_back(bf16_to_f32(bits));
      return widened;
    }
  }
  ADD_FAILURE() << "no selection bias in " << folder;
  return {};
}

// Row 5 of the input is all zeros: without a bias its logits are equal and the golden's choice is
// arbitrary (fixtures/README.md, section 1).
bool is_arbitrary(const float* logits, const std::vector<float>& bias, int64_t num_experts) {
  return bias.empty() &&
         std::all_of(logits, logits + num_experts, [&](float l) { return l == logits[0]; });
}

std::vector<std::string> fixture_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(MOEKIT_FIXTURES)) {
    if (entry.is_directory()) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class Golden : public ::testing::TestWithParam<std::string> {};

TEST_P(Golden, ChoiceAndWeights) {
  const std::string folder = std::string(MOEKIT_FIXTURES) + "/" + GetParam();
  const Recipe recipe = recipe_of(json::parse(std::ifstream(folder + "/config.json")));
  int layers = 0;
  const Tensors tensors = test::read_safetensors(folder + "/golden.safetensors");
  for (const auto& [name, tensor] : tensors) {
    if (!name.ends_with(".router_logits")) continue;
    ++layers;
    const std::string prefix = name.substr(0, name.find('.'));
    Input in{recipe.spec, tensor.shape[1], recipe.top_k, tensor.f32(), {}, {}, {}};
    if (in.spec.has_selection_bias) {
      in.bias = selection_bias(folder, prefix.substr(5), recipe.bias_suffix);
    }
    const std::vector<int32_t> ids = tensors.at(prefix + ".topk_ids").i32();
    const std::vector<float> weights = tensors.at(prefix + ".topk_weights").f32();
    for (const Router* router : registry()) {
      const Output out = run(*router, in);
      ASSERT_EQ(out.ids.size(), ids.size());
      int64_t compared = 0;
      for (int64_t t = 0; t < in.num_tokens(); ++t) {
        if (is_arbitrary(&in.logits[t * in.num_experts], in.bias, in.num_experts)) continue;
        ++compared;
        for (int64_t i = t * in.top_k; i < (t + 1) * in.top_k; ++i) {
          EXPECT_EQ(out.ids[i], ids[i]) << router->name() << " " << name << " row " << t;
          EXPECT_NEAR(out.weights[i], weights[i], 1e-6 * std::fabs(weights[i]))
              << router->name() << " " << name << " row " << t;
        }
      }
      EXPECT_GE(compared, in.num_tokens() - 1);
    }
  }
  EXPECT_GE(layers, 1);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, Golden, ::testing::ValuesIn(fixture_names()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moekit::router
