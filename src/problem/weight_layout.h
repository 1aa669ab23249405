// WeightLayout: how a back-end wants its packed weights, as a value: named row order, format,
// offsets. One layout a plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moekit/config.h"

namespace moekit {

/// Order of gate and up rows in a packed blob.
enum class RowOrder : uint8_t { gate_up, up_gate, interleaved, panels, not_gated };

struct WeightLayout {
  std::string name;  ///< "canonical" (no blob: read in place), "cpu_panels_bf16", ...
  RowOrder row_order = RowOrder::gate_up;
  WeightScheme gate_up{};  ///< as packed: may be wider than stored where the plan says so
  WeightScheme down{};
  int64_t num_local_experts = 0;
  std::vector<int64_t> expert_offset;  ///< [num_local_experts + 1] bytes
  int64_t total_bytes() const { return expert_offset.empty() ? 0 : expert_offset.back(); }
  /// How each expert's bytes are encoded. Where two layouts agree in it, packed experts may move
  /// from one blob to the other.
  std::string encoding;
  int64_t head_bytes() const { return expert_offset.empty() ? 0 : expert_offset.front(); }
  int64_t expert_bytes() const {
    return expert_offset.size() < 2 ? 0 : expert_offset[1] - expert_offset[0];
  }
  // Inputs of gate and up, and of down, as packed, where their columns are sorted by scale group:
  // what rows are permuted to. 0: as stored.
  int64_t gate_up_places = 0;
  int64_t down_places = 0;
  bool on_device = false;  ///< packed experts lie in a device's memory, one after the other
  std::string note;        ///< shown by explain: e.g. why a format was widened
};

}  // namespace moekit
