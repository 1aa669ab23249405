// Every fixture loads with exactly the configuration that its writer used.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "fixture_list.h"
#include "moekit/checkpoint.h"
#include "moekit/error.h"
#include "problem/canonical_layer.h"

namespace moekit {
namespace {

using W = WeightFormat;
using A = ActivationFormat;

struct Row {
  const char* name;
  const char* family;
  const char* method;
  std::vector<int> layers;
  int64_t hidden, inter, experts, top_k;
  W weights;
  A input;
  bool static_input = false;
  ScaleSense sense = ScaleSense::multiplier;
  int64_t shared = 0;
};

constexpr auto kDivisor = ScaleSense::divisor;
constexpr auto kMultiplier = ScaleSense::multiplier;
constexpr const char* kCt = "compressed-tensors";
constexpr const char* kMo = "modelopt";

// One fixture a line.
// clang-format off
std::vector<Row> rows() {
  return {
      {"dbrx-bf16", "dbrx", "", {0}, 128, 32, 8, 2, W::bf16, A::bf16},
      {"deepseekv3-bf16", "deepseek_v3", "", {1}, 128, 32, 8, 3, W::bf16, A::bf16, false, kMultiplier, 64},
      {"deepseekv3-ct-nvfp4", "deepseek_v3", kCt, {1}, 128, 32, 16, 4, W::nvfp4, A::nvfp4, true, kDivisor, 64},
      {"deepseekv3-hf-fp8", "deepseek_v3", "fp8", {1}, 256, 128, 8, 3, W::fp8_block, A::fp8_block, false, kMultiplier, 128},
      {"deepseekv3-modelopt-nvfp4", "deepseek_v3", kMo, {1}, 128, 32, 16, 4, W::nvfp4, A::nvfp4, true, kMultiplier, 64},
      {"deepseekv4-bf16", "deepseek_v4", "", {0}, 128, 32, 8, 3, W::bf16, A::bf16, false, kMultiplier, 32},
      {"gptoss-bf16", "gpt_oss", "", {0}, 128, 32, 8, 3, W::bf16, A::bf16},
      {"gptoss-ct-nvfp4a16", "gpt_oss", kCt, {0}, 160, 64, 8, 3, W::nvfp4, A::bf16},
      {"gptoss-modelopt-nvfp4", "gpt_oss", kMo, {0}, 160, 64, 8, 3, W::nvfp4, A::nvfp4, true},
      {"gptoss-mxfp4", "gpt_oss", "mxfp4", {0}, 160, 64, 8, 3, W::mxfp4, A::bf16},
      {"granitemoe-bf16", "granitemoe", "", {0}, 128, 32, 8, 2, W::bf16, A::bf16},
      {"jamba-f16", "jamba", "", {0}, 128, 32, 8, 2, W::f16, A::f32},
      {"llama4-bf16", "llama4_text", "", {0}, 128, 32, 8, 1, W::bf16, A::bf16, false, kMultiplier, 32},
      {"llama4-ct-fp8dynamic", "llama4_text", kCt, {0}, 128, 32, 8, 1, W::fp8_channel, A::fp8_token, false, kMultiplier, 32},
      {"llama4-modelopt-fp8", "llama4_text", kMo, {0}, 128, 32, 8, 1, W::fp8_tensor, A::fp8_tensor, true, kMultiplier, 32},
      {"minimaxm2-bf16", "minimax_m2", "", {0}, 128, 32, 8, 3, W::bf16, A::bf16},
      {"mixtral-bf16", "mixtral", "", {0}, 128, 32, 8, 2, W::bf16, A::bf16},
      {"mixtral-ct-fp8dynamic", "mixtral", kCt, {0}, 128, 32, 8, 2, W::fp8_channel, A::fp8_token},
      {"mixtral-ct-nvfp4", "mixtral", kCt, {0}, 160, 64, 8, 2, W::nvfp4, A::nvfp4, true, kDivisor},
      {"mixtral-ctfree-fp8dynamic", "mixtral", kCt, {0}, 128, 32, 8, 2, W::fp8_channel, A::fp8_token},
      {"mixtral-modelopt-fp8", "mixtral", kMo, {0}, 128, 32, 8, 2, W::fp8_tensor, A::fp8_tensor, true},
      {"nemotronh-bf16", "nemotron_h", "", {1}, 128, 64, 8, 3, W::bf16, A::bf16, false, kMultiplier, 64},
      {"nemotronh-ct-nvfp4", "nemotron_h", kCt, {1}, 128, 64, 8, 3, W::nvfp4, A::nvfp4, true, kDivisor, 64},
      {"nemotronh-latent-f32", "nemotron_h", "", {1}, 128, 64, 8, 3, W::f32, A::f32, false, kMultiplier, 64},
      {"nemotronh-modelopt-nvfp4", "nemotron_h", kMo, {1}, 128, 96, 8, 3, W::nvfp4, A::nvfp4, true, kMultiplier, 64},
      {"olmoe-bf16", "olmoe", "", {0}, 128, 32, 8, 3, W::bf16, A::bf16},
      {"qwen2moe-bf16", "qwen2_moe", "", {0}, 128, 32, 8, 4, W::bf16, A::bf16, false, kMultiplier, 96},
      {"qwen2moe-ct-fp8dynamic", "qwen2_moe", kCt, {0}, 128, 32, 8, 3, W::fp8_channel, A::fp8_token, false, kMultiplier, 96},
      {"qwen3moe-bf16-sharded", "qwen3_moe", "", {0, 1}, 128, 32, 8, 3, W::bf16, A::bf16},
      {"qwen3moe-ct-fp8", "qwen3_moe", kCt, {0}, 128, 32, 8, 3, W::fp8_tensor, A::fp8_tensor, true},
      {"qwen3moe-ct-fp8block", "qwen3_moe", kCt, {0}, 160, 96, 8, 2, W::fp8_block, A::fp8_block},
      {"qwen3moe-ct-mxfp4", "qwen3_moe", kCt, {0}, 160, 64, 8, 3, W::mxfp4, A::mxfp4},
      {"qwen3moe-ct-mxfp8", "qwen3_moe", kCt, {0}, 128, 32, 8, 3, W::mxfp8, A::mxfp8},
      {"qwen3moe-ct-nvfp4", "qwen3_moe", kCt, {0}, 128, 96, 8, 3, W::nvfp4, A::nvfp4, true, kDivisor},
      {"qwen3moe-ctfree-nvfp4a16", "qwen3_moe", kCt, {0}, 128, 64, 8, 2, W::nvfp4, A::bf16},
      {"qwen3moe-hf-fp8-ue8m0", "qwen3_moe", "fp8", {0}, 128, 128, 8, 3, W::fp8_block, A::fp8_block},
      {"qwen3moe-modelopt-fp8block", "qwen3_moe", kMo, {0}, 128, 128, 8, 4, W::fp8_block, A::bf16},
      {"qwen3moe-modelopt-fp8pc", "qwen3_moe", kMo, {0}, 128, 32, 8, 3, W::fp8_channel, A::fp8_token},
      {"qwen3moe-modelopt-mxfp4", "qwen3_moe", kMo, {0}, 160, 64, 8, 3, W::mxfp4, A::mxfp4},
      {"qwen3moe-modelopt-mxfp8", "qwen3_moe", kMo, {0}, 160, 32, 8, 3, W::mxfp8, A::mxfp8},
      {"qwen3moe-modelopt-nvfp4", "qwen3_moe", kMo, {0}, 128, 64, 8, 3, W::nvfp4, A::nvfp4, true},
      {"qwen3moe-modelopt-w4a16nvfp4", "qwen3_moe", kMo, {0}, 160, 64, 8, 2, W::nvfp4, A::bf16},
  };
}
// clang-format on

std::string path_of(const std::string& name) { return std::string(MOEKIT_FIXTURES) + "/" + name; }

ActivationScheme input_of(const Row& row) {
  ActivationScheme scheme{
      .format = row.input, .static_scale = row.static_input, .sense = row.sense};
  scheme.ue8m0_scale = std::string(row.name).ends_with("ue8m0");
  return scheme;
}

void expect_config(const Row& row, const MoeConfig& c) {
  EXPECT_EQ(c.num_experts, row.experts);
  EXPECT_EQ(c.top_k, row.top_k);
  EXPECT_EQ(c.hidden, row.hidden);
  EXPECT_EQ(c.inter, row.inter);
  EXPECT_EQ(c.gate_up_weights, (WeightScheme{row.weights, 0, false}));
  EXPECT_EQ(c.down_weights, (WeightScheme{row.weights, 0, false}));
  EXPECT_EQ(c.gate_up_input, input_of(row));
  EXPECT_EQ(c.down_input, input_of(row));
  EXPECT_EQ(c.shared.inter, row.shared);
  if (row.shared == 0) return;
  EXPECT_EQ(c.shared.gate_up_weights, c.gate_up_weights);
  EXPECT_EQ(c.shared.down_weights, c.down_weights);
  EXPECT_EQ(c.shared.gate_up_input, c.gate_up_input);
  EXPECT_EQ(c.shared.down_input, c.down_input);
}

TEST(Fixtures, TheTableCoversAllOfThem) {
  std::vector<std::string> names;
  for (const Row& row : rows()) names.push_back(row.name);
  EXPECT_EQ(names, fixture_names());
}

TEST(Fixtures, LoadWithTheWritersConfiguration) {
  for (const Row& row : rows()) {
    SCOPED_TRACE(row.name);
    const CheckpointInfo info = inspect_checkpoint(path_of(row.name), true);
    EXPECT_EQ(info.family, row.family);
    EXPECT_EQ(info.quant_method, row.method);
    EXPECT_FALSE(info.tensors.empty());
    std::vector<int> moe;
    for (const LayerInfo& layer : info.layers) {
      EXPECT_EQ(layer.kind, layer.moe ? "moe" : "dense");
      if (!layer.moe) continue;
      moe.push_back(layer.index);
      expect_config(row, layer.config);
      EXPECT_GT(layer.bytes, 0);
      const auto canonical = load_canonical(path_of(row.name), layer.index);
      expect_config(row, canonical->config);
      EXPECT_EQ(canonical->family, row.family);
      EXPECT_EQ(canonical->layer, layer.index);
      EXPECT_EQ(canonical->experts.size(), static_cast<size_t>(row.experts));
    }
    EXPECT_EQ(moe, row.layers);
    EXPECT_EQ(load_canonical(path_of(row.name), -1)->layer, row.layers.front());
  }
}

TEST(Fixtures, RoutersFollowTheirFamilies) {
  std::map<std::string, RouterSpec> wanted;
  wanted["mixtral-bf16"] = {.renormalize = Renormalize::sum};
  wanted["qwen3moe-ct-fp8"] = {.renormalize = Renormalize::sum};
  wanted["qwen2moe-ct-fp8dynamic"] = {};
  wanted["olmoe-bf16"] = {};
  wanted["jamba-f16"] = {};
  wanted["dbrx-bf16"] = {.renormalize = Renormalize::p_norm, .p = 1.0f};
  wanted["granitemoe-bf16"] = {.scoring = Scoring::logits,
                               .select_on = SelectOn::logits,
                               .weight = RouterWeight::softmax_selected};
  wanted["gptoss-mxfp4"] = wanted["granitemoe-bf16"];
  wanted["gptoss-mxfp4"].has_logit_bias = true;
  wanted["llama4-bf16"] = {.scoring = Scoring::logits,
                           .select_on = SelectOn::logits,
                           .weight = RouterWeight::sigmoid_logit};
  wanted["deepseekv3-hf-fp8"] = {.scoring = Scoring::sigmoid,
                                 .renormalize = Renormalize::sum,
                                 .epsilon = 1e-20f,
                                 .scaling_factor = 2.5f,
                                 .num_groups = 4,
                                 .topk_groups = 2,
                                 .has_selection_bias = true};
  wanted["nemotronh-bf16"] = {.scoring = Scoring::sigmoid,
                              .renormalize = Renormalize::sum,
                              .epsilon = 1e-20f,
                              .scaling_factor = 2.5f,
                              .has_selection_bias = true};
  wanted["minimaxm2-bf16"] = {
      .scoring = Scoring::sigmoid, .renormalize = Renormalize::sum, .has_selection_bias = true};
  wanted["deepseekv4-bf16"] = {.scoring = Scoring::sqrt_softplus,
                               .renormalize = Renormalize::sum,
                               .epsilon = 1e-20f,
                               .scaling_factor = 1.5f,
                               .has_selection_bias = true};
  for (const auto& [name, router] : wanted) {
    EXPECT_EQ(load_canonical(path_of(name), -1)->config.router, router) << name;
  }
}

TEST(Fixtures, ActivationsAndExtrasFollowTheirFamilies) {
  const MoeConfig oss = load_canonical(path_of("gptoss-bf16"), -1)->config;
  EXPECT_EQ(oss.activation, (ActivationSpec{.kind = ActivationKind::swiglu_oai, .limit = 7.0f}));
  EXPECT_TRUE(oss.has_gate_up_bias && oss.has_down_bias);
  const MoeConfig v4 = load_canonical(path_of("deepseekv4-bf16"), -1)->config;
  EXPECT_EQ(v4.activation, (ActivationSpec{.kind = ActivationKind::silu, .limit = 3.0f}));
  const auto latent = load_canonical(path_of("nemotronh-latent-f32"), -1);
  EXPECT_EQ(latent->config.activation,
            (ActivationSpec{.kind = ActivationKind::relu2, .gated = false}));
  EXPECT_EQ(latent->config.latent, 32);
  EXPECT_EQ(latent->latent_in.rows, 32);
  EXPECT_TRUE(latent->experts[0].gate.empty());
  EXPECT_TRUE(load_canonical(path_of("llama4-bf16"), -1)->config.weight_on_input);
  EXPECT_TRUE(load_canonical(path_of("qwen2moe-bf16"), -1)->config.shared.sigmoid_gate);
  EXPECT_FALSE(load_canonical(path_of("deepseekv3-bf16"), -1)->config.shared.sigmoid_gate);
}

TEST(Fixtures, SelectionBiasesKeepTheirDtype) {
  EXPECT_EQ(load_canonical(path_of("deepseekv3-bf16"), -1)->router.selection_bias.dtype,
            DType::f32);
  EXPECT_EQ(load_canonical(path_of("minimaxm2-bf16"), -1)->router.selection_bias.dtype,
            DType::bf16);
}

TEST(Fixtures, ConventionsAreTold) {
  auto conventions = [](const char* name) {
    const auto list = inspect_checkpoint(path_of(name)).conventions;
    return std::map<std::string, std::string>(list.begin(), list.end());
  };
  EXPECT_EQ(conventions("qwen3moe-ct-nvfp4")["global_scale"], "divisor");
  EXPECT_EQ(conventions("qwen3moe-modelopt-nvfp4")["global_scale"], "multiplier");
  EXPECT_EQ(conventions("gptoss-bf16")["row_order"], "interleaved");
  EXPECT_EQ(conventions("gptoss-bf16")["orientation"], "in_out");
  EXPECT_EQ(conventions("granitemoe-bf16")["row_order"], "gate_up");
  EXPECT_EQ(conventions("gptoss-mxfp4")["fp4_nibbles"], "low_first");
  EXPECT_EQ(conventions("nemotronh-latent-f32")["router_dtype"], "F32");
  EXPECT_EQ(inspect_checkpoint(path_of("mixtral-modelopt-fp8")).ignored.size(), 4u);
}

TEST(Fixtures, OnlyMoeLayersCanBeLoaded) {
  for (const auto& [name, layer] : {std::pair{"deepseekv3-bf16", 0},
                                    {"nemotronh-bf16", 0},
                                    {"mixtral-bf16", 1},
                                    {"mixtral-bf16", -2}}) {
    try {
      load_canonical(path_of(name), layer);
      ADD_FAILURE() << name << " layer " << layer;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument) << e.what();
    }
  }
}

}  // namespace
}  // namespace moekit
