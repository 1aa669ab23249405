// Note: this file is compiled with -fno-math-errno and -fno-trapping-math, which let loops with
// sqrt and comparisons be vectorized. Neither changes a value.
#include "router/cpu/row_kernels.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "router/scoring.h"

namespace moekit::router {
namespace {

// Elements a step: two AVX2 vectors, so that the latency of exp is overlapped. Equal to the number
// of partial sums, which makes lane i of a step partial sum i.
constexpr int64_t kStep = kSumLanes;

// Every body below is forced inline into a baseline and an AVX2 function.
#define MOEKIT_ROW_BODY [[gnu::always_inline]] inline

MOEKIT_ROW_BODY int32_t order_key(float value) {
  const float canonical = value + 0.0f;  // -0 becomes +0
  const int32_t bits = std::bit_cast<int32_t>(canonical);
  const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
  return canonical == canonical ? key : kNanKey;
}

// The inverse, NaN for kNanKey.
MOEKIT_ROW_BODY float value_of_key(int32_t key) {
  if (key == kNanKey) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff));
}

template <typename Function>
MOEKIT_ROW_BODY void map_body(const float* in, int64_t count, float* out, Function function) {
  for (int64_t i = 0; i < count; ++i) out[i] = function(in[i]);
}

MOEKIT_ROW_BODY void softmax_body(const float* logits, int64_t count, float* out) {
  const int64_t whole = count / kStep * kStep;
  float best[kStep];
  std::fill_n(best, kStep, -HUGE_VALF);
  for (int64_t i = 0; i < whole; i += kStep) {
    for (int64_t j = 0; j < kStep; ++j) best[j] = logits[i + j] > best[j] ? logits[i + j] : best[j];
  }
  // The order of a maximum does not matter, so lanes may be joined at will.
  const float max = std::max(softmax_max(best, kStep), softmax_max(logits + whole, count - whole));
  float lanes[kStep] = {};
  for (int64_t i = 0; i < whole; i += kStep) {
    for (int64_t j = 0; j < kStep; ++j) {
      const float e = softmax_numerator(logits[i + j], max);
      out[i + j] = e;
      lanes[j] += e == e ? e : 0.0f;
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    const float e = softmax_numerator(logits[i], max);
    out[i] = e;
    lanes[i - whole] += e == e ? e : 0.0f;
  }
  const float sum = join_lanes(lanes);
  for (int64_t i = 0; i < count; ++i) out[i] = out[i] / sum;
}

MOEKIT_ROW_BODY void score_body(Scoring scoring, const float* logits, int64_t count,
                                float* scores) {
  switch (scoring) {
    case Scoring::softmax: softmax_body(logits, count, scores); break;
    case Scoring::sigmoid: map_body(logits, count, scores, sigmoid); break;
    case Scoring::sqrt_softplus: map_body(logits, count, scores, sqrt_softplus); break;
    case Scoring::logits: std::copy_n(logits, count, scores); break;
  }
}

MOEKIT_ROW_BODY void order_body(const float* values, const float* bias, int64_t count,
                                int32_t* keys) {
  if (bias == nullptr) {
    for (int64_t i = 0; i < count; ++i) keys[i] = order_key(values[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) keys[i] = order_key(values[i] + bias[i]);
  }
}

MOEKIT_ROW_BODY void order_groups_body(GroupScore kind, const int32_t* keys, int64_t num_groups,
                                       int64_t group_size, int32_t* group_keys) {
  constexpr int64_t kLanes = 8;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int32_t* group = keys + g * group_size;
    // kNanKey stands for both "none" and NaN: neither takes part in a group's score.
    int32_t best[kLanes], second[kLanes];
    std::fill_n(best, kLanes, kNanKey);
    std::fill_n(second, kLanes, kNanKey);
    const int64_t whole = group_size / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) {
        const int32_t key = group[i + j];
        second[j] = std::max(second[j], std::min(best[j], key));
        best[j] = std::max(best[j], key);
      }
    }
    for (int64_t i = whole; i < group_size; ++i) {
      const int64_t j = i - whole;
      second[j] = std::max(second[j], std::min(best[j], group[i]));
      best[j] = std::max(best[j], group[i]);
    }
    for (int64_t j = 1; j < kLanes; ++j) {
      second[0] = std::max({second[0], second[j], std::min(best[0], best[j])});
      best[0] = std::max(best[0], best[j]);
    }
    const bool sum_two = kind == GroupScore::top2_sum && second[0] != kNanKey;
    group_keys[g] = sum_two ? order_key(value_of_key(best[0]) + value_of_key(second[0])) : best[0];
  }
}

MOEKIT_ROW_BODY void offer_one(int32_t key, int64_t id, TopList& list) {
  const RankedKey candidate = make_ranked_key(key, static_cast<int32_t>(id));
  int64_t i = list.size;
  if (list.size == list.capacity) {
    if (candidate < list.entries[--i]) return;
  } else {
    ++list.size;
  }
  for (; i > 0 && list.entries[i - 1] < candidate; --i) list.entries[i] = list.entries[i - 1];
  list.entries[i] = candidate;
}

MOEKIT_ROW_BODY void offer_body(const int32_t* keys, int64_t begin, int64_t end, TopList& list) {
  int64_t i = begin;
  for (; i < end && list.size < list.capacity; ++i) offer_one(keys[i], i, list);
  if (i == end) return;
  // From here on only a key strictly above the last entry's gets in: an equal one has the higher
  // id. Most steps hold none.
  auto threshold = [&] { return static_cast<int32_t>(list.entries[list.capacity - 1] >> 32); };
  for (; i + kStep <= end; i += kStep) {
    const int32_t low = threshold();
    int32_t above = 0;
    for (int64_t j = 0; j < kStep; ++j) above |= keys[i + j] > low ? 1 : 0;
    if (above == 0) continue;
    for (int64_t j = 0; j < kStep; ++j) {
      if (keys[i + j] > low) offer_one(keys[i + j], i + j, list);
    }
  }
  for (; i < end; ++i) {
    if (keys[i] > threshold()) offer_one(keys[i], i, list);
  }
}

MOEKIT_ROW_BODY bool has_nan_body(const float* logits, int64_t count) {
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) found |= logits[i] != logits[i] ? 1 : 0;
  return found != 0;
}

#undef MOEKIT_ROW_BODY

// One function a body; `prefix` is the attribute that says for which CPU.
#define MOEKIT_ROW_KERNELS(space, prefix)                                                         \
  namespace space {                                                                               \
  prefix void score(Scoring scoring, const float* logits, int64_t count, float* scores) {         \
    score_body(scoring, logits, count, scores);                                                   \
  }                                                                                               \
  prefix void order(const float* values, const float* bias, int64_t count, int32_t* keys) {       \
    order_body(values, bias, count, keys);                                                        \
  }                                                                                               \
  prefix void order_groups(GroupScore kind, const int32_t* keys, int64_t num_groups,              \
                           int64_t group_size, int32_t* group_keys) {                             \
    order_groups_body(kind, keys, num_groups, group_size, group_keys);                            \
  }                                                                                               \
  prefix void offer(const int32_t* keys, int64_t begin, int64_t end, TopList& list) {             \
    offer_body(keys, begin, end, list);                                                           \
  }                                                                                               \
  prefix bool has_nan(const float* logits, int64_t count) { return has_nan_body(logits, count); } \
  constexpr RowKernels kKernels{score, order, order_groups, offer, has_nan};                      \
  }

MOEKIT_ROW_KERNELS(baseline, )
#if defined(__x86_64__)
MOEKIT_ROW_KERNELS(avx2, [[gnu::target("avx2")]])
#endif

#undef MOEKIT_ROW_KERNELS

}  // namespace

int num_row_kernels() {
#if defined(__x86_64__)
  static const int count = __builtin_cpu_supports("avx2") ? 2 : 1;
  return count;
#else
  return 1;
#endif
}

const RowKernels& row_kernels(int index) {
#if defined(__x86_64__)
  if (index == 1) return avx2::kKernels;
#endif
  (void)index;
  return baseline::kKernels;
}

const RowKernels& row_kernels() {
  static const RowKernels& best = row_kernels(num_row_kernels() - 1);
  return best;
}

}  // namespace moekit::router
