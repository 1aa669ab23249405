#include "checkpoint/family_table.h"

namespace moekit::checkpoint {
namespace {

constexpr ExpertLayout kProj = {.name = "per expert gate_proj, up_proj, down_proj",
                                .gate = "experts.{e}.gate_proj",
                                .up = "experts.{e}.up_proj",
                                .down = "experts.{e}.down_proj"};
constexpr ExpertLayout kW123 = {.name = "per expert w1, w3, w2",
                                .gate = "experts.{e}.w1",
                                .up = "experts.{e}.w3",
                                .down = "experts.{e}.w2"};
constexpr ExpertLayout kUpDown = {.name = "per expert up_proj, down_proj",
                                  .gate = "",
                                  .up = "experts.{e}.up_proj",
                                  .down = "experts.{e}.down_proj"};
/// As transformers 5 holds experts in memory: [E, 2I, H] and [E, H, I].
constexpr ExpertLayout kFusedRows = {.name = "stacked gate_up_proj [E, 2I, H]",
                                     .gate = "",
                                     .up = "experts.gate_up_proj",
                                     .down = "experts.down_proj",
                                     .stacked = true,
                                     .fused = true,
                                     .bare = true};
constexpr ExpertLayout kFusedColumns = {.name = "stacked gate_up_proj [E, H, 2I]",
                                        .gate = "",
                                        .up = "experts.gate_up_proj",
                                        .down = "experts.down_proj",
                                        .stacked = true,
                                        .fused = true,
                                        .input_first = true,
                                        .down_input_first = true,
                                        .bare = true};
constexpr ExpertLayout kAlternatingColumns = {
    .name = "stacked gate_up_proj [E, H, 2I], gate and up alternating",
    .gate = "",
    .up = "experts.gate_up_proj",
    .down = "experts.down_proj",
    .stacked = true,
    .fused = true,
    .interleaved = true,
    .input_first = true,
    .down_input_first = true,
    .bare = true};
constexpr ExpertLayout kAlternatingBlocks = {
    .name = "stacked gate_up_proj_blocks [E, 2I, H/32, 16], gate and up alternating",
    .gate = "",
    .up = "experts.gate_up_proj",
    .down = "experts.down_proj",
    .stacked = true,
    .fused = true,
    .interleaved = true,
    .bare = true};
constexpr ExpertLayout kGranite = {.name = "stacked input_linear [E, 2I, H], output_linear",
                                   .gate = "",
                                   .up = "input_linear",
                                   .down = "output_linear",
                                   .stacked = true,
                                   .fused = true};
constexpr ExpertLayout kDbrx = {.name = "flat w1, v1, w2 [E*I, H]",
                                .gate = "experts.mlp.w1",
                                .up = "experts.mlp.v1",
                                .down = "experts.mlp.w2",
                                .stacked = true,
                                .down_input_first = true,
                                .flat = true,
                                .bare = true};
constexpr ExpertLayout kSharedProj = {.name = "gate_proj, up_proj, down_proj",
                                      .gate = "gate_proj",
                                      .up = "up_proj",
                                      .down = "down_proj"};
constexpr ExpertLayout kSharedW123 = {.name = "w1, w3, w2", .gate = "w1", .up = "w3", .down = "w2"};
constexpr ExpertLayout kSharedUpDown = {
    .name = "up_proj, down_proj", .gate = "", .up = "up_proj", .down = "down_proj"};

// ---- routing recipes (docs/numerics.md has the formulas)

constexpr RouterSpec kSoftmax = {};
constexpr RouterSpec kSoftmaxSum = {.renormalize = Renormalize::sum};
constexpr RouterSpec kSoftmaxOfChosen = {.scoring = Scoring::logits,
                                         .select_on = SelectOn::logits,
                                         .weight = RouterWeight::softmax_selected};
constexpr RouterSpec kSigmoidOfChosen = {.scoring = Scoring::logits,
                                         .select_on = SelectOn::logits,
                                         .weight = RouterWeight::sigmoid_logit};
constexpr RouterSpec kBiasedSigmoid = {
    .scoring = Scoring::sigmoid, .epsilon = 1e-20f, .has_selection_bias = true};
constexpr RouterSpec kBiasedSigmoidSum = {
    .scoring = Scoring::sigmoid, .renormalize = Renormalize::sum, .has_selection_bias = true};
constexpr RouterSpec kBiasedSqrtSoftplus = {.scoring = Scoring::sqrt_softplus,
                                            .renormalize = Renormalize::sum,
                                            .epsilon = 1e-20f,
                                            .has_selection_bias = true};

// ---- rows that several families share

constexpr Family qwen(std::string_view model_type, std::string_view text_key,
                      std::string_view block, bool shared, NormRule norm, MoeLayers layers,
                      std::string_view inter_key = "moe_intermediate_size") {
  Family f{.model_type = model_type,
           .text_key = text_key,
           .block = block,
           .layouts = {{&kProj, kPerMatrix}, {&kFusedRows, kPlain}},
           .experts_key = "num_experts|num_local_experts",
           .inter_key = inter_key,
           .moe_layers = layers,
           .router_weight = "gate.weight",
           .router = norm == NormRule::fixed ? kSoftmaxSum : kSoftmax,
           .norm = norm};
  if (shared) {
    f.shared = "shared_expert";
    f.shared_layout = &kSharedProj;
    f.shared_rule = SharedInter::key;
    f.shared_inter_key = "shared_expert_intermediate_size";
    f.shared_gate = "shared_expert_gate.weight";
  }
  return f;
}

constexpr Family deepseek(std::string_view model_type, bool bias) {
  Family f{.model_type = model_type,
           .text_key = "",
           .block = "model.layers.{L}.mlp.",
           .layouts = {{&kProj, kPerMatrix}, {&kFusedRows, kPlain}},
           .experts_key = "n_routed_experts|num_local_experts",
           .inter_key = "moe_intermediate_size",
           .moe_layers = MoeLayers::first_dense,
           .router_weight = "gate.weight",
           .router = bias ? kBiasedSigmoid : RouterSpec{.epsilon = 1e-20f},
           .norm = NormRule::if_norm_topk_prob,
           .scaled = true,
           .groups = bias ? GroupRule::bias_top2 : GroupRule::topk_method,
           .shared = "shared_experts",
           .shared_layout = &kSharedProj,
           .shared_rule = SharedInter::count_times_inter};
  if (bias) f.selection_bias = "gate.e_score_correction_bias";
  return f;
}

constexpr Family llama4(std::string_view model_type, std::string_view text_key,
                        std::string_view block) {
  return {.model_type = model_type,
          .text_key = text_key,
          .block = block,
          .layouts = {{&kFusedColumns, kPlain | kModelOpt}, {&kProj, kCompressedTensors}},
          .experts_key = "num_local_experts",
          .inter_key = "intermediate_size",
          .moe_layers = MoeLayers::listed,
          .router_weight = "router.weight",
          .router = kSigmoidOfChosen,
          .weight_on_input = true,
          .shared = "shared_expert",
          .shared_layout = &kSharedProj,
          .shared_rule = SharedInter::key,
          .shared_inter_key = "intermediate_size"};
}

constexpr Family kFamilies[] = {
    {.model_type = "mixtral",
     .text_key = "",
     .block = "model.layers.{L}.block_sparse_moe.",
     .layouts = {{&kW123, kPerMatrix}, {&kProj, kCompressedTensors}},
     .experts_key = "num_local_experts",
     .inter_key = "intermediate_size",
     .router_weight = "gate.weight",
     .router = kSoftmaxSum},
    qwen("qwen2_moe", "", "model.layers.{L}.mlp.", true, NormRule::if_norm_topk_prob,
         MoeLayers::sparse_step),
    qwen("qwen3_moe", "", "model.layers.{L}.mlp.", false, NormRule::if_norm_topk_prob,
         MoeLayers::sparse_step),
    qwen("qwen3_next", "", "model.layers.{L}.mlp.", true, NormRule::if_norm_topk_prob,
         MoeLayers::sparse_step),
    // Qwen3.5 always divides by the sum and has no dense layers.
    qwen("qwen3_5_moe", "text_config", "model.language_model.layers.{L}.mlp.", true,
         NormRule::fixed, MoeLayers::all),
    qwen("qwen3_5_moe_text", "", "model.layers.{L}.mlp.", true, NormRule::fixed, MoeLayers::all),
    qwen("olmoe", "", "model.layers.{L}.mlp.", false, NormRule::if_norm_topk_prob, MoeLayers::all,
         "intermediate_size"),
    deepseek("deepseek_v2", false),
    deepseek("deepseek_v3", true),
    deepseek("kimi_k2", true),
    deepseek("glm4_moe", true),
    {.model_type = "nemotron_h",
     .text_key = "",
     .block = "backbone.layers.{L}.mixer.",
     .layouts = {{&kUpDown, kPerMatrix}},
     .experts_key = "n_routed_experts",
     .inter_key = "moe_intermediate_size",
     .latent_key = "moe_latent_size",
     .moe_layers = MoeLayers::block_types,
     .router_weight = "gate.weight",
     .selection_bias = "gate.e_score_correction_bias",
     .router = kBiasedSigmoid,
     .norm = NormRule::if_norm_topk_prob,
     .scaled = true,
     .groups = GroupRule::bias_top2,
     .activation_key = "mlp_hidden_act",
     .activation = {.kind = ActivationKind::relu2, .gated = false},
     .shared = "shared_experts",
     .shared_layout = &kSharedUpDown,
     .shared_rule = SharedInter::key,
     .shared_inter_key = "moe_shared_expert_intermediate_size",
     .latent_in = "fc1_latent_proj.weight",
     .latent_out = "fc2_latent_proj.weight"},
    {.model_type = "gpt_oss",
     .text_key = "",
     .block = "model.layers.{L}.mlp.",
     .layouts = {{&kAlternatingColumns, kPlain | kModelOpt},
                 {&kAlternatingBlocks, kMxfp4},
                 {&kProj, kCompressedTensors}},
     .experts_key = "num_local_experts",
     .inter_key = "intermediate_size",
     .router_weight = "router.weight",
     .logit_bias = "router.bias",
     .router = kSoftmaxOfChosen,
     .activation = {.kind = ActivationKind::swiglu_oai, .limit = 7.0f},
     .fixed_activation = true,
     .limit_key = "swiglu_limit",
     .expert_biases = true},
    llama4("llama4_text", "", "model.layers.{L}.feed_forward."),
    llama4("llama4", "text_config", "language_model.model.layers.{L}.feed_forward."),
    {.model_type = "granitemoe",
     .text_key = "",
     .block = "model.layers.{L}.block_sparse_moe.",
     .layouts = {{&kGranite, kPlain}},
     .experts_key = "num_local_experts",
     .inter_key = "intermediate_size",
     .router_weight = "router.layer.weight",
     .router = kSoftmaxOfChosen},
    {.model_type = "jamba",
     .text_key = "",
     .block = "model.layers.{L}.feed_forward.",
     .layouts = {{&kProj, kPerMatrix}, {&kFusedRows, kPlain}},
     .experts_key = "num_experts",
     .inter_key = "intermediate_size",
     .moe_layers = MoeLayers::period,
     .router_weight = "router.weight",
     .router = kSoftmax},
    {.model_type = "dbrx",
     .text_key = "",
     .block = "transformer.blocks.{L}.ffn.",
     .layouts = {{&kDbrx, kPlain}},
     .layers_key = "n_layers|num_hidden_layers",
     .experts_key = "ffn_config.moe_num_experts",
     .top_k_key = "ffn_config.moe_top_k",
     .hidden_key = "d_model|hidden_size",
     .inter_key = "ffn_config.ffn_hidden_size",
     .router_weight = "router.layer.weight",
     .router = kSoftmax,
     .norm = NormRule::p_norm_key,
     .activation_key = "ffn_config.ffn_act_fn.name"},
    {.model_type = "minimax_m2",
     .text_key = "",
     .block = "model.layers.{L}.block_sparse_moe.",
     .layouts = {{&kW123, kPerMatrix}, {&kProj, kCompressedTensors}},
     .experts_key = "num_local_experts",
     .inter_key = "intermediate_size",
     .router_weight = "gate.weight",
     .selection_bias = "e_score_correction_bias",
     .router = kBiasedSigmoidSum},
    {.model_type = "deepseek_v4",
     .text_key = "",
     .block = "model.layers.{L}.ffn.",
     .layouts = {{&kW123, kPerMatrix}},
     .experts_key = "n_routed_experts",
     .inter_key = "moe_intermediate_size",
     .moe_layers = MoeLayers::mlp_types,
     .router_weight = "gate.weight",
     .selection_bias = "gate.bias",
     .hash_table = "gate.tid2eid",
     .router = kBiasedSqrtSoftplus,
     .scaled = true,
     .limit_key = "swiglu_limit",
     .limit_required = true,
     .shared = "shared_experts",
     .shared_layout = &kSharedW123,
     .shared_rule = SharedInter::count_times_inter},
};

}  // namespace

std::span<const Family> families() { return kFamilies; }

}  // namespace moekit::checkpoint
