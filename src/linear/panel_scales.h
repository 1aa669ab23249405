// Scales and zero points of one panel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "linear/panel_spec.h"
#include "quant/stored_matrix.h"

namespace moekit::linear {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Asks for what pack_scales and pack_zeros will read and write, so that it comes while codes are
/// packed. `panel_out` is the panel's first byte.
void prefetch_scales(const StoredMatrix& m, const PanelSpec& spec, int64_t panel,
                     const std::byte* panel_out);

/// The stored groups whose scales and zero points a panel's groups have.
struct PanelGroups {
  int64_t count = 0;               ///< that hold columns; groups behind them are pad
  const int32_t* order = nullptr;  ///< of the columns where they are sorted (column_order.h)
  bool in_sequence = true;         ///< group g is group g as stored

  static PanelGroups of(const StoredMatrix& m, const PanelSpec& spec, const int32_t* order);
};

/// Writes spec.scale_bytes(). NaN ones become NaN in `column_scale` ([32]) and zero bytes.
void pack_scales(const StoredMatrix& m, const PanelSpec& spec, const PanelGroups& groups,
                 int64_t panel, std::byte* out, float* column_scale);

/// Writes spec.zero_bytes(): zero points less what was taken from every code, saturated to 8 bits.
void pack_zeros(const StoredMatrix& m, const PanelSpec& spec, const PanelGroups& groups,
                int64_t panel, int32_t centre, std::byte* out);

}  // namespace moekit::linear
