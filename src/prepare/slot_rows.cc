#include "prepare/slot_rows.h"

#include "base/check.h"
#include "prepare/parallel_rows.h"

namespace moekit::prepare {

void sum_slot_row(const ExpertRows& rows, const ExpertOutput& experts, int64_t row, Weigher weigher,
                  SumRow type, float* out, SumStore store) {
  const void* pointers[kMaxTopK];
  for (int64_t j = 0; j < rows.top_k; ++j) pointers[j] = slot_row(rows, experts, row, j);
  const float* weights = weigher == Weigher::input ? nullptr : rows.weights + row * rows.top_k;
  sum_rows(type, pointers, weights, rows.top_k, experts.width, out, store);
}

void sum_slot_rows(const ExpertRows& rows, const ExpertOutput& experts, Weigher weigher,
                   SumRow type, ThreadPool* threads, float* out) {
  const SumStore store = sum_store_for(rows.num_rows * experts.width * int64_t{sizeof(float)});
  const auto piece = [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t n = begin; n < end; ++n) {
      sum_slot_row(rows, experts, n, weigher, type, out + n * experts.width, store);
    }
  };
  parallel_rows(threads, rows.num_rows, (rows.top_k + 1) * experts.width * 4, piece);
}

CombineInput combine_input(const Problem& problem, const ReduceDuty& duty) {
  const SumOrder planned =
      problem.combine == Combine::slots ? SumOrder::slots : SumOrder::rank_sums;
  MOEKIT_CHECK(duty.order == planned, "the plan sums in the order {}, finalize was given {}",
               to_string(planned), to_string(duty.order));
  if (duty.summer == Summer::combine) {
    MOEKIT_CHECK_AS(ErrorCode::unsupported, duty.weigher != Weigher::experts,
                    "slot rows that the experts have weighted can't be combined: the sum would "
                    "weigh them again; let combine or the input weigh");
    return duty.order == SumOrder::slots ? CombineInput::slot_rows
                                         : CombineInput::slot_rows_to_sums;
  }
  // Sums of one rank are the sum over slots only where that rank has them all, in fp32. A device
  // keeps its slot rows in its own way (experts::Traits::sums_bf16_rows).
  MOEKIT_CHECK_AS(ErrorCode::unsupported,
                  duty.order == SumOrder::rank_sums ||
                      (problem.num_ranks == 1 && (problem.combine_dtype == DType::f32 ||
                                                  problem.device.type == DeviceType::cuda)),
                  "combine=slots over {} ranks in {} needs one row a slot (summer=combine), got "
                  "sums from {}",
                  problem.num_ranks, to_string(problem.combine_dtype), to_string(duty.summer));
  return CombineInput::sums;
}

}  // namespace moekit::prepare
