#include "linear/mlp_scratch.h"

#include <algorithm>

#include "linear/kernels.h"
#include "linear/row_operand.h"

namespace moekit::linear {
namespace {

/// Scratch of a chunk is kept near this size; more rows go in several chunks.
constexpr int64_t kChunkBytes = int64_t{192} << 20;
constexpr int64_t kMinChunkRows = 64;
constexpr int64_t kMaxChunkRows = 4096;

}  // namespace

MlpScratch mlp_scratch(const MlpShape& shape, const MlpPlaces& places, RowsLayout layout,
                       int64_t num_experts, int64_t max_rows, int num_threads) {
  MlpScratch s;
  const bool batched = layout == RowsLayout::batched;
  const int64_t k = batched ? 1 : shape.top_k;
  const bool per_slot = is_static(shape.gate_up_input) || places.gate_up > 0;
  const int64_t input_values = std::max(shape.width, places.gate_up);
  const int64_t hidden_values = std::max(shape.inter, places.down);
  s.input_stride = operand_stride(input_values);
  s.hidden_stride = operand_stride(hidden_values);
  s.input_extras = operand_extras(input_values, shape.gate_up_input.format, shape.zero_points);
  s.hidden_extras = operand_extras(hidden_values, shape.down_input.format, shape.zero_points);
  const int64_t row_bytes =
      (s.input_stride + s.input_extras * 4) * (per_slot ? 2 * k : 1) +
      k * (s.hidden_stride + s.hidden_extras * 4 + 128 + (batched ? 0 : shape.width * 4));
  const int64_t all_rows = batched ? max_rows * num_experts : max_rows;
  s.chunk_rows = std::clamp(kChunkBytes / row_bytes, kMinChunkRows, kMaxChunkRows);
  s.chunk_rows = std::max<int64_t>(1, std::min(s.chunk_rows, all_rows));
  s.chunk_slots = s.chunk_rows * k;
  s.input_rows = per_slot ? s.chunk_slots : s.chunk_rows;
  const int64_t max_items = num_experts + s.chunk_slots;

  WorkspaceLayout w;
  s.counts = w.add(num_experts + 1, 4);
  s.order = w.add(s.chunk_slots, 4);
  s.places = w.add(s.chunk_slots, 4);
  s.experts = w.add(s.chunk_slots, 4);
  s.batched = w.add(batched ? s.chunk_slots : 0, 8);
  s.items = w.add(max_items, sizeof(MlpItem));
  s.gate_rows = w.add(s.chunk_slots, sizeof(RowOperand));
  s.up_rows = w.add(s.chunk_slots, sizeof(RowOperand));
  s.hidden_rows = w.add(s.chunk_slots, sizeof(RowOperand));
  s.row_ready = w.add(s.chunk_rows, sizeof(RowOperand));
  s.gate_inputs = w.add(s.input_rows, s.input_stride);
  s.gate_extras = w.add(s.input_rows, s.input_extras * 4);
  s.up_inputs = w.add(per_slot ? s.input_rows : 0, s.input_stride);
  s.up_extras = w.add(per_slot ? s.input_rows : 0, s.input_extras * 4);
  s.hidden = w.add(s.chunk_slots, s.hidden_stride);
  s.hidden_extra = w.add(s.chunk_slots, s.hidden_extras * 4);
  s.slot_rows = w.add(batched ? 0 : s.chunk_slots, shape.width * 4);

  WorkspaceLayout t;
  s.sums_offset = t.add(kMaxTaskPanels * kMaxRowBlock * kPanelCols, 4).offset;
  s.decode_offset = t.add(kScratchBytes, 1).offset;
  s.prepare_offset = t.add(prepare_scratch_bytes(std::max(shape.width, shape.inter),
                                                 std::max(places.gate_up, places.down)),
                           1)
                         .offset;
  s.owner_offset = t.add(kMaxOwnerSlots * kMaxTaskPanels * kPanelCols, 4).offset;
  s.thread_bytes = t.total();
  s.per_thread = w.add(num_threads, s.thread_bytes);
  s.total = w.total();
  return s;
}

}  // namespace moekit::linear
