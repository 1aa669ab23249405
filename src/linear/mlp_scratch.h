// MlpScratch: the workspace of a grouped MLP pass.
#pragma once

#include <cstdint>

#include "linear/grouped_mlp.h"
#include "linear/kernels.h"
#include "problem/workspace_layout.h"

namespace moekit::linear {

/// Rows multiplied by one panel in one go, and slots of a row block that one thread sums itself.
inline constexpr int64_t kMaxRowBlock = 240;
/// Panels of a task, whose sums a thread holds: gate and up of the same columns, or so many of
/// down.
inline constexpr int64_t kTaskPanels = 2;
/// The same where few rows take panels side by side.
inline constexpr int64_t kMaxTaskPanels = kMaxPanelsBeside;
inline constexpr int64_t kMaxOwnerSlots = 256;

/// Rows [first, first + count) of the expert-sorted list, all of one expert.
struct MlpItem {
  int32_t expert = 0;
  int32_t first = 0;
  int32_t count = 0;
  int32_t block = 0;  ///< which of the expert's `blocks` items this is
  int32_t blocks = 1;
};

/// Sizes and places of everything in the workspace. Computed alike when it is reserved and when a
/// pass runs.
struct MlpScratch {
  int64_t chunk_rows = 0;
  int64_t chunk_slots = 0;
  int64_t input_rows = 0;  ///< prepared rows: one a row, or one a slot where scales or orders of
                           ///< columns are an expert's
  int64_t input_stride = 0, input_extras = 0;
  int64_t hidden_stride = 0, hidden_extras = 0;
  Region counts, order, places, experts, batched, items;
  Region gate_rows, up_rows, hidden_rows, row_ready;
  Region gate_inputs, up_inputs, gate_extras, up_extras, hidden, hidden_extra, slot_rows;
  Region per_thread;
  int64_t thread_bytes = 0;
  int64_t sums_offset = 0, decode_offset = 0, prepare_offset = 0, owner_offset = 0;
  int64_t total = 0;
};

/// One scale for all rows of an expert: rows are prepared per slot.
inline bool is_static(const ActivationScheme& s) {
  return s.format == ActivationFormat::fp8_tensor || s.static_scale;
}

/// Rows that need no scale: a finished intermediate panel is ready as it is stored.
inline bool is_plain(const ActivationScheme& s) {
  return s.format == ActivationFormat::f32 || s.format == ActivationFormat::bf16;
}

MlpScratch mlp_scratch(const MlpShape& shape, const MlpPlaces& places, RowsLayout layout,
                       int64_t num_experts, int64_t max_rows, int num_threads);

}  // namespace moekit::linear
