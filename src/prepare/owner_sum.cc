#include "prepare/owner_sum.h"

#include <algorithm>

namespace moekit::prepare {
namespace {

// Columns of one rank's sum on the stack: results stream through once, these stay in L1.
constexpr int64_t kColumns = 512;

/// The slots that have a row, in rank order and within a rank in slot order. Returns their number.
int64_t order_by_rank(const float* const* rows, const int32_t* ranks, int64_t top_k,
                      int32_t* order) {
  int64_t count = 0;
  for (int64_t j = 0; j < top_k; ++j) {
    if (rows[j] == nullptr) continue;
    int64_t at = count++;
    for (; at > 0 && ranks[order[at - 1]] > ranks[j]; --at) order[at] = order[at - 1];
    order[at] = static_cast<int32_t>(j);
  }
  return count;
}

}  // namespace

OwnerSum::OwnerSum(const FinalizeArgs& args, CombineInput input)
    : args_(args),
      input_(input),
      width_(args.problem->config.routed_width()),
      type_(args.problem->combine_dtype == DType::bf16 ? SumRow::f32_as_bf16 : SumRow::f32),
      store_(sum_store_for(args.routing.num_tokens * width_ * int64_t{sizeof(float)})) {}

void OwnerSum::add_token(int64_t token, const float* const* rows, const int32_t* ranks) const {
  const int64_t top_k = args_.routing.top_k;
  float* out = args_.sum + token * width_;
  if (input_ == CombineInput::sums) return add_sums(rows, ranks, out);
  const bool weighed = args_.reduce_duty.weigher == Weigher::input;
  const float* weights = weighed ? nullptr : args_.routing.weights + token * top_k;
  if (input_ == CombineInput::slot_rows_to_sums) {
    return add_rank_by_rank(rows, ranks, weights, out);
  }
  sum_rows(type_, reinterpret_cast<const void* const*>(rows), weights, top_k, width_, out, store_);
}

void OwnerSum::add_sums(const float* const* rows, const int32_t* ranks, float* out) const {
  int32_t order[kMaxTopK];
  const void* pointers[kMaxTopK];
  const int64_t count = order_by_rank(rows, ranks, args_.routing.top_k, order);
  for (int64_t i = 0; i < count; ++i) pointers[i] = rows[order[i]];
  sum_rows(type_, pointers, nullptr, count, width_, out, store_);
}

void OwnerSum::add_rank_by_rank(const float* const* rows, const int32_t* ranks,
                                const float* weights, float* out) const {
  int32_t order[kMaxTopK];
  const int64_t count = order_by_rank(rows, ranks, args_.routing.top_k, order);
  float of_rank[kColumns], sum[kColumns];
  for (int64_t c = 0; c < width_; c += kColumns) {
    const int64_t columns = std::min(kColumns, width_ - c);
    bool any = false;
    for (int64_t i = 0; i < count;) {
      const int32_t rank = ranks[order[i]];
      const void* pointers[kMaxTopK];
      float of_slot[kMaxTopK];
      int64_t slots = 0;
      for (; i < count && ranks[order[i]] == rank; ++i, ++slots) {
        pointers[slots] = rows[order[i]] + c;
        of_slot[slots] = weights != nullptr ? weights[order[i]] : 1.0f;
      }
      float* part = any ? of_rank : sum;
      sum_rows(SumRow::f32, pointers, of_slot, slots, columns, part);
      const void* alone[1] = {part};
      if (type_ != SumRow::f32) sum_rows(type_, alone, nullptr, 1, columns, part);
      const void* both[2] = {sum, part};
      if (any) sum_rows(SumRow::f32, both, nullptr, 2, columns, sum);
      any = true;
    }
    const void* all[1] = {sum};
    sum_rows(SumRow::f32, all, nullptr, any ? 1 : 0, columns, out + c, store_);
  }
}

}  // namespace moekit::prepare
