// The loops over one row of experts, each in a baseline and an AVX2 build of the same source. They
// give the bits of the scalar functions of router/scoring.h.
#pragma once

#include <cstdint>

#include "moekit/config.h"

namespace moekit::router {

/// Selection values as integers in the router's total order: greater value, greater key; equal for
/// both zeros; NaN is kNanKey, below all others.
inline constexpr int32_t kNanKey = INT32_MIN;

/// A key and an expert number as one integer: greater is chosen first (higher key, then lower id).
using RankedKey = int64_t;
inline RankedKey make_ranked_key(int32_t key, int32_t id) {
  return static_cast<int64_t>((static_cast<uint64_t>(static_cast<uint32_t>(key)) << 32) |
                              static_cast<uint32_t>(~id));
}
inline int32_t id_of(RankedKey ranked) {
  return static_cast<int32_t>(~static_cast<uint32_t>(static_cast<uint64_t>(ranked)));
}

/// The best `capacity` keys seen so far, best first. Candidates must come by ascending id.
struct TopList {
  RankedKey* entries = nullptr;
  int64_t capacity = 0;
  int64_t size = 0;
};

struct RowKernels {
  /// scoring(logits), all of the row. NaN logits stay NaN.
  void (*score)(Scoring scoring, const float* logits, int64_t count, float* scores);
  /// keys of values[i] + bias[i]; bias may be null.
  void (*order)(const float* values, const float* bias, int64_t count, int32_t* keys);
  /// The keys of the groups' scores, each group `group_size` keys.
  void (*order_groups)(GroupScore kind, const int32_t* keys, int64_t num_groups, int64_t group_size,
                       int32_t* group_keys);
  /// Offers keys [begin, end), whose index is their id, to the list.
  void (*offer)(const int32_t* keys, int64_t begin, int64_t end, TopList& list);
  bool (*has_nan)(const float* logits, int64_t count);
};

/// The best that this CPU runs.
const RowKernels& row_kernels();

/// For tests: all that this CPU runs, baseline first.
int num_row_kernels();
const RowKernels& row_kernels(int index);

}  // namespace moekit::router
