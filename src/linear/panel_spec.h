// PanelSpec: how the CPU kernels hold one weight matrix: 32-column panels of small codes with their
// scales beside them. A plain value, stored in the head of a packed blob.
//
// A panel is [codes | scales | zero points | column scales | bias]. Codes lie in blocks of 32 K;
// inside a block come two halves of 16 columns; inside a half, units of 64 bytes: one 32-bit word a
// column, holding 32 / bits consecutive K. So a bf16 unit is the VNNI-2 line that vdpbf16ps and AMX
// read, and every format is packed by the same transposition of 32-bit words. Two formats permute
// their words afterwards so that a decoder needs fewer instructions (panel_pack.cc).
#pragma once

#include <cstdint>
#include <string>

#include "base/math.h"
#include "linear/codes.h"
#include "linear/column_order.h"
#include "quant/row_format.h"
#include "quant/stored_matrix.h"

namespace moekit::linear {

struct PanelSpec {
  int64_t rows = 0;    ///< outputs N
  int64_t cols = 0;    ///< inputs K
  int64_t places = 0;  ///< of a K axis sorted by scale group (column_order.h); 0: K as stored
  int32_t group = 0;   ///< K elements a scale and zero point; 0: one zero point a column, no scale
  Code code = Code::bf16;
  Scale scale = Scale::none;
  bool zeros = false;  ///< int8 zero points, centred like their codes
  bool widened = false;

  int64_t panels() const { return ceil_div(rows, kPanelCols); }
  bool is_sorted() const { return places > 0; }
  /// K elements that panels hold, without the pad at the end.
  int64_t packed_cols() const { return is_sorted() ? places : cols; }
  int64_t k_padded() const { return round_up(packed_cols(), kBlockK); }
  int64_t groups() const { return group > 0 ? ceil_div(k_padded(), int64_t{group}) : 1; }
  int64_t half_bytes() const { return kBlockK / unit_k(code) * kUnitBytes; }
  int64_t code_bytes() const { return k_padded() / kBlockK * 2 * half_bytes(); }
  int64_t scale_bytes() const {
    if (scale == Scale::none) return 0;
    const int64_t columns = scale == Scale::f32_panel ? 1 : kPanelCols;
    return round_up(groups() * columns * bytes_of(scale), kUnitBytes);
  }
  int64_t zero_bytes() const { return zeros ? groups() * kPanelCols : 0; }
  int64_t scale_offset() const { return code_bytes(); }
  int64_t zero_offset() const { return scale_offset() + scale_bytes(); }
  int64_t column_scale_offset() const { return round_up(zero_offset() + zero_bytes(), kUnitBytes); }
  int64_t bias_offset() const { return column_scale_offset() + kPanelCols * 4; }
  int64_t panel_bytes() const { return bias_offset() + kPanelCols * 4; }
  int64_t total_bytes() const {
    return checked_mul(panels(), panel_bytes(), "packed weight panels");
  }
};

/// How `m` is packed. Columns that name their group one by one (act order) are sorted by it.
/// Storages whose scales can't be grouped along K (groups along outputs, odd group sizes) are
/// widened exactly: to bf16 where code times scale fits, else to f32. Reads group indices, and the
/// zero points of 8-bit codes that are stored with an offset.
PanelSpec plan_panels(const StoredMatrix& m);

/// The same for a matrix whose columns are sorted together with those of others; without places:
/// whose columns are not sorted.
PanelSpec plan_panels(const StoredMatrix& m, const SortedColumns& sorted);

/// Whether `m` has to be sorted, if it keeps its format.
bool names_groups(const StoredMatrix& m);

/// Whether matrices of `scheme` may be packed with zero points: what workspaces are sized by.
constexpr bool may_have_zeros(const WeightScheme& scheme) {
  return scheme.format == WeightFormat::int4_group || scheme.format == WeightFormat::int8_group ||
         scheme.format == WeightFormat::int4_channel || scheme.format == WeightFormat::int8_channel;
}

/// The scheme that `spec` holds `m` in: m.scheme, or the wider one.
WeightScheme packed_scheme(const StoredMatrix& m, const PanelSpec& spec);

/// Why `m` was widened, or that its columns were sorted, for explain; empty when neither is so.
std::string packing_note(const StoredMatrix& m, const PanelSpec& spec);

/// K elements summed before a scale is applied: what one accumulator run covers. 0: no scales at
/// all, the sum runs through K. Part of the definition of a result's bits, so it depends on the
/// formats only.
int64_t segment_of(const PanelSpec& spec, ActivationFormat input);

}  // namespace moekit::linear
