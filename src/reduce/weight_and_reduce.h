// WeightAndReduce: multiplies expert rows by router weights and sums over top-k on the rank that
// ran the experts, in slot order. Slots without a local expert are skipped and their memory is
// never read; what the experts left there may be anything.
#pragma once

#include <span>
#include <string_view>

#include "base/thread_pool.h"
#include "problem/duty.h"
#include "problem/expert_rows.h"

namespace moekit::reduce {

/// in.data is what the experts wrote; out is [rows.num_rows, in.width] f32. Rows without a local
/// expert become exact zeros. `out` may be in.data for the member that copies, and must not overlap
/// it for those that sum. threads may be null.
struct Args {
  ExpertRows rows;
  ExpertOutput in;
  ReduceDuty duty;
  float* out = nullptr;
  ThreadPool* threads = nullptr;
};

class WeightAndReduce {
 public:
  virtual ~WeightAndReduce() = default;
  virtual std::string_view name() const = 0;
  virtual bool accepts(const ReduceDuty& duty, RowsLayout rows) const = 0;
  /// Never allocates, never throws.
  virtual void run(const Args& args) const = 0;
};

/// none (sums are there: copies), contiguous (slot rows [num_rows, top_k, width]), batched (rows by
/// expert [num_local_experts, rows_per_expert, width], found through ExpertRows::slot_positions).
/// One member at most accepts a pair of duty and layout.
std::span<const WeightAndReduce* const> registry();

/// sum = s0 + s1 + ... with s_j = weight_j * row_j rounded to fp32, added left to right from the
/// first present slot's product, no fused multiply-add: the one definition of the slot-ordered sum,
/// shared by every member that sums slots. rows[j] may be null (no expert: skipped); without any
/// row, out is exact zeros. weights may be null: the rows count as they are (Weigher::input).
/// Bits do not depend on how a caller splits `width`.
void sum_slots(const float* const* rows, const float* weights, int64_t top_k, int64_t width,
               float* out);

}  // namespace moekit::reduce
