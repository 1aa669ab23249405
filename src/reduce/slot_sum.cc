#include "reduce/slot_sum.h"

#include "base/check.h"
#include "reduce/weight_and_reduce.h"
#include "tensor/slot_sum.h"

namespace moekit::reduce {
namespace {

/// Collects the rows' addresses a few at a time on the stack; top_k is bounded where plans are made
/// (kMaxTopK in prepare).
constexpr int64_t kMostRows = 1024;

template <typename Rows>
void sum(const Rows& rows, const float* weights, int64_t top_k, int64_t begin, int64_t end,
         float* out) {
  MOEKIT_DCHECK(top_k <= kMostRows, "at most {} slots a row, got {}", kMostRows, top_k);
  const void* at[kMostRows];
  for (int64_t j = 0; j < top_k; ++j) {
    const float* row = rows.row(j);
    at[j] = row == nullptr ? nullptr : row + begin;
  }
  sum_rows(SumRow::f32, at, weights, top_k, end - begin, out + begin);
}

}  // namespace

void sum_columns(const PointerRows& rows, const float* weights, int64_t top_k, int64_t begin,
                 int64_t end, float* out) {
  sum(rows, weights, top_k, begin, end, out);
}
void sum_columns(const SlotRows& rows, const float* weights, int64_t top_k, int64_t begin,
                 int64_t end, float* out) {
  sum(rows, weights, top_k, begin, end, out);
}
void sum_columns(const BatchedRows& rows, const float* weights, int64_t top_k, int64_t begin,
                 int64_t end, float* out) {
  sum(rows, weights, top_k, begin, end, out);
}

void sum_slots(const float* const* rows, const float* weights, int64_t top_k, int64_t width,
               float* out) {
  sum_columns(PointerRows{rows}, weights, top_k, 0, width, out);
}

}  // namespace moekit::reduce
