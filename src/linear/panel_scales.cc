#include "linear/panel_scales.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear/pack_loops.h"
#include "quant/stored_codec.h"
#include "tensor/float_formats.h"

namespace moekit::linear {
namespace {

void store_scale(Scale kind, float value, int64_t index, std::byte* out) {
  switch (kind) {
    case Scale::none: return;
    case Scale::e8m0: out[index] = static_cast<std::byte>(f32_bits(value) >> 23 & 255u); return;
    case Scale::e4m3: out[index] = static_cast<std::byte>(f32_to_e4m3(value)); return;
    case Scale::f32_panel:
    case Scale::f32: std::memcpy(out + index * 4, &value, 4); return;
    case Scale::f16: {
      const uint16_t b = f32_to_f16(value);
      std::memcpy(out + index * 2, &b, 2);
      return;
    }
    case Scale::bf16: {
      const uint16_t b = f32_to_bf16(value);
      std::memcpy(out + index * 2, &b, 2);
      return;
    }
  }
}

/// The bits that only NaN bytes have all of; 0: scales of this kind are no bytes.
uint8_t nan_mask_of(Scale kind) {
  switch (kind) {
    case Scale::e8m0: return 0xff;
    case Scale::e4m3: return 0x7f;
    default: return 0;
  }
}

/// Whether scale elements can be copied bit for bit: stored in the panel's own type, one a row.
bool copies_scales(const StoredMatrix& m, const PanelSpec& spec) {
  const CodeGrid& g = m.scales.values;
  if (g.pack_axis != PackAxis::none || m.scales.row_group > 1) return false;
  switch (spec.scale) {
    case Scale::e8m0:
    case Scale::e4m3: return bits_of(g.unit) == 8;
    case Scale::f16: return g.unit == DType::f16;
    case Scale::bf16: return g.unit == DType::bf16;
    case Scale::f32: return g.unit == DType::f32;
    default: return false;
  }
}

/// Whether the loops take the grid's elements of a panel's rows, which are whole, in one go.
bool takes_rows(const ScaleGrid& grid, bool in_sequence, int64_t valid, int64_t bytes) {
  return valid == kPanelCols && grid.values.col_stride == bytes && in_sequence;
}

/// First element of a grid with one entry a row, or one for all of them.
const std::byte* grid_row(const StoredMatrix& m, const ScaleGrid& grid, int64_t row) {
  const int64_t p = grid.row_group == 0 ? 0 : m.row_first + m.row_step * row;
  return grid.values.data + p * grid.values.row_stride;
}

/// A column of panel group g.
int64_t column_in(const PanelSpec& spec, const PanelGroups& groups, int64_t g) {
  return groups.order != nullptr ? groups.order[g * spec.group] : g * spec.group;
}

/// The stored group of panel group g.
int64_t stored_group(const StoredMatrix& m, const PanelSpec& spec, const PanelGroups& groups,
                     int64_t g) {
  if (groups.in_sequence) return g;
  const int64_t column = column_in(spec, groups, g);
  if (m.group_index != nullptr) return m.group_index[column];
  return m.scales.col_group > 0 ? column / m.scales.col_group : 0;
}

/// out[group][column] = stored element, for columns [0, valid); grids of whole elements, one a row.
/// Returns whether bytes with all bits of `nan_mask` may be among them.
template <int kBytes>
bool copy_grid(const StoredMatrix& m, const PanelSpec& spec, const PanelGroups& groups,
               const ScaleGrid& grid, int64_t first_row, int64_t valid, uint8_t nan_mask,
               std::byte* out) {
  const CodeGrid& g = grid.values;
  const auto offset = [&](int64_t i) { return stored_group(m, spec, groups, i) * g.col_stride; };
  if (takes_rows(grid, groups.in_sequence, valid, kBytes)) {
    const std::byte* rows[kPanelCols];
    for (int64_t c = 0; c < kPanelCols; ++c) rows[c] = grid_row(m, grid, first_row + c);
    return pack_loops().scales(rows, groups.count, kBytes, nan_mask, out);
  }
  const bool beside = grid.row_group == 1 && m.row_step == 1 && g.row_stride == kBytes;
  if (valid == kPanelCols && beside) {
    const std::byte* from = grid_row(m, grid, first_row);
    for (int64_t i = 0; i < groups.count; ++i) {
      std::memcpy(out + i * kPanelCols * kBytes, from + offset(i), kPanelCols * kBytes);
    }
    return nan_mask != 0;
  }
  const int64_t spacing = m.row_step * g.row_stride;
  if (grid.row_group == 1 && spacing <= 8) {  // a group's elements share a line or two
    for (int64_t i = 0; i < groups.count; ++i) {
      const std::byte* from = grid_row(m, grid, first_row) + offset(i);
      std::byte* to = out + i * kPanelCols * kBytes;
      for (int64_t c = 0; c < valid; ++c) std::memcpy(to + c * kBytes, from + c * spacing, kBytes);
    }
    return nan_mask != 0;
  }
  for (int64_t c = 0; c < valid; ++c) {
    const std::byte* from = grid_row(m, grid, first_row + c);
    std::byte* to = out + c * kBytes;
    for (int64_t i = 0; i < groups.count; ++i) {
      std::memcpy(to + i * kPanelCols * kBytes, from + offset(i), kBytes);
    }
  }
  return nan_mask != 0;
}

/// NaN among byte scales: their columns' scales become NaN, the bytes 0.
void poison_scales(uint8_t nan_mask, int64_t groups, std::byte* out, float* column_scale) {
  const auto is_nan = [&](std::byte b) {
    return (std::to_integer<uint8_t>(b) & nan_mask) == nan_mask;
  };
  for (int64_t g = 0; g < groups; ++g, out += kPanelCols) {
    bool any = false;
    for (int64_t c = 0; c < kPanelCols; ++c) any |= is_nan(out[c]);
    for (int64_t c = 0; any && c < kPanelCols; ++c) {
      if (!is_nan(out[c])) continue;
      column_scale[c] = kNan;
      out[c] = std::byte{0};
    }
  }
}

/// Zero points that share 32-bit words along outputs: unpacked as stored. False where they do not.
bool unpack_zeros(const StoredMatrix& m, const PanelSpec& spec, const PanelGroups& groups,
                  int64_t first_row, std::byte* out) {
  const CodeGrid& g = m.zeros.values;
  if (g.pack_axis != PackAxis::rows || bits_of(g.unit) != 32 || m.zeros.row_group != 1)
    return false;
  if ((g.pack != 8 && g.pack != 4) || m.row_step != 1 || m.row_first % g.pack != 0) return false;
  if (g.pack == 4 && g.order != PackOrder::sequential) return false;
  const std::byte* base = g.data + (m.row_first + first_row) / g.pack * g.row_stride;
  if (g.pack == 8) {
    const bool awq = g.order == PackOrder::awq;
    const int64_t run = groups.in_sequence ? groups.count : 1;
    for (int64_t i = 0; i < groups.count; i += run) {
      const std::byte* from = base + stored_group(m, spec, groups, i) * g.col_stride;
      pack_loops().zero_words(from, g.row_stride, g.col_stride, run, awq, out + i * kPanelCols);
    }
    return true;
  }
  for (int64_t i = 0; i < groups.count; ++i) {
    const std::byte* from = base + stored_group(m, spec, groups, i) * g.col_stride;
    for (int64_t w = 0; w < kPanelCols / 4; ++w) {
      std::memcpy(out + i * kPanelCols + w * 4, from + w * g.row_stride, 4);
    }
  }
  return true;
}

void prefetch_span(const std::byte* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
}

/// Rows of a dense grid lie in one piece; else each group has a piece of its own.
void prefetch_grid(const StoredMatrix& m, const ScaleGrid& grid, int64_t first_row,
                   int64_t groups) {
  const CodeGrid& g = grid.values;
  if (grid.empty() || grid.row_group > 1) return;
  if (g.pack_axis == PackAxis::none && g.row_stride >= groups * g.col_stride) {
    prefetch_span(grid_row(m, grid, first_row), kPanelCols * m.row_step * g.row_stride);
    return;
  }
  const int64_t p = m.row_first + m.row_step * first_row;
  const std::byte* from = g.data + (g.pack_axis == PackAxis::rows ? p / g.pack : p) * g.row_stride;
  for (int64_t i = 0; i < groups; ++i) __builtin_prefetch(from + i * g.col_stride, 0, 2);
}

}  // namespace

PanelGroups PanelGroups::of(const StoredMatrix& m, const PanelSpec& spec, const int32_t* order) {
  PanelGroups groups;
  if (order == nullptr) {
    groups.count = spec.group > 0 ? ceil_div(m.cols, int64_t{spec.group}) : 1;
    return groups;
  }
  groups.order = order;
  groups.in_sequence = false;
  bool in_sequence = true;
  const int64_t most = ceil_div(spec.places, int64_t{spec.group});
  while (groups.count < most && column_in(spec, groups, groups.count) < m.cols) {
    in_sequence = in_sequence && stored_group(m, spec, groups, groups.count) == groups.count;
    ++groups.count;
  }
  groups.in_sequence = in_sequence;
  return groups;
}

void prefetch_scales(const StoredMatrix& m, const PanelSpec& spec, int64_t panel,
                     const std::byte* panel_out) {
  // Where loops take whole rows, scales go past the caches.
  const int64_t valid = std::min(kPanelCols, m.rows - panel * kPanelCols);
  const bool streams = copies_scales(m, spec) &&
                       takes_rows(m.scales, !spec.is_sorted(), valid, bytes_of(spec.scale));
  for (int64_t at = streams ? spec.zero_offset() : spec.scale_offset(); at < spec.panel_bytes();
       at += 64) {
    __builtin_prefetch(panel_out + at, 1, 2);
  }
  if (spec.group == 0 || spec.scale == Scale::f32_panel) return;
  const int64_t groups = ceil_div(m.cols, int64_t{spec.group});
  prefetch_grid(m, m.scales, panel * kPanelCols, groups);
  if (spec.zeros) prefetch_grid(m, m.zeros, panel * kPanelCols, groups);
}

void pack_scales(const StoredMatrix& m, const PanelSpec& spec, const PanelGroups& groups,
                 int64_t panel, std::byte* out, float* column_scale) {
  if (spec.scale == Scale::none) return;
  const int64_t first_row = panel * kPanelCols;
  const int64_t valid = std::min(kPanelCols, m.rows - first_row);
  const int64_t columns = spec.scale == Scale::f32_panel ? 1 : kPanelCols;
  const int64_t filled = valid < kPanelCols ? 0 : groups.count * columns * bytes_of(spec.scale);
  std::memset(out + filled, 0, static_cast<size_t>(spec.scale_bytes() - filled));
  if (spec.scale == Scale::f32_panel) {
    for (int64_t g = 0; g < groups.count; ++g) {
      store_scale(spec.scale, quant::scale_at(m, first_row, g * spec.group), g, out);
    }
    return;
  }
  if (copies_scales(m, spec)) {
    const uint8_t nan_mask = nan_mask_of(spec.scale);
    bool nans = false;
    switch (bytes_of(spec.scale)) {
      case 1:
        nans = copy_grid<1>(m, spec, groups, m.scales, first_row, valid, nan_mask, out);
        break;
      case 2: copy_grid<2>(m, spec, groups, m.scales, first_row, valid, 0, out); break;
      default: copy_grid<4>(m, spec, groups, m.scales, first_row, valid, 0, out); break;
    }
    if (nans) poison_scales(nan_mask, groups.count, out, column_scale);
    return;
  }
  for (int64_t c = 0; c < valid; ++c) {
    for (int64_t g = 0; g < groups.count; ++g) {
      const float value = quant::scale_at(m, first_row + c, column_in(spec, groups, g));
      if (std::isnan(value)) column_scale[c] = kNan;
      store_scale(spec.scale, std::isnan(value) ? 0.0f : value, g * kPanelCols + c, out);
    }
  }
}

void pack_zeros(const StoredMatrix& m, const PanelSpec& spec, const PanelGroups& groups,
                int64_t panel, int32_t centre, std::byte* out) {
  const int64_t first_row = panel * kPanelCols;
  const int64_t valid = std::min(kPanelCols, m.rows - first_row);
  const int64_t filled = valid < kPanelCols ? 0 : groups.count * kPanelCols;
  std::memset(out + filled, 0, static_cast<size_t>(spec.zero_bytes() - filled));
  const int32_t offset = m.code_offset - centre;
  const CodeGrid& g = m.zeros.values;
  if (valid == kPanelCols && m.zeros.empty()) {
    std::memset(out, std::clamp(offset, -128, 127), static_cast<size_t>(groups.count * kPanelCols));
    return;
  }
  if (valid == kPanelCols) {
    const bool whole =
        g.pack_axis == PackAxis::none && bits_of(g.unit) == 8 && m.zeros.row_group <= 1;
    if (whole) copy_grid<1>(m, spec, groups, m.zeros, first_row, valid, 0, out);
    if (whole || unpack_zeros(m, spec, groups, first_row, out)) {
      pack_loops().shift_zeros(out, groups.count * kPanelCols, whole && g.unit == DType::i8,
                               m.zero_offset + offset);
      return;
    }
  }
  for (int64_t i = 0; i < groups.count; ++i) {
    for (int64_t c = 0; c < valid; ++c) {
      const int32_t z = quant::zero_at(m, first_row + c, column_in(spec, groups, i));
      out[i * kPanelCols + c] =
          static_cast<std::byte>(static_cast<int8_t>(std::clamp(z + offset, -128, 127)));
    }
  }
}

}  // namespace moekit::linear
