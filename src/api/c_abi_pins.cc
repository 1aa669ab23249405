// Compile-time pins of the C ABI: layouts, and enumerators that are the same numbers on both sides.
#include <cstddef>

#include "moekit/c_api.h"
#include "moekit/layer.h"

namespace moekit {
namespace {

// The tensor struct is DLTensor (DLPack 1.x) on every platform of ours: a DLTensor* may be cast.
static_assert(sizeof(void*) == 8);
static_assert(sizeof(moekit_dtype) == 4 && offsetof(moekit_dtype, bits) == 1 &&
              offsetof(moekit_dtype, lanes) == 2);
static_assert(sizeof(moekit_device) == 8 && offsetof(moekit_device, device_id) == 4);
static_assert(offsetof(moekit_tensor, data) == 0 && offsetof(moekit_tensor, device) == 8 &&
              offsetof(moekit_tensor, ndim) == 16 && offsetof(moekit_tensor, dtype) == 20 &&
              offsetof(moekit_tensor, shape) == 24 && offsetof(moekit_tensor, strides) == 32 &&
              offsetof(moekit_tensor, byte_offset) == 40 && sizeof(moekit_tensor) == 48);

// Sizes of the first version of the ABI: a struct may grow, never shrink or shift.
static_assert(sizeof(moekit_config) == 256);
static_assert(offsetof(moekit_plan_options, slots_per_rank) == 120);
static_assert(sizeof(moekit_plan_options) == 144);
static_assert(sizeof(moekit_allocator) == 32);
static_assert(sizeof(moekit_matrix) == 48);
static_assert(sizeof(moekit_layer_tensors) == 136);
static_assert(sizeof(moekit_run_args) == 128);
static_assert(sizeof(moekit_bootstrap) == 48);
static_assert(sizeof(moekit_placement) == 24);
static_assert(sizeof(moekit_placement_change) == 32);
static_assert(sizeof(moekit_rebalance_options) == 32);
static_assert(sizeof(moekit_load) == 64);
static_assert(sizeof(moekit_route_args) == 64);
static_assert(sizeof(moekit_quantize_args) == 64);

// Enumerators of both sides are the same numbers; the ends of each list pin it.
template <typename E>
constexpr bool same(E value, int number) {
  return static_cast<int>(value) == number;
}
static_assert(same(WeightFormat::bf16, MOEKIT_WEIGHT_BF16) &&
              same(WeightFormat::fp8_tensor, MOEKIT_WEIGHT_FP8_TENSOR) &&
              same(WeightFormat::fp8_channel, MOEKIT_WEIGHT_FP8_CHANNEL) &&
              same(WeightFormat::fp8_block, MOEKIT_WEIGHT_FP8_BLOCK) &&
              same(WeightFormat::mxfp8, MOEKIT_WEIGHT_MXFP8) &&
              same(WeightFormat::mxfp8_e5m2, MOEKIT_WEIGHT_MXFP8_E5M2) &&
              same(WeightFormat::mxfp4, MOEKIT_WEIGHT_MXFP4) &&
              same(WeightFormat::nvfp4, MOEKIT_WEIGHT_NVFP4) &&
              same(WeightFormat::int4_group, MOEKIT_WEIGHT_INT4_GROUP) &&
              same(WeightFormat::int8_channel, MOEKIT_WEIGHT_INT8_CHANNEL));
static_assert(same(ActivationFormat::f32, MOEKIT_INPUT_F32) &&
              same(ActivationFormat::bf16, MOEKIT_INPUT_BF16) &&
              same(ActivationFormat::fp8_tensor, MOEKIT_INPUT_FP8_TENSOR) &&
              same(ActivationFormat::fp8_token, MOEKIT_INPUT_FP8_TOKEN) &&
              same(ActivationFormat::fp8_block, MOEKIT_INPUT_FP8_BLOCK) &&
              same(ActivationFormat::mxfp8, MOEKIT_INPUT_MXFP8) &&
              same(ActivationFormat::mxfp4, MOEKIT_INPUT_MXFP4) &&
              same(ActivationFormat::nvfp4, MOEKIT_INPUT_NVFP4));
static_assert(same(ScaleSense::multiplier, MOEKIT_SCALE_MULTIPLIES) &&
              same(ScaleSense::divisor, MOEKIT_SCALE_DIVIDES));
static_assert(same(ActivationKind::silu, MOEKIT_ACTIVATION_SILU) &&
              same(ActivationKind::gelu_tanh, MOEKIT_ACTIVATION_GELU_TANH) &&
              same(ActivationKind::swiglu_oai, MOEKIT_ACTIVATION_SWIGLU_OAI) &&
              same(ActivationKind::relu2, MOEKIT_ACTIVATION_RELU2));
static_assert(same(Scoring::softmax, MOEKIT_SCORING_SOFTMAX) &&
              same(Scoring::sqrt_softplus, MOEKIT_SCORING_SQRT_SOFTPLUS) &&
              same(Scoring::logits, MOEKIT_SCORING_LOGITS));
static_assert(same(SelectOn::logits, MOEKIT_SELECT_LOGITS));
static_assert(same(RouterWeight::softmax_selected, MOEKIT_ROUTER_WEIGHT_SOFTMAX_SELECTED) &&
              same(RouterWeight::sigmoid_logit, MOEKIT_ROUTER_WEIGHT_SIGMOID_LOGIT));
static_assert(same(Renormalize::sum, MOEKIT_RENORMALIZE_SUM) &&
              same(Renormalize::max_sum, MOEKIT_RENORMALIZE_MAX_SUM) &&
              same(Renormalize::p_norm, MOEKIT_RENORMALIZE_P_NORM));
static_assert(same(GroupScore::max, MOEKIT_GROUP_SCORE_MAX) &&
              same(GroupScore::top2_sum, MOEKIT_GROUP_SCORE_TOP2_SUM));
static_assert(same(Combine::slots, MOEKIT_COMBINE_SLOTS) &&
              same(Combine::rank_sums, MOEKIT_COMBINE_RANK_SUMS));
static_assert(same(Wire::automatic, MOEKIT_WIRE_AUTOMATIC) && same(Wire::f32, MOEKIT_WIRE_F32) &&
              same(Wire::bf16, MOEKIT_WIRE_BF16) && same(Wire::fp8_token, MOEKIT_WIRE_FP8_TOKEN) &&
              same(Wire::mxfp8, MOEKIT_WIRE_MXFP8) && same(Wire::nvfp4, MOEKIT_WIRE_NVFP4));
static_assert(same(CapacityMode::exact, MOEKIT_CAPACITY_EXACT) &&
              same(CapacityMode::refuse, MOEKIT_CAPACITY_REFUSE) &&
              same(CapacityMode::drop, MOEKIT_CAPACITY_DROP));
static_assert(same(RebalancePolicy::greedy, MOEKIT_REBALANCE_GREEDY) &&
              same(RebalancePolicy::hierarchical, MOEKIT_REBALANCE_HIERARCHICAL));
static_assert(same(StackedOrder::gate_up, MOEKIT_ORDER_GATE_UP) &&
              same(StackedOrder::up_gate, MOEKIT_ORDER_UP_GATE) &&
              same(StackedOrder::interleaved, MOEKIT_ORDER_INTERLEAVED));
static_assert(static_cast<int>(DeviceType::cpu) == 1 && static_cast<int>(DeviceType::cuda) == 2);

}  // namespace
}  // namespace moekit
