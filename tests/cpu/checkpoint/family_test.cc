// Families and layouts without a fixture, written by hand: names, nesting, which layers are MoE,
// and stacks whose orientation no shape can tell.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "checkpoint_writer.h"
#include "moekit/checkpoint.h"
#include "problem/canonical_layer.h"
#include "quant/stored_codec.h"

namespace moekit {
namespace {

constexpr int64_t kHidden = 16;
constexpr int64_t kInter = 8;
constexpr int64_t kExperts = 4;

/// Gate, up and down of `module` with a seed of its own.
void add_mlp(TestCheckpoint& ckpt, const std::string& module, const std::string (&names)[3],
             int64_t hidden, int64_t inter, uint32_t seed) {
  ckpt.tensors[module + names[0] + ".weight"] = scattered({inter, hidden}, seed);
  ckpt.tensors[module + names[1] + ".weight"] = scattered({inter, hidden}, seed + 1);
  ckpt.tensors[module + names[2] + ".weight"] = scattered({hidden, inter}, seed + 2);
}

const std::string kProj[3] = {"gate_proj", "up_proj", "down_proj"};
const std::string kW[3] = {"w1", "w3", "w2"};

void add_experts(TestCheckpoint& ckpt, const std::string& block, const std::string (&names)[3]) {
  for (int64_t e = 0; e < kExperts; ++e) {
    add_mlp(ckpt, block + "experts." + std::to_string(e) + ".", names, kHidden, kInter,
            static_cast<uint32_t>(10 * e));
  }
}

std::shared_ptr<const CanonicalLayer> load(const TestCheckpoint& ckpt, int layer = -1) {
  const TempDir dir;
  ckpt.write(dir.path());
  inspect_checkpoint(dir.path());
  return load_canonical(dir.path(), layer);
}

float value(const StoredMatrix& m, int64_t row, int64_t col) {
  float w = 0;
  quant::decode_weights(m, row, col, 1, &w);
  return w;
}

constexpr char kSizes[] =
    R"("num_hidden_layers":2,"hidden_size":16,"num_experts_per_tok":2,"hidden_act":"silu",)";

TEST(Families, Qwen3NextHasAGatedSharedExpert) {
  TestCheckpoint ckpt;
  ckpt.config = std::string("{\"model_type\":\"qwen3_next\",") + kSizes +
                R"("num_experts":4,"moe_intermediate_size":8,"shared_expert_intermediate_size":12,)"
                R"("norm_topk_prob":true,"decoder_sparse_step":2,"mlp_only_layers":[]})";
  const std::string block = "model.layers.1.mlp.";
  ckpt.tensors[block + "gate.weight"] = scattered({kExperts, kHidden}, 1);
  ckpt.tensors[block + "shared_expert_gate.weight"] = scattered({1, kHidden}, 2);
  add_mlp(ckpt, block + "shared_expert.", kProj, kHidden, 12, 77);
  add_experts(ckpt, block, kProj);
  const auto layer = load(ckpt);
  EXPECT_EQ(layer->layer, 1) << "decoder_sparse_step 2 leaves layer 0 dense";
  EXPECT_EQ(layer->config.shared.inter, 12);
  EXPECT_TRUE(layer->config.shared.sigmoid_gate);
  EXPECT_EQ(layer->config.router.renormalize, Renormalize::sum);
  EXPECT_EQ(value(layer->shared.up, 3, 5), scatter(78, 3 * kHidden + 5));
  ckpt.config.replace(ckpt.config.find("[]"), 2, "[1]");
  const TempDir dir;
  ckpt.write(dir.path());
  expect_error([&] { load_canonical(dir.path(), -1); }, "invalid_argument", {"dense"});
}

TEST(Families, Qwen35NestsItsConfigAndStacksItsExperts) {
  TestCheckpoint ckpt;
  ckpt.config =
      std::string(
          R"({"model_type":"qwen3_5_moe","text_config":{"model_type":"qwen3_5_moe_text",)") +
      kSizes + R"("num_experts":4,"moe_intermediate_size":8,"shared_expert_intermediate_size":8}})";
  for (const int layer : {0, 1}) {
    const std::string block = "model.language_model.layers." + std::to_string(layer) + ".mlp.";
    ckpt.tensors[block + "gate.weight"] = scattered({kExperts, kHidden}, 1);
    ckpt.tensors[block + "shared_expert_gate.weight"] = scattered({1, kHidden}, 2);
    add_mlp(ckpt, block + "shared_expert.", kProj, kHidden, kInter, 77);
    ckpt.tensors[block + "experts.gate_up_proj"] = scattered({kExperts, 2 * kInter, kHidden}, 3);
    ckpt.tensors[block + "experts.down_proj"] = scattered({kExperts, kHidden, kInter}, 4);
  }
  const auto layer = load(ckpt, 1);
  EXPECT_EQ(layer->config.router.renormalize, Renormalize::sum);
  // 2I = H here: only the declared architecture says that rows are outputs.
  EXPECT_EQ(value(layer->experts[2].gate, 3, 5), scatter(3, (2 * 2 * kInter + 3) * kHidden + 5));
  EXPECT_EQ(value(layer->experts[2].up, 3, 5),
            scatter(3, (2 * 2 * kInter + kInter + 3) * kHidden + 5));
  EXPECT_EQ(value(layer->experts[2].down, 7, 1), scatter(4, (2 * kHidden + 7) * kInter + 1));
}

TEST(Families, MultimodalLlama4StacksInputFirst) {
  TestCheckpoint ckpt;
  ckpt.config =
      R"({"model_type":"llama4","text_config":{"model_type":"llama4_text","num_hidden_layers":2,)"
      R"("hidden_size":16,"num_experts_per_tok":1,"hidden_act":"silu","num_local_experts":4,)"
      R"("intermediate_size":8,"intermediate_size_mlp":64,"interleave_moe_layer_step":2}})";
  const std::string block = "language_model.model.layers.1.feed_forward.";
  ckpt.tensors[block + "router.weight"] = scattered({kExperts, kHidden}, 1);
  add_mlp(ckpt, block + "shared_expert.", kProj, kHidden, kInter, 77);
  ckpt.tensors[block + "experts.gate_up_proj"] = scattered({kExperts, kHidden, 2 * kInter}, 3);
  ckpt.tensors[block + "experts.down_proj"] = scattered({kExperts, kInter, kHidden}, 4);
  const auto layer = load(ckpt);
  EXPECT_EQ(layer->layer, 1);
  EXPECT_TRUE(layer->config.weight_on_input);
  // The same square shape as above, the other orientation.
  EXPECT_EQ(value(layer->experts[2].gate, 3, 5), scatter(3, (2 * kHidden + 5) * 2 * kInter + 3));
  EXPECT_EQ(value(layer->experts[2].up, 3, 5),
            scatter(3, (2 * kHidden + 5) * 2 * kInter + kInter + 3));
  EXPECT_EQ(value(layer->experts[2].down, 7, 1), scatter(4, (2 * kInter + 1) * kHidden + 7));
}

TestCheckpoint deepseek(const std::string& type, const std::string& extra) {
  TestCheckpoint ckpt;
  ckpt.config =
      "{\"model_type\":\"" + type + "\"," + kSizes +
      R"("n_routed_experts":4,"moe_intermediate_size":8,"n_shared_experts":2,)"
      R"("first_k_dense_replace":1,"norm_topk_prob":false,"routed_scaling_factor":16.0,)" +
      extra + "}";
  const std::string block = "model.layers.1.mlp.";
  ckpt.tensors[block + "gate.weight"] = scattered({kExperts, kHidden}, 1);
  add_mlp(ckpt, block + "shared_experts.", kProj, kHidden, 2 * kInter, 77);
  add_experts(ckpt, block, kProj);
  return ckpt;
}

TEST(Families, DeepSeekV2RoutesByGroupMaximum) {
  const auto grouped = load(deepseek(
      "deepseek_v2", R"("topk_method":"group_limited_greedy","n_group":2,"topk_group":1)"));
  EXPECT_EQ(grouped->config.router, (RouterSpec{.epsilon = 1e-20f,
                                                .scaling_factor = 16.0f,
                                                .num_groups = 2,
                                                .topk_groups = 1,
                                                .group_score = GroupScore::max}));
  EXPECT_EQ(grouped->config.shared.inter, 2 * kInter);
  const auto greedy = load(
      deepseek("deepseek_v2",
               R"("topk_method":"greedy","n_group":1,"topk_group":1,"scoring_func":"sigmoid")"));
  EXPECT_EQ(greedy->config.router.num_groups, 0);
  EXPECT_EQ(greedy->config.router.scoring, Scoring::sigmoid);
}

TEST(Families, UnknownRoutingIsRefused) {
  const TempDir dir;
  deepseek("deepseek_v2", R"("topk_method":"noaux_tc")").write(dir.path());
  expect_error([&] { load_canonical(dir.path(), 1); }, "unsupported", {"topk_method", "noaux_tc"});
  deepseek("deepseek_v3", R"("scoring_func":"softmax","n_group":1,"topk_group":1)")
      .write(dir.path());
  expect_error([&] { load_canonical(dir.path(), 1); }, "unsupported", {"scoring_func", "softmax"});
}

TEST(Families, KimiAndGlmReadAsDeepSeekV3) {
  for (const char* type : {"kimi_k2", "glm4_moe"}) {
    TestCheckpoint ckpt = deepseek(type, R"("topk_method":"noaux_tc","n_group":1,"topk_group":1)");
    ckpt.tensors["model.layers.1.mlp.gate.e_score_correction_bias"] =
        tensor_of<float>(DType::f32, {4}, {1, 2, 3, 4});
    const auto layer = load(ckpt);
    EXPECT_EQ(layer->config.router.scoring, Scoring::sigmoid);
    EXPECT_TRUE(layer->config.router.has_selection_bias);
    EXPECT_EQ(quant::element(layer->router.selection_bias, 2), 3.0f);
  }
}

TestCheckpoint deepseek_v4(DType id_type) {
  TestCheckpoint ckpt;
  ckpt.config =
      std::string("{\"model_type\":\"deepseek_v4\",") + kSizes +
      R"("n_routed_experts":4,"moe_intermediate_size":8,"n_shared_experts":1,"vocab_size":3,)"
      R"("scoring_func":"sqrtsoftplus","routed_scaling_factor":1.5,"swiglu_limit":10,"num_hash_layers":1})";
  for (const int layer : {0, 1}) {
    const std::string block = "model.layers." + std::to_string(layer) + ".ffn.";
    ckpt.tensors[block + "gate.weight"] = scattered({kExperts, kHidden}, 1);
    add_mlp(ckpt, block + "shared_experts.", kW, kHidden, kInter, 77);
    add_experts(ckpt, block, kW);
  }
  ckpt.tensors["model.layers.0.ffn.gate.tid2eid"] =
      id_type == DType::i64 ? tensor_of<int64_t>(id_type, {3, 2}, {0, 1, 2, 3, 1, 0})
                            : tensor_of<int32_t>(id_type, {3, 2}, {0, 1, 2, 3, 1, 0});
  ckpt.tensors["model.layers.1.ffn.gate.bias"] = scattered({4}, 5);
  return ckpt;
}

TEST(Families, DeepSeekV4RoutesItsFirstLayersByToken) {
  for (const DType type : {DType::i32, DType::i64}) {
    const auto hashed = load(deepseek_v4(type), 0);
    EXPECT_TRUE(hashed->config.router.hash_routing);
    EXPECT_FALSE(hashed->config.router.has_selection_bias);
    ASSERT_EQ(hashed->router.hash_rows, 3);
    EXPECT_EQ(std::vector<int64_t>(hashed->router.hash_table, hashed->router.hash_table + 6),
              (std::vector<int64_t>{0, 1, 2, 3, 1, 0}));
  }
  const auto scored = load(deepseek_v4(DType::i32), 1);
  EXPECT_FALSE(scored->config.router.hash_routing);
  EXPECT_TRUE(scored->config.router.has_selection_bias);
  TestCheckpoint bad = deepseek_v4(DType::i32);
  bad.tensors["model.layers.0.ffn.gate.tid2eid"] =
      tensor_of<int32_t>(DType::i32, {3, 2}, {0, 1, 2, 4, 1, 0});
  const TempDir dir;
  bad.write(dir.path());
  expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file", {"tid2eid", "4", "token 1"});
}

TEST(Families, NemotronTakesThePatternOfItsBlocks) {
  TestCheckpoint ckpt;
  ckpt.config =
      R"({"model_type":"nemotron_h","hidden_size":16,"num_experts_per_tok":2,"n_routed_experts":4,)"
      R"("moe_intermediate_size":8,"moe_shared_expert_intermediate_size":8,"n_shared_experts":1,)"
      R"("mlp_hidden_act":"relu2","n_group":1,"topk_group":1,"norm_topk_prob":true,)"
      R"("time_step_limit":[0.0, Infinity],"routed_scaling_factor":2.5,"hybrid_override_pattern":"M*E-"})";
  const std::string block = "backbone.layers.2.mixer.";
  ckpt.tensors[block + "gate.weight"] = scattered({kExperts, kHidden}, 1);
  ckpt.tensors[block + "gate.e_score_correction_bias"] =
      tensor_of<float>(DType::f32, {4}, {1, 2, 3, 4});
  for (const std::string module :
       {"experts.0.", "experts.1.", "experts.2.", "experts.3.", "shared_experts."}) {
    ckpt.tensors[block + module + "up_proj.weight"] = scattered({kInter, kHidden}, 3);
    ckpt.tensors[block + module + "down_proj.weight"] = scattered({kHidden, kInter}, 4);
  }
  ckpt.tensors["backbone.layers.1.mixer.q_proj.weight"] = scattered({4, 4}, 1);
  const auto layer = load(ckpt);
  EXPECT_EQ(layer->layer, 2);
  EXPECT_FALSE(layer->config.activation.gated);
  EXPECT_TRUE(layer->shared.gate.empty());
}

/// GPT-OSS in ModelOpt's mxfp4: codes and scales run along the output axis.
TEST(Families, GptOssMxfp4OfModelOptPacksOutputs) {
  constexpr int64_t kH = 32, kI = 32;
  TestCheckpoint ckpt;
  ckpt.config =
      R"({"model_type":"gpt_oss","num_hidden_layers":1,"hidden_size":32,"num_experts_per_tok":2,)"
      R"("num_local_experts":4,"intermediate_size":32,)"
      R"("quantization_config":{"quant_method":"modelopt","quant_algo":"mxfp4","ignore":["*.router"]}})";
  const std::string block = "model.layers.0.mlp.";
  ckpt.tensors[block + "router.weight"] = scattered({kExperts, kH}, 1);
  ckpt.tensors[block + "router.bias"] = scattered({kExperts}, 2);
  ckpt.tensors[block + "experts.gate_up_proj_bias"] = scattered({kExperts, 2 * kI}, 3);
  ckpt.tensors[block + "experts.down_proj_bias"] = scattered({kExperts, kH}, 4);
  auto bytes = [](std::vector<int64_t> shape, int64_t base, int64_t span) {
    std::vector<uint8_t> v;
    for (int64_t i = 0; i < count_of(shape); ++i)
      v.push_back(static_cast<uint8_t>(base + (i * 7) % span));
    return tensor_of(DType::u8, shape, v);
  };
  ckpt.tensors[block + "experts.gate_up_proj"] = bytes({kExperts, kH, kI}, 0, 251);
  ckpt.tensors[block + "experts.gate_up_proj_weight_scale"] = bytes({kExperts, kH, 2}, 120, 11);
  ckpt.tensors[block + "experts.down_proj"] = bytes({kExperts, kI, kH / 2}, 0, 251);
  ckpt.tensors[block + "experts.down_proj_weight_scale"] = bytes({kExperts, kI, 1}, 120, 11);
  const auto layer = load(ckpt);
  EXPECT_EQ(layer->config.gate_up_weights.format, WeightFormat::mxfp4);
  for (const auto& [e, n, k] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 0, 0}, {3, 31, 31}, {2, 17, 5}}) {
    const StoredExpert& expert = layer->experts[static_cast<size_t>(e)];
    for (const int half : {0, 1}) {
      const int64_t column = 2 * n + half;  // alternating
      const int64_t byte = ((e * kH + k) * kI + column / 2) * 7 % 251;
      const int64_t scale = 120 + ((e * kH + k) * 2 + column / 32) * 7 % 11;
      const float want = e2m1_to_f32(static_cast<uint8_t>((byte >> (4 * half)) & 15)) *
                         e8m0_to_f32(static_cast<uint8_t>(scale));
      EXPECT_EQ(value(half == 0 ? expert.gate : expert.up, n, k), want);
    }
    const int64_t byte = ((e * kI + k) * (kH / 2) + n / 2) * 7 % 251;
    const int64_t scale = 120 + (e * kI + k) * 7 % 11;
    EXPECT_EQ(value(expert.down, n, k),
              e2m1_to_f32(static_cast<uint8_t>((byte >> (n % 2 * 4)) & 15)) *
                  e8m0_to_f32(static_cast<uint8_t>(scale)));
  }
}

TEST(Families, ModelOptMixedPrecisionNamesItsLayers) {
  TestCheckpoint ckpt;
  ckpt.config =
      std::string("{\"model_type\":\"qwen3_moe\",") + kSizes +
      R"("num_experts":4,"moe_intermediate_size":8,"norm_topk_prob":true,"quantization_config":)"
      R"({"quant_method":"modelopt","quant_algo":"MIXED_PRECISION","quantized_layers":{)"
      R"("model.layers.0.mlp.experts":{"quant_algo":"FP8_PER_CHANNEL_PER_TOKEN"}}}})";
  for (const int layer : {0, 1}) {
    const std::string block = "model.layers." + std::to_string(layer) + ".mlp.";
    ckpt.tensors[block + "gate.weight"] = scattered({kExperts, kHidden}, 1);
    add_experts(ckpt, block, kProj);
    if (layer == 1) continue;
    for (int64_t e = 0; e < kExperts; ++e) {
      for (const std::string& role : kProj) {
        const std::string name = block + "experts." + std::to_string(e) + "." + role;
        TestTensor& w = ckpt.tensors[name + ".weight"];
        w = tensor_of(DType::f8_e4m3, w.shape,
                      std::vector<uint8_t>(static_cast<size_t>(count_of(w.shape)), 0x38));
        ckpt.tensors[name + ".weight_scale"] = tensor_of(
            DType::f32, {w.shape[0]}, std::vector<float>(static_cast<size_t>(w.shape[0]), 0.5f));
      }
    }
  }
  EXPECT_EQ(load(ckpt, 0)->config.gate_up_weights.format, WeightFormat::fp8_channel);
  EXPECT_EQ(load(ckpt, 1)->config.gate_up_weights.format, WeightFormat::bf16);
  EXPECT_EQ(value(load(ckpt, 0)->experts[1].up, 1, 1), 0.5f);
}

TEST(Families, ConfigFileOfModelOptIsReadWhereTheConfigSaysNothing) {
  const TempDir dir;
  const std::string source = std::string(MOEKIT_FIXTURES) + "/qwen3moe-modelopt-mxfp8";
  std::filesystem::copy(source, dir.path(), std::filesystem::copy_options::recursive);
  std::ifstream in(source + "/config.json");
  std::string text((std::istreambuf_iterator<char>(in)), {});
  text.replace(text.find("quantization_config"), 19, "former_quantization");
  put_text(dir.file("config.json"), text);
  EXPECT_EQ(load_canonical(dir.path(), 0)->config.gate_up_weights.format, WeightFormat::mxfp8);
}

}  // namespace
}  // namespace moekit
