// ExpertRows: what prepare hands to the experts. ExpertOutput: what they hand to finalize.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/expert_id.h"
#include "quant/row_format.h"

namespace moekit {

enum class RowsLayout : uint8_t {
  standard,  ///< records [num_rows]; each row has top_k slots of global ids
  batched,   ///< records [num_local_experts, rows_per_expert]; the first expert_num_rows[e] of each
             ///< are valid
};

constexpr const char* to_string(RowsLayout layout) {
  return layout == RowsLayout::standard ? "standard" : "batched";
}

/// Where one batched row comes from. A token that names an expert twice has one row there: the
/// first of its slots stands here, slot_positions has them all.
struct RowOrigin {
  int32_t rank = 0;     ///< owner of the token
  int32_t slot = 0;     ///< in [0, top_k)
  int64_t token = 0;    ///< on that rank
  float weight = 0.0f;  ///< router weight of the slot
};

/// Input of Experts::run. Views into the workspace or the caller's memory.
struct ExpertRows {
  RowsLayout layout = RowsLayout::standard;
  RowFormat format;  ///< of `records`
  const std::byte* records = nullptr;
  int64_t record_stride =
      0;  ///< bytes; >= format.record_bytes, or the caller's row stride for f32 and bf16
  /// Which record is a row's: [num_rows], batched rows [num_local_experts, rows_per_expert]. Null:
  /// the record of the row's own number.
  const int64_t* record_index = nullptr;
  const std::byte* record(int64_t row) const {
    return records + (record_index != nullptr ? record_index[row] : row) * record_stride;
  }
  // standard
  int64_t num_rows = 0;
  int64_t top_k = 0;
  const LocalExpert* ids = nullptr;  ///< [num_rows, top_k]; none = not on this rank
  const float* weights = nullptr;    ///< [num_rows, top_k]
  // batched
  int64_t rows_per_expert = 0;               ///< capacity T_max
  const int32_t* expert_num_rows = nullptr;  ///< [num_local_experts]
  /// [num_rows, top_k]: which record of its expert's block serves a slot. Set, with num_rows,
  /// top_k, ids and weights, where the rank that ran the experts sums batched rows
  /// (Summer::reduce).
  const int32_t* slot_positions = nullptr;
  const RowOrigin* origins = nullptr;  ///< [num_local_experts, rows_per_expert]
};

/// Output of Experts::run, f32. Layout follows the duty:
///   summer == experts:            [num_rows, width] (weighted unless weigher == input)
///   otherwise, standard rows:     [num_rows, top_k, width] slot rows, unweighted; slots without a
///   local expert are left untouched otherwise, batched rows:      [num_local_experts,
///   rows_per_expert, width], unweighted
struct ExpertOutput {
  float* data = nullptr;
  int64_t width = 0;
};

}  // namespace moekit
