// Weights of the chosen experts, the output order, and the checks of one call.
#include "router/selection.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "router/scoring.h"

namespace moekit::router {
namespace {

float p_norm(const Ranked* slots, int64_t top_k, float p) {
  float sum = 0.0f;
  if (std::isinf(p)) {
    for (int64_t j = 0; j < top_k; ++j) {
      const float a = std::fabs(slots[j].value);
      sum = a > sum || a != a ? a : sum;
    }
    return sum;
  }
  for (int64_t j = 0; j < top_k; ++j) {
    const float a = std::fabs(slots[j].value);
    sum += p == 1.0f ? a : p == 2.0f ? a * a : std::pow(a, p);
  }
  return p == 1.0f ? sum : p == 2.0f ? std::sqrt(sum) : std::pow(sum, 1.0f / p);
}

// The divisor of all k weights.
float denominator(const RouterSpec& spec, const Ranked* slots, int64_t top_k) {
  if (spec.renormalize == Renormalize::p_norm) return p_norm(slots, top_k, spec.p);
  float sum = 0.0f;
  for (int64_t j = 0; j < top_k; ++j) sum += slots[j].value;
  if (spec.renormalize == Renormalize::sum) return sum + spec.epsilon;
  return sum < spec.epsilon ? spec.epsilon : sum;  // NaN goes through
}

// softmax() of the values, in slot order. Not through scoring.h's softmax because the values are
// not contiguous; the same steps with the same lanes.
void softmax_slots(const float* logits, Ranked* slots, int64_t top_k) {
  float max = -HUGE_VALF;
  for (int64_t j = 0; j < top_k; ++j) {
    const float l = logits[slots[j].id];
    max = l > max ? l : max;
  }
  float lanes[kSumLanes] = {};
  for (int64_t j = 0; j < top_k; ++j) {
    const float e = softmax_numerator(logits[slots[j].id], max);
    slots[j].value = e;
    lanes[j % kSumLanes] += e == e ? e : 0.0f;
  }
  const float sum = join_lanes(lanes);
  for (int64_t j = 0; j < top_k; ++j) slots[j].value /= sum;
}

void sort_slots(Ranked* slots, int64_t top_k) {
  // Slots mostly come in output order already: an insertion sort is a single pass then.
  constexpr int64_t kInsertionLimit = 64;
  if (top_k > kInsertionLimit) {
    std::sort(slots, slots + top_k, ranks_before);
    return;
  }
  for (int64_t j = 1; j < top_k; ++j) {
    const Ranked moving = slots[j];
    int64_t i = j;
    for (; i > 0 && ranks_before(moving, slots[i - 1]); --i) slots[i] = slots[i - 1];
    slots[i] = moving;
  }
}

}  // namespace

void finish_row(const RouterSpec& spec, const float* logits, const float* scores, Ranked* slots,
                int64_t top_k) {
  switch (spec.weight) {
    case RouterWeight::scores:
      for (int64_t j = 0; j < top_k; ++j) slots[j].value = scores[slots[j].id];
      break;
    case RouterWeight::softmax_selected: softmax_slots(logits, slots, top_k); break;
    case RouterWeight::sigmoid_logit:
      for (int64_t j = 0; j < top_k; ++j) slots[j].value = sigmoid(logits[slots[j].id]);
      break;
  }
  if (spec.renormalize != Renormalize::none) {
    const float divisor = denominator(spec, slots, top_k);
    for (int64_t j = 0; j < top_k; ++j) slots[j].value /= divisor;
  }
  if (spec.scaling_factor != 1.0f) {
    for (int64_t j = 0; j < top_k; ++j) slots[j].value *= spec.scaling_factor;
  }
  sort_slots(slots, top_k);
}

void read_hash_row(const Args& args, int64_t token, Ranked* slots) {
  const int64_t* row = args.hash_table + args.token_ids[token] * args.top_k;
  for (int64_t j = 0; j < args.top_k; ++j) slots[j].id = static_cast<int32_t>(row[j]);
}

void write_row(const Args& args, int64_t token, const Ranked* slots) {
  GlobalExpert* ids = args.ids + token * args.top_k;
  float* weights = args.weights + token * args.top_k;
  for (int64_t j = 0; j < args.top_k; ++j) {
    const float w = slots[j].value;
    ids[j] = GlobalExpert{slots[j].id};
    // Sign and payload of a computed NaN depend on the compiler's order of operands: write one NaN.
    weights[j] = w == w ? w : std::numeric_limits<float>::quiet_NaN();
  }
}

void check_run(const Args& args) {
  MOEKIT_CHECK(args.spec != nullptr && args.num_tokens >= 0,
               "the router needs a recipe and 0 tokens or more, got {} tokens", args.num_tokens);
  if (args.nan_rows != nullptr) *args.nan_rows = 0;
  if (args.num_tokens == 0) return;
  MOEKIT_CHECK(args.logits != nullptr && args.ids != nullptr && args.weights != nullptr &&
                   args.workspace != nullptr,
               "the router needs logits, ids, weights and a workspace");
  const RouterSpec& spec = *args.spec;
  MOEKIT_CHECK(spec.has_selection_bias == (args.selection_bias != nullptr),
               "the recipe {} a selection bias, the call {}",
               spec.has_selection_bias ? "has" : "has not",
               args.selection_bias != nullptr ? "brings one" : "brings none");
  if (!spec.hash_routing) return;
  MOEKIT_CHECK(args.token_ids != nullptr && args.hash_table != nullptr && args.hash_rows > 0,
               "hash routing needs token ids and a table of at least one row");
  for (int64_t t = 0; t < args.num_tokens; ++t) {
    const int64_t token = args.token_ids[t];
    MOEKIT_CHECK(token >= 0 && token < args.hash_rows,
                 "row {}: token id {} is outside the hash table's [0, {})", t, token,
                 args.hash_rows);
    for (int64_t j = 0; j < args.top_k; ++j) {
      const int64_t id = args.hash_table[token * args.top_k + j];
      MOEKIT_CHECK(id >= 0 && id < args.num_experts,
                   "hash table row {} slot {}: expert {} is outside [0, {})", token, j, id,
                   args.num_experts);
    }
  }
}

void report_nan_rows(const Args& args, int64_t count) {
  if (args.nan_rows == nullptr || count == 0) return;
  // Relaxed: only the sum matters, and the pool's join publishes it to the caller.
  std::atomic_ref<int64_t>(*args.nan_rows).fetch_add(count, std::memory_order_relaxed);
}

void validate(const RouterSpec& spec, int64_t num_experts, int64_t top_k) {
  MOEKIT_CHECK(num_experts >= 1 && num_experts <= std::numeric_limits<int32_t>::max(),
               "the router needs 1 to {} experts, got {}", std::numeric_limits<int32_t>::max(),
               num_experts);
  MOEKIT_CHECK(top_k >= 1 && top_k <= num_experts,
               "top_k must be in [1, {}] (the number of experts), got {}", num_experts, top_k);
  MOEKIT_CHECK(std::isfinite(spec.scaling_factor),
               "the router's scaling factor must be finite, got {}", spec.scaling_factor);
  MOEKIT_CHECK(std::isfinite(spec.epsilon) && spec.epsilon >= 0.0f,
               "the router's epsilon must be finite and not negative, got {}", spec.epsilon);
  MOEKIT_CHECK(spec.renormalize != Renormalize::p_norm || spec.p > 0.0f,
               "the p of a p-norm must be above 0, got {}", spec.p);
  MOEKIT_CHECK(spec.num_groups >= 0 && spec.topk_groups >= 0,
               "numbers of groups can't be negative, got {} groups of which {} are kept",
               spec.num_groups, spec.topk_groups);
  if (!is_grouped(spec)) {
    MOEKIT_CHECK(spec.topk_groups <= 1, "{} groups are to be kept, but the recipe has {} groups",
                 spec.topk_groups, spec.num_groups);
    return;
  }
  MOEKIT_CHECK(!spec.hash_routing, "hash routing can't be limited to groups, got {} groups",
               spec.num_groups);
  MOEKIT_CHECK(num_experts % spec.num_groups == 0, "{} experts can't be split into {} equal groups",
               num_experts, spec.num_groups);
  MOEKIT_CHECK(spec.topk_groups >= 1 && spec.topk_groups <= spec.num_groups,
               "the groups to keep must be in [1, {}] (the number of groups), got {}",
               spec.num_groups, spec.topk_groups);
  const int64_t candidates = spec.topk_groups * (num_experts / spec.num_groups);
  MOEKIT_CHECK(top_k <= candidates,
               "top_k {} is above the {} experts of the {} kept groups ({} experts in {} groups)",
               top_k, candidates, spec.topk_groups, num_experts, spec.num_groups);
}

}  // namespace moekit::router
