// What a MoE layer is: shapes, activation function, router recipe, shared experts. Plain
// aggregates, no behaviour.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "moekit/dtype.h"
#include "moekit/quant.h"

namespace moekit {

enum class ActivationKind : uint8_t {
  silu,        ///< x * sigmoid(x)
  gelu,        ///< x * Phi(x), erf form
  gelu_tanh,   ///< tanh approximation
  swiglu_oai,  ///< gate * sigmoid(alpha * gate) * (up + beta); gated only (GPT-OSS)
  relu2,       ///< max(0, x)^2
};

/// With gate: act(min(g, limit)) * clamp(u, -limit, limit). Without: act(u).
struct ActivationSpec {
  ActivationKind kind = ActivationKind::silu;
  bool gated = true;
  float limit = std::numeric_limits<float>::infinity();  ///< 0 or more
  float alpha = 1.702f;                                  ///< swiglu_oai
  float beta = 1.0f;                                     ///< swiglu_oai: added to up
  friend bool operator==(const ActivationSpec&, const ActivationSpec&) = default;
};

/// s = scoring(logits), fp32.
enum class Scoring : uint8_t { softmax, sigmoid, sqrt_softplus, logits };
/// What top-k looks at before the selection bias is added.
enum class SelectOn : uint8_t { scores, logits };
/// The raw weight of a chosen expert.
enum class RouterWeight : uint8_t {
  scores,            ///< s[id], never with the selection bias
  softmax_selected,  ///< softmax over the k chosen logits (GPT-OSS, Granite-MoE)
  sigmoid_logit,     ///< sigmoid(l[id]) (Llama 4)
};
enum class Renormalize : uint8_t {
  none,
  sum,      ///< w / (sum + epsilon)
  max_sum,  ///< w / max(sum, epsilon)
  p_norm,   ///< w / ||w||_p (DBRX)
};
enum class GroupScore : uint8_t { max, top2_sum };

/// Router recipe. Total order of selection: higher value first, ties to the lower id; NaN counts as
/// below -inf.
struct RouterSpec {
  Scoring scoring = Scoring::softmax;
  SelectOn select_on = SelectOn::scores;
  RouterWeight weight = RouterWeight::scores;
  Renormalize renormalize = Renormalize::none;
  float epsilon = 0.0f;
  float p = 1.0f;               ///< p_norm
  float scaling_factor = 1.0f;  ///< multiplies the final weights
  int32_t num_groups = 0;       ///< 0 or 1: ungrouped
  int32_t topk_groups = 0;
  GroupScore group_score = GroupScore::top2_sum;
  bool has_logit_bias = false;      ///< part of the logits (GPT-OSS router.bias)
  bool has_selection_bias = false;  ///< selects only (e_score_correction_bias), kept in fp32
  bool hash_routing =
      false;  ///< ids come from a table token_id -> k experts (DeepSeek-V4); weights from scores
  friend bool operator==(const RouterSpec&, const RouterSpec&) = default;
};

/// Shared experts: one dense gated MLP of `inter` columns beside the routed ones, 0 = none.
struct SharedSpec {
  int64_t inter = 0;
  bool sigmoid_gate = false;  ///< output times sigmoid(x . gate) (Qwen2-MoE)
  WeightScheme gate_up_weights{};
  WeightScheme down_weights{};
  ActivationScheme gate_up_input{};
  ActivationScheme down_input{};
  friend bool operator==(const SharedSpec&, const SharedSpec&) = default;
};

/// The layer as a model defines it, free of any device or parallelism.
struct MoeConfig {
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t hidden = 0;
  int64_t inter = 0;
  int64_t latent = 0;  ///< width of the routed experts' input and output when they work in a latent
                       ///< space; 0 = hidden
  ActivationSpec activation{};
  bool has_gate_up_bias = false;
  bool has_down_bias = false;
  bool weight_on_input =
      false;  ///< the router weight multiplies the experts' input (top_k == 1 only)
  WeightScheme gate_up_weights{};
  WeightScheme down_weights{};
  ActivationScheme gate_up_input{};
  ActivationScheme down_input{};
  RouterSpec router{};
  SharedSpec shared{};

  /// Width of the rows that routed experts read and write.
  int64_t routed_width() const { return latent > 0 ? latent : hidden; }
};

/// Grade of determinism of the top-k sum (docs/numerics.md).
enum class Combine : uint8_t {
  slots,  ///< one row per (token, slot), summed in fp32 in slot order: bits do not depend on ranks
          ///< or placement
  rank_sums,  ///< each rank sums its slots, the owner adds partial rows in rank order
};

/// Format of rows on the wire. `automatic` never changes bits.
enum class Wire : uint8_t { automatic, f32, bf16, fp8_token, fp8_block, mxfp8, nvfp4 };

}  // namespace moekit
