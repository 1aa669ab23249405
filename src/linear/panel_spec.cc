#include "linear/panel_spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "quant/stored_codec.h"

namespace moekit::linear {

bool names_groups(const StoredMatrix& m) {
  return m.group_index != nullptr && may_have_zeros(m.scheme) && !m.scales.empty();
}

namespace {

bool is_int4(WeightFormat f) {
  return f == WeightFormat::int4_group || f == WeightFormat::int4_channel;
}

Code code_of(WeightFormat f) {
  switch (f) {
    case WeightFormat::bf16: return Code::bf16;
    case WeightFormat::f16: return Code::f16;
    case WeightFormat::f32: return Code::f32;
    case WeightFormat::mxfp8_e5m2: return Code::e5m2;
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4: return Code::e2m1;
    case WeightFormat::int4_group:
    case WeightFormat::int4_channel: return Code::int4;
    case WeightFormat::int8_group:
    case WeightFormat::int8_channel: return Code::int8;
    default: return Code::e4m3;
  }
}

/// Whether a grid's groups run along K in runs that a segment can follow. The decoders step over up
/// to 8 K at once and blocks are 32 long, so a group must be a multiple of 16.
bool groups_along_k(const ScaleGrid& grid) {
  return grid.empty() || grid.col_group == 0 || grid.col_group % 16 == 0;
}

/// One value for the whole of K: it moves to the column scale.
bool is_per_column(const ScaleGrid& grid, int64_t cols) {
  return grid.empty() || grid.col_group == 0 || grid.col_group >= cols;
}

/// Whether all 32 columns of each panel share a scale row.
bool uniform_over_panels(const StoredMatrix& m) {
  const int64_t group = m.scales.row_group;
  if (group == 0) return true;
  for (int64_t first = 0; first < m.rows; first += kPanelCols) {
    const int64_t last = std::min(first + kPanelCols, m.rows) - 1;
    if ((m.row_first + m.row_step * first) / group != (m.row_first + m.row_step * last) / group) {
      return false;
    }
  }
  return true;
}

Scale scale_of(const StoredMatrix& m) {
  const WeightFormat f = m.scheme.format;
  if (f == WeightFormat::mxfp8 || f == WeightFormat::mxfp8_e5m2 || f == WeightFormat::mxfp4) {
    return Scale::e8m0;
  }
  if (f == WeightFormat::nvfp4) return Scale::e4m3;
  if (may_have_zeros(m.scheme)) {
    if (m.scales.values.unit == DType::f16) return Scale::f16;
    if (m.scales.values.unit == DType::bf16) return Scale::bf16;
    return Scale::f32;
  }
  return uniform_over_panels(m) ? Scale::f32_panel : Scale::f32;
}

/// Formats whose code times scale has at most 8 significant bits: exact in bf16, down to the
/// subnormal range.
bool fits_bf16(WeightFormat f) {
  return f == WeightFormat::mxfp8 || f == WeightFormat::mxfp8_e5m2 || f == WeightFormat::mxfp4 ||
         f == WeightFormat::nvfp4;
}

/// Whether a 32-bit word has a byte of ones.
bool has_full_byte(uint32_t word) {
  const uint32_t missing = ~word;  // a zero byte
  return ((missing - 0x01010101u) & ~missing & 0x80808080u) != 0;
}

/// Whether every zero point, offset applied and centred, is an int8. GPTQ stores z - 1 of 8 bits:
/// a stored 255 stands for 256, which is one too many.
bool zeros_fit(const StoredMatrix& m) {
  if (m.zeros.empty() || m.zero_offset == 0 || is_int4(m.scheme.format)) return true;
  const CodeGrid& g = m.zeros.values;
  const bool are_words = g.pack_axis == PackAxis::rows && bits_of(g.unit) == 32 && g.pack == 4 &&
                         m.zero_offset == 1 && m.row_step > 0;
  if (!are_words) {
    for (int64_t n = 0; n < m.rows; ++n) {
      for (int64_t k = 0; k < m.cols; ++k) {
        if (quant::zero_at(m, n, k) > 255) return false;
      }
    }
    return true;
  }
  const int64_t first = m.row_first / g.pack;
  const int64_t last = (m.row_first + m.row_step * (m.rows - 1)) / g.pack;
  const bool grouped = m.group_index != nullptr || m.zeros.col_group > 0;
  const int64_t groups = grouped ? count_groups(m) : 1;
  bool any = false;
  for (int64_t i = 0; i < groups; ++i) {
    for (int64_t u = first; u <= last; ++u) {
      uint32_t word;
      std::memcpy(&word, g.data + u * g.row_stride + i * g.col_stride, sizeof(word));
      any |= has_full_byte(word);
    }
  }
  return !any;
}

/// Why `m` can't keep its format; null when it can.
const char* obstacle(const StoredMatrix& m) {
  if (m.scales.empty() && m.zeros.empty()) return nullptr;
  if (m.group_index != nullptr) {
    if (!names_groups(m)) return "its columns name their scale group one by one";
  } else if (!groups_along_k(m.scales) || !groups_along_k(m.zeros)) {
    return "its scales do not run along the input axis in groups of a multiple of 16";
  }
  const bool grouped_scales = !is_per_column(m.scales, m.cols);
  const bool grouped_zeros = !is_per_column(m.zeros, m.cols);
  const bool unlike = grouped_zeros && (!grouped_scales || m.zeros.col_group != m.scales.col_group);
  if (m.group_index == nullptr && unlike) {
    return "its zero points and its scales have unlike groups";
  }
  return zeros_fit(m) ? nullptr : "its zero points exceed 8 bits";
}

}  // namespace

PanelSpec plan_panels(const StoredMatrix& m, const SortedColumns& sorted) {
  PanelSpec spec;
  spec.rows = m.rows;
  spec.cols = m.cols;
  spec.code = code_of(m.scheme.format);
  if (obstacle(m) != nullptr) {
    spec.code = fits_bf16(m.scheme.format) ? Code::bf16 : Code::f32;
    spec.widened = true;
    return spec;
  }
  if (!is_per_column(m.scales, m.cols)) {
    spec.group = static_cast<int32_t>(m.scales.col_group);
    spec.scale = scale_of(m);
  }
  if (may_have_zeros(m.scheme)) {
    // Packed codes are centred. Symmetric storages are centred themselves, so that no zero point is
    // left; any other offset is one zero point a column.
    const bool is_signed = m.codes.pack_axis == PackAxis::none && m.codes.unit == DType::i8;
    const int32_t centre = is_signed ? 0 : spec.code == Code::int4 ? 8 : 128;
    spec.zeros = !m.zeros.empty() || m.code_offset != centre;
  }
  if (sorted.places > 0) {
    spec.group = sorted.group;
    spec.places = sorted.places;
    spec.scale = scale_of(m);
  }
  return spec;
}

PanelSpec plan_panels(const StoredMatrix& m) {
  if (!names_groups(m)) return plan_panels(m, SortedColumns{});
  const StoredMatrix* const alone[1] = {&m};
  return plan_panels(m, sort_columns(alone));
}

WeightScheme packed_scheme(const StoredMatrix& m, const PanelSpec& spec) {
  if (!spec.widened) return m.scheme;
  return {spec.code == Code::bf16 ? WeightFormat::bf16 : WeightFormat::f32, 0, false};
}

std::string packing_note(const StoredMatrix& m, const PanelSpec& spec) {
  if (spec.widened) {
    return fmt::format("{} packed as {} because {}", to_string(m.scheme.format),
                       spec.code == Code::bf16 ? "bf16" : "f32", obstacle(m));
  }
  if (!spec.is_sorted()) return "";
  const std::string pad =
      spec.places == spec.cols
          ? ""
          : fmt::format("; groups of unlike sizes: {} places of {} for {} columns", spec.places,
                        spec.group, spec.cols);
  return fmt::format("{} packed with columns sorted by scale group (act order){}",
                     to_string(m.scheme.format), pad);
}

int64_t segment_of(const PanelSpec& spec, ActivationFormat input) {
  int64_t segment = 0;
  // Chunks of K end on multiples of kScratchK = 256, and so must segments.
  if (spec.group > 0) segment = std::gcd(int64_t{spec.group}, int64_t{256});
  if (spec.zeros && segment == 0) segment = 128;
  // Blocks of a permuted row are no runs of K: their scales are in its values.
  if (input == ActivationFormat::fp8_block && !spec.is_sorted())
    segment = segment == 0 ? 128 : std::gcd(segment, int64_t{128});
  return segment;
}

}  // namespace moekit::linear
