// Model families: a table of names and routing recipes, and the engine that applies a row of it to
// a config.json. A new family is a new row.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "moekit/config.h"

namespace moekit::checkpoint {

/// Bits of quantization methods, to say which expert layouts each may write.
enum Method : unsigned {
  kPlain = 1,
  kCompressedTensors = 2,
  kModelOpt = 4,
  kFp8 = 8,
  kMxfp4 = 16,
  kAwq = 32,
  kGptq = 64,
  kPerMatrix = kPlain | kCompressedTensors | kModelOpt | kFp8 | kAwq | kGptq,
};

/// Where the expert matrices of a block stand. Names follow the block's prefix; {e} is the expert.
struct ExpertLayout {
  std::string_view name = {};  ///< for messages
  std::string_view gate = {};  ///< empty: no gate, or gate and up share `up`
  std::string_view up = {};
  std::string_view down = {};
  bool stacked = false;           ///< one tensor for all experts, expert axis first
  bool fused = false;             ///< `up` holds gate and up
  bool interleaved = false;       ///< fused: gate and up alternate (else gate, then up)
  bool input_first = false;       ///< stored [in, out]
  bool down_input_first = false;  ///< the same for down
  bool flat = false;              ///< expert axis folded into the next one
  bool bare = false;  ///< no ".weight": the module's name is the tensor, others join by '_'
};

struct LayoutChoice {
  const ExpertLayout* layout = nullptr;
  unsigned methods = 0;
};

enum class MoeLayers : uint8_t {
  all,
  first_dense,  ///< first_k_dense_replace, moe_layer_freq
  sparse_step,  ///< decoder_sparse_step, mlp_only_layers
  listed,       ///< moe_layers, or every interleave_moe_layer_step-th
  block_types,  ///< layers_block_type, or hybrid_override_pattern
  period,       ///< expert_layer_period, expert_layer_offset
  mlp_types,    ///< mlp_layer_types, or num_hash_layers
};

enum class NormRule : uint8_t { fixed, if_norm_topk_prob, p_norm_key };
enum class GroupRule : uint8_t { none, bias_top2, topk_method };
enum class SharedInter : uint8_t { none, key, count_times_inter };

/// One family. Keys are paths into the config ("ffn_config.moe_top_k"); '|' separates spellings.
struct Family {
  std::string_view model_type = {};
  std::string_view text_key = {};  ///< where the text model's config is nested, empty: at the top
  std::string_view block = {};     ///< prefix of the MoE block's tensors, {L} is the layer
  LayoutChoice layouts[4] = {};
  std::string_view layers_key = "num_hidden_layers";
  std::string_view experts_key = {};
  std::string_view top_k_key = "num_experts_per_tok";
  std::string_view hidden_key = "hidden_size";
  std::string_view inter_key = {};
  std::string_view latent_key = {};
  MoeLayers moe_layers = MoeLayers::all;

  std::string_view router_weight = {};
  std::string_view logit_bias = {};
  std::string_view selection_bias = {};
  std::string_view hash_table = {};
  RouterSpec router{};
  NormRule norm = NormRule::fixed;
  bool scaled = false;  ///< times routed_scaling_factor
  GroupRule groups = GroupRule::none;

  std::string_view activation_key = "hidden_act";
  ActivationSpec activation{};
  bool fixed_activation = false;    ///< `activation` as it stands; the config's name means nothing
  std::string_view limit_key = {};  ///< overrides activation.limit
  bool limit_required = false;
  bool expert_biases = false;
  bool weight_on_input = false;

  std::string_view shared = {};  ///< module prefix of the shared experts, empty: none
  const ExpertLayout* shared_layout = nullptr;
  SharedInter shared_rule = SharedInter::none;
  std::string_view shared_inter_key = {};
  std::string_view shared_gate = {};
  std::string_view latent_in = {};
  std::string_view latent_out = {};
};

enum class LayerKind : uint8_t { dense, moe, hash_moe };

/// A config.json understood: shapes and recipe (number formats still unset) and the layers' kinds.
struct Model {
  const Family* family = nullptr;
  std::string model_type;
  MoeConfig config;
  int64_t vocabulary = 0;  ///< 0 unknown
  std::vector<LayerKind> layers;

  std::string block(int layer) const;
  /// The MoE configuration of a layer (hash routing differs from layer to layer).
  MoeConfig config_of(int layer) const;
};

/// Throws unsupported for a model_type outside the table or a variant that no row covers,
/// corrupt_file for missing, malformed or contradictory values.
Model read_model(const JsonPlace& config);

/// The place of a text model's config (the document itself unless the family nests it).
JsonPlace text_config(const JsonPlace& config, const Family& family);

/// `text` with `{key}` replaced by a number.
std::string fill(std::string_view text, std::string_view key, int64_t value);

}  // namespace moekit::checkpoint
