// The head of a packed group of experts: everything run_mlp must know, so that a blob describes
// itself.
#pragma once

#include <cstdint>

#include "base/math.h"
#include "linear/column_order.h"
#include "linear/panel_spec.h"

namespace moekit::linear {

struct BlobHead {
  int64_t num_experts = 0;
  int64_t first_expert = 0;  ///< offset
  int64_t expert_bytes = 0;
  int64_t first_order = 0;  ///< offset in an expert: orders of gate, up, down where they are sorted
  PanelSpec gate, up, down;
  bool halves_share_scale = true;   ///< gate and up of each expert have one static input scale
  bool experts_share_scale = true;  ///< and so have all experts
};

/// Where in an expert the orders of its matrices lie, one after the other from first_order on; one
/// whose columns are not sorted takes no bytes.
struct OrderOffsets {
  int64_t gate = 0, up = 0, down = 0, end = 0;

  static OrderOffsets of(int64_t first, const PanelSpec& gate, const PanelSpec& up,
                         const PanelSpec& down) {
    OrderOffsets o;
    o.gate = first;
    o.up = o.gate + order_bytes(gate.places);
    o.down = o.up + order_bytes(up.places);
    o.end = o.down + order_bytes(down.places);
    return o;
  }
};

/// What one expert's input rows need: static scales in their scheme's sense.
struct ExpertInputs {
  float gate = 1.0f;
  float up = 1.0f;
  float down = 1.0f;
  int32_t halves_share_order = 1;  ///< columns of gate and up are sorted alike
};

/// [BlobHead | ExpertInputs x num_experts].
inline int64_t blob_head_bytes(int64_t num_experts) {
  return round_up(int64_t{sizeof(BlobHead)} + num_experts * int64_t{sizeof(ExpertInputs)}, 128);
}

}  // namespace moekit::linear
