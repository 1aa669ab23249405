// Packing: a StoredMatrix into panels (PanelSpec), and back for tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/panel_spec.h"
#include "quant/stored_matrix.h"

namespace moekit::linear {

/// One panel of a matrix: spec->panel_bytes() at `out`, every byte of which is written. `bias` may
/// be empty.
struct PanelTask {
  const StoredMatrix* m = nullptr;
  const StoredVector* bias = nullptr;
  const PanelSpec* spec = nullptr;
  int64_t panel = 0;
  std::byte* out = nullptr;
  const int32_t* order = nullptr;  ///< of fill_order, where spec->is_sorted()
};

/// A few panels that one thread packs: neighbours of one matrix, gate's before up's. Together
/// they are faster than one by one; the bytes are the same. Runs are independent: callers spread
/// them over threads.
///
/// NaN codes of e4m3 and NaN scale bytes make their whole output NaN whatever the input is, so they
/// are kept as a NaN column scale and the decoders need not know of them.
class PanelRun {
 public:
  static constexpr int kMaxPanels = 8;

  void add(const PanelTask& task);
  /// `scratch` has pack_scratch_bytes of each spec. Never throws.
  void pack(std::byte* scratch = nullptr) const;

 private:
  PanelTask tasks_[kMaxPanels];
  int count_ = 0;
};

/// Scratch of one thread that packs runs of panels like `spec`; 0 where none is needed.
int64_t pack_scratch_bytes(const PanelSpec& spec);

/// A run of one panel.
void pack_panel(const PanelTask& task, std::byte* scratch = nullptr);

// Columns of a sorted matrix are counted in places.
/// The code at (row, col) of a packed matrix, as stored: the format's bits, or the centred integer.
uint32_t packed_code_at(const PanelSpec& spec, const std::byte* panels, int64_t row, int64_t col);

/// The exact value at (row, col), up to one rounding per scale.
float packed_value_at(const PanelSpec& spec, const std::byte* panels, int64_t row, int64_t col);

}  // namespace moekit::linear
