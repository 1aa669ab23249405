#include "prepare/batched_rows.h"

#include <cstring>

#include "base/check.h"
#include "prepare/parallel_rows.h"

namespace moekit::prepare {

BatchedLayout::BatchedLayout(WorkspaceLayout& layout, int64_t experts, int64_t rows,
                             int64_t max_rows, int64_t top_k, int64_t record_bytes)
    : num_experts(experts), rows_per_expert(rows) {
  const int64_t places = checked_mul(experts, rows, "batched rows");
  records = layout.add(places, record_bytes);
  origins = layout.add(places, sizeof(RowOrigin));
  counts = layout.add(experts, sizeof(int32_t));
  slot_positions = layout.add(checked_mul(max_rows, top_k, "batched slots"), sizeof(int32_t));
}

void fail_expert_overflow(int64_t expert, int64_t rows_per_expert) {
  fail(ErrorCode::internal,
       "local expert {} got more than its {} rows after the counts had been agreed", expert,
       rows_per_expert);
}

void point_at_records(const ExpertRows& rows, int64_t* index, ExpertRows& batched) {
  for (int64_t n = 0; n < rows.num_rows; ++n) {
    for (int64_t j = 0; j < rows.top_k; ++j) {
      const int64_t i = n * rows.top_k + j;
      if (rows.ids[i] == LocalExpert::none) continue;
      index[index_of(rows.ids[i]) * batched.rows_per_expert + batched.slot_positions[i]] =
          rows.record_index != nullptr ? rows.record_index[n] : n;
    }
  }
  batched.records = rows.records;
  batched.record_stride = rows.record_stride;
  batched.record_index = index;
}

void copy_records(const ExpertRows& rows, const ExpertRows& batched, ThreadPool* threads) {
  const int64_t bytes = rows.format.row_bytes();
  auto* records = const_cast<std::byte*>(batched.records);
  const auto piece = [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t j = 0; j < rows.top_k; ++j) {
        const int64_t i = n * rows.top_k + j;
        if (rows.ids[i] == LocalExpert::none || first_slot(rows, n, j) < j) continue;
        const int64_t place =
            index_of(rows.ids[i]) * batched.rows_per_expert + batched.slot_positions[i];
        std::byte* record = records + place * batched.record_stride;
        std::memcpy(record, rows.record(n), static_cast<size_t>(bytes));
        std::memset(record + bytes, 0, static_cast<size_t>(batched.record_stride - bytes));
      }
    }
  };
  parallel_rows(threads, rows.num_rows, rows.top_k * bytes, piece);
}

}  // namespace moekit::prepare
