// How a token's owner adds results that it reads where the experts have left them: the same bits as
// if they had been summed or rounded by their rank first and had travelled.
#pragma once

#include "prepare/slot_rows.h"

namespace moekit::prepare {

class OwnerSum {
 public:
  OwnerSum(const FinalizeArgs& args, CombineInput input);

  /// Writes the token's sum. rows[j] is the f32 result for slot j, or null; with CombineInput::sums
  /// the sum of slot j's rank, null for all but the first of a rank's slots. ranks[j] is who serves
  /// slot j, read where rows[j] is not null.
  void add_token(int64_t token, const float* const* rows, const int32_t* ranks) const;

 private:
  void add_sums(const float* const* rows, const int32_t* ranks, float* out) const;
  void add_rank_by_rank(const float* const* rows, const int32_t* ranks, const float* weights,
                        float* out) const;

  const FinalizeArgs& args_;
  const CombineInput input_;
  const int64_t width_;
  const SumRow type_;
  const SumStore store_;
};

}  // namespace moekit::prepare
