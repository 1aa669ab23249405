// The slot-ordered sum (tensor/slot_sum.h) over rows found in three ways.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/expert_id.h"

namespace moekit::reduce {

/// Row j is rows[j]; null is no expert.
struct PointerRows {
  const float* const* rows;
  const float* row(int64_t slot) const { return rows[slot]; }
};

/// Row j is block j of `base`, present where ids[j] names an expert.
struct SlotRows {
  const float* base;  ///< [top_k, width]
  const LocalExpert* ids;
  int64_t width;
  const float* row(int64_t slot) const {
    return ids[slot] == LocalExpert::none ? nullptr : base + slot * width;
  }
};

/// Row j is record positions[j] of expert ids[j].
struct BatchedRows {
  const float* base;  ///< [num_local_experts, rows_per_expert, width]
  const LocalExpert* ids;
  const int32_t* positions;
  int64_t rows_per_expert;
  int64_t width;
  const float* row(int64_t slot) const {
    if (ids[slot] == LocalExpert::none) return nullptr;
    return base + (index_of(ids[slot]) * rows_per_expert + positions[slot]) * width;
  }
};

/// Columns [begin, end) of the sum, to out[begin, end). See sum_slots() for the definition.
void sum_columns(const PointerRows& rows, const float* weights, int64_t top_k, int64_t begin,
                 int64_t end, float* out);
void sum_columns(const SlotRows& rows, const float* weights, int64_t top_k, int64_t begin,
                 int64_t end, float* out);
void sum_columns(const BatchedRows& rows, const float* weights, int64_t top_k, int64_t begin,
                 int64_t end, float* out);

}  // namespace moekit::reduce
