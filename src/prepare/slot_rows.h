// Finds the experts' output row of a slot in either layout, and sums rows on the rank that holds
// them.
#pragma once

#include "prepare/prepare_finalize.h"
#include "tensor/slot_sum.h"

namespace moekit::prepare {

/// Most slots a token may have: row pointers of one token live on the stack.
inline constexpr int64_t kMaxTopK = 256;

/// Which of the experts' output rows that of (row, slot) is; a local expert serves it. Slot rows,
/// not sums.
inline int64_t slot_position(const ExpertRows& rows, int64_t row, int64_t slot) {
  const int64_t i = row * rows.top_k + slot;
  if (rows.layout == RowsLayout::standard) return i;
  return index_of(rows.ids[i]) * rows.rows_per_expert + rows.slot_positions[i];
}

/// Output row of (row, slot), or null when no local expert serves it. Slot rows, not sums.
inline const float* slot_row(const ExpertRows& rows, const ExpertOutput& out, int64_t row,
                             int64_t slot) {
  if (rows.ids[row * rows.top_k + slot] == LocalExpert::none) return nullptr;
  return out.data + slot_position(rows, row, slot) * out.width;
}

/// Weighs (unless the weight is in the input) and sums the slots of one row. `type` is f32 or
/// f32_as_bf16. Writes [width].
void sum_slot_row(const ExpertRows& rows, const ExpertOutput& experts, int64_t row, Weigher weigher,
                  SumRow type, float* out, SumStore store = SumStore::cached);

/// The same for each of rows.num_rows rows. Writes [num_rows, width].
void sum_slot_rows(const ExpertRows& rows, const ExpertOutput& experts, Weigher weigher,
                   SumRow type, ThreadPool* threads, float* out);

/// What finalize gets to combine.
enum class CombineInput : uint8_t {
  slot_rows,          ///< one row a slot, which the token's owner sums
  slot_rows_to_sums,  ///< one row a slot, which the rank that ran the experts sums first
  sums,               ///< one weighted sum a row
};

/// Throws `unsupported` for a duty that would not give the bits that the problem asks for.
CombineInput combine_input(const Problem& problem, const ReduceDuty& duty);

}  // namespace moekit::prepare
