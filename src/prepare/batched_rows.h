// Standard rows spread over [num_local_experts, rows_per_expert] records: the Batched layout, with
// the maps that bring results back. A token that names an expert more than once has one row there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/thread_pool.h"
#include "problem/expert_rows.h"
#include "problem/workspace_layout.h"

namespace moekit::prepare {

/// Scratch of spread_rows().
struct BatchedLayout {
  Region records;         ///< [num_experts, rows_per_expert] records
  Region origins;         ///< RowOrigin, as many
  Region counts;          ///< int32 [num_experts]
  Region slot_positions;  ///< int32 [max_rows, top_k]
  int64_t num_experts = 0;
  int64_t rows_per_expert = 0;

  BatchedLayout() = default;
  BatchedLayout(WorkspaceLayout& layout, int64_t num_experts, int64_t rows_per_expert,
                int64_t max_rows, int64_t top_k, int64_t record_bytes);
};

/// Where a standard row comes from.
struct RowSource {
  int32_t rank = 0;
  int64_t token = 0;
};

/// Fills the maps: places each (row, expert) in row order and sets expert_num_rows, slot_positions
/// and origins of the result, which keeps num_rows, top_k, ids and weights of `rows`. Throws
/// `internal` when an expert gets more than rows_per_expert rows. source(row) -> RowSource.
template <typename Source>
ExpertRows place_rows(const ExpertRows& rows, const BatchedLayout& layout, std::byte* workspace,
                      Source source);

/// The first slot of `row` that names the same expert as `slot`.
inline int64_t first_slot(const ExpertRows& rows, int64_t row, int64_t slot) {
  const LocalExpert* ids = rows.ids + row * rows.top_k;
  int64_t first = 0;
  while (ids[first] != ids[slot]) ++first;
  return first;
}

[[noreturn]] void fail_expert_overflow(int64_t expert, int64_t rows_per_expert);

template <typename Source>
ExpertRows place_rows(const ExpertRows& rows, const BatchedLayout& layout, std::byte* workspace,
                      Source source) {
  ExpertRows out = rows;
  auto* counts = layout.counts.in<int32_t>(workspace);
  auto* positions = layout.slot_positions.in<int32_t>(workspace);
  auto* origins = layout.origins.in<RowOrigin>(workspace);
  for (int64_t e = 0; e < layout.num_experts; ++e) counts[e] = 0;
  for (int64_t n = 0; n < rows.num_rows; ++n) {
    for (int64_t j = 0; j < rows.top_k; ++j) {
      const int64_t i = n * rows.top_k + j;
      positions[i] = -1;
      if (rows.ids[i] == LocalExpert::none) continue;
      const int64_t first = first_slot(rows, n, j);
      if (first < j) {
        positions[i] = positions[n * rows.top_k + first];
        continue;
      }
      const int64_t e = index_of(rows.ids[i]);
      if (counts[e] >= layout.rows_per_expert) fail_expert_overflow(e, layout.rows_per_expert);
      positions[i] = counts[e]++;
      const RowSource from = source(n);
      origins[e * layout.rows_per_expert + positions[i]] = {from.rank, static_cast<int32_t>(j),
                                                            from.token, rows.weights[i]};
    }
  }
  out.layout = RowsLayout::batched;
  out.rows_per_expert = layout.rows_per_expert;
  out.expert_num_rows = counts;
  out.slot_positions = positions;
  out.origins = origins;
  out.records = layout.records.in<std::byte>(workspace);
  out.record_stride = rows.format.record_bytes;
  out.record_index = nullptr;
  return out;
}

/// Points the places of `batched` (from place_rows) at the records of `rows` where they lie.
/// `index` has room for num_experts * rows_per_expert entries.
void point_at_records(const ExpertRows& rows, int64_t* index, ExpertRows& batched);

/// Copies the records of `rows` to their places in `batched` (from place_rows, same format).
void copy_records(const ExpertRows& rows, const ExpertRows& batched, ThreadPool* threads);

}  // namespace moekit::prepare
