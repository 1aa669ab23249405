#include "quant/stored_digest.h"

#include "base/math.h"

namespace moekit::quant {
namespace {

/// Stored outputs and inputs of a grid: the storage rows that `m` uses and their units.
struct Extent {
  int64_t first = 0, step = 1, rows = 0;  // units along outputs
  int64_t cols = 0;                       // units along inputs
};

void add_units(Digester& digester, const CodeGrid& grid, const Extent& extent) {
  const int64_t unit = bytes_of(grid.unit);
  for (int64_t r = 0; r < extent.rows; ++r) {
    const std::byte* row = grid.data + (extent.first + r * extent.step) * grid.row_stride;
    if (grid.col_stride == unit) {
      digester.add(row, extent.cols * unit);
    } else {
      for (int64_t c = 0; c < extent.cols; ++c) digester.add(row + c * grid.col_stride, unit);
    }
  }
}

/// Transposed storage lies contiguous along outputs: walked in its own order.
void add_columns(Digester& digester, const CodeGrid& grid, const Extent& extent) {
  for (int64_t c = 0; c < extent.cols; ++c) {
    digester.add(grid.data + extent.first * grid.row_stride + c * grid.col_stride,
                 extent.rows * bytes_of(grid.unit));
  }
}

void add_grid(Digester& digester, const CodeGrid& grid, const Extent& extent) {
  const bool transposed = grid.row_stride == bytes_of(grid.unit) && extent.step == 1 &&
                          grid.col_stride != bytes_of(grid.unit);
  digester.add(grid.unit);
  digester.add(grid.pack_axis);
  digester.add(grid.order);
  digester.add(grid.pack);
  digester.add(transposed);
  digester.add(extent.rows);
  digester.add(extent.cols);
  if (transposed) {
    add_columns(digester, grid, extent);
  } else {
    add_units(digester, grid, extent);
  }
}

/// Storage rows [first, last] of the matrix in groups of `group`, as one contiguous range of the
/// grid's units. Interleaved rows are covered with their neighbours: more than needed, never less.
Extent covering(const CodeGrid& grid, const StoredMatrix& m, int64_t row_group, int64_t col_group) {
  auto groups = [](int64_t begin, int64_t end, int64_t group) {
    return group == 0 ? std::pair<int64_t, int64_t>{0, 1}
                      : std::pair<int64_t, int64_t>{begin / group, ceil_div(end, group)};
  };
  const int64_t last = m.row_first + m.row_step * (m.rows - 1);
  auto [row_begin, row_end] =
      groups(std::min(m.row_first, last), std::max(m.row_first, last) + 1, row_group);
  auto [col_begin, col_end] = groups(0, m.cols, col_group);
  if (grid.pack_axis == PackAxis::rows) {
    row_begin /= grid.pack;
    row_end = ceil_div(row_end, int64_t{grid.pack});
  }
  if (grid.pack_axis == PackAxis::cols) col_end = ceil_div(col_end, int64_t{grid.pack});
  return {row_begin, 1, row_end - row_begin, col_end - col_begin};
}

Extent codes_of(const StoredMatrix& m) {
  if (m.codes.pack_axis == PackAxis::rows || m.row_step < 0) return covering(m.codes, m, 1, 1);
  const int64_t pack = m.codes.pack_axis == PackAxis::cols ? m.codes.pack : 1;
  return {m.row_first, m.row_step, m.rows, ceil_div(m.cols, pack)};
}

void add_scales(Digester& digester, const ScaleGrid& scales, const StoredMatrix& m) {
  digester.add(scales.empty());
  if (scales.empty()) return;
  digester.add(scales.row_group);
  digester.add(scales.col_group);
  add_grid(digester, scales.values, covering(scales.values, m, scales.row_group, scales.col_group));
}

}  // namespace

void add(Digester& digester, const StoredMatrix& m) {
  digester.add(m.empty());
  if (m.empty()) return;
  digester.add(m.rows);
  digester.add(m.cols);
  digester.add(m.scheme.format);
  digester.add(m.scheme.group);
  digester.add(m.scheme.zero_points);
  // Where groups and packed units begin depends on the first row.
  digester.add(m.row_first);
  digester.add(m.row_step);
  add_grid(digester, m.codes, codes_of(m));
  add_scales(digester, m.scales, m);
  add_scales(digester, m.zeros, m);
  digester.add(m.zero_offset);
  digester.add(m.code_offset);
  digester.add(m.group_index != nullptr);
  if (m.group_index != nullptr)
    digester.add(m.group_index, m.cols * static_cast<int64_t>(sizeof(int32_t)));
  digester.add(m.global);
  digester.add(m.global_sense);
  digester.add(m.input_scale);
}

void add(Digester& digester, const StoredVector& v) {
  digester.add(v.size);
  digester.add(v.dtype);
  const int64_t unit = bytes_of(v.dtype);
  for (int64_t i = 0; i < v.size; ++i) digester.add(v.data + (v.first + v.step * i) * unit, unit);
}

Digest digest_of(const StoredExpert& expert) {
  Digester digester;
  for (const StoredMatrix* m : {&expert.gate, &expert.up, &expert.down}) add(digester, *m);
  for (const StoredVector* v : {&expert.gate_bias, &expert.up_bias, &expert.down_bias})
    add(digester, *v);
  return digester.result();
}

}  // namespace moekit::quant
