#include "problem/tensor_slice.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/math.h"

namespace moekit {
namespace {

constexpr ErrorCode kUnsupported = ErrorCode::unsupported;

int64_t packed_cols(const CodeGrid& grid) {
  return grid.pack_axis == PackAxis::cols ? grid.pack : 1;
}

/// Inputs that a scale (or zero point) and its neighbours in one storage unit cover.
int64_t col_block(const StoredMatrix& m, const ScaleGrid& grid) {
  // Act order names the group of each input; without groups one value serves all.
  if (grid.empty() || grid.col_group == 0 || m.group_index != nullptr) return 1;
  return grid.col_group * packed_cols(grid.values);
}

/// Blocks of scales along the outputs, in logical rows.
int64_t row_block(const StoredMatrix& m) {
  const int64_t group = m.scales.empty() ? 1 : std::max<int64_t>(1, m.scales.row_group);
  return std::max<int64_t>(1, group / std::gcd(group, m.row_step));
}

int64_t activation_block(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::fp8_block: return 128;
    case ActivationFormat::mxfp8:
    case ActivationFormat::mxfp4: return 32;
    case ActivationFormat::nvfp4: return 16;
    default: return 1;
  }
}

/// Column q of a storage moves to column 0.
CodeGrid from_col(CodeGrid grid, int64_t q) {
  if (!grid.empty()) grid.data += q / packed_cols(grid) * grid.col_stride;
  return grid;
}

StoredMatrix rows_of(StoredMatrix m, TensorSlice slice) {
  m.row_first += m.row_step * slice.first;
  m.rows = slice.count;
  return m;
}

StoredMatrix cols_of(StoredMatrix m, TensorSlice slice) {
  m.cols = slice.count;
  m.codes = from_col(m.codes, slice.first);
  if (m.group_index != nullptr) {
    m.group_index += slice.first;
    return m;
  }
  for (ScaleGrid* grid : {&m.scales, &m.zeros}) {
    if (grid->col_group > 0) grid->values = from_col(grid->values, slice.first / grid->col_group);
  }
  return m;
}

StoredVector rows_of(StoredVector v, TensorSlice slice) {
  if (v.empty()) return v;
  v.first += v.step * slice.first;
  v.size = slice.count;
  return v;
}

/// A dynamic scale of the whole row would need the largest value of all slices.
void check_down_input(const ActivationScheme& input) {
  MOEKIT_CHECK_AS(kUnsupported, input.format != ActivationFormat::fp8_token,
                  "tensor parallelism: down reads fp8_token rows, whose one scale needs the whole "
                  "intermediate row, while each rank holds a slice; use activations with blocks "
                  "(fp8_block, mxfp8), bf16, or tp = 1");
  MOEKIT_CHECK_AS(kUnsupported, input.format != ActivationFormat::nvfp4 || input.static_scale,
                  "tensor parallelism: down reads nvfp4 rows with a dynamic global scale, which "
                  "needs the whole intermediate row, while each rank holds a slice; use a "
                  "checkpoint with static scales, mxfp8, bf16, or tp = 1");
}

}  // namespace

int64_t slice_granule(const CanonicalLayer& layer, const ActivationScheme& down_input) {
  int64_t granule = activation_block(down_input.format);
  for (const StoredExpert& e : layer.experts) {
    for (const int64_t block : {packed_cols(e.down.codes), col_block(e.down, e.down.scales),
                                col_block(e.down, e.down.zeros), row_block(e.up),
                                e.gate.rows > 0 ? row_block(e.gate) : 1}) {
      granule = std::lcm(granule, block);
    }
  }
  return granule;
}

TensorSlice tensor_slice(const CanonicalLayer& layer, const ActivationScheme& down_input,
                         int tp_size, int tp) {
  const int64_t inter = layer.config.inter;
  if (tp_size == 1) return {0, inter};
  check_down_input(down_input);
  const int64_t granule = slice_granule(layer, down_input);
  const int64_t blocks = ceil_div(inter, granule);
  MOEKIT_CHECK_AS(kUnsupported, blocks >= tp_size,
                  "tensor parallelism: an intermediate size of {} is {} whole block(s) of {} "
                  "columns, which can't be split over {} ranks; use tp = {} at most",
                  inter, blocks, granule, tp_size, blocks);
  const int64_t share = blocks / tp_size, larger = blocks % tp_size;
  const int64_t first = tp * share + std::min<int64_t>(tp, larger);
  const int64_t count = share + (tp < larger ? 1 : 0);
  const int64_t begin = first * granule;
  return {begin, std::min(inter, (first + count) * granule) - begin};
}

CanonicalLayer slice_layer(const CanonicalLayer& layer, TensorSlice slice, int tp) {
  CanonicalLayer part = layer;
  part.config.inter = slice.count;
  for (StoredExpert& e : part.experts) {
    if (e.gate.rows > 0) e.gate = rows_of(e.gate, slice);
    e.up = rows_of(e.up, slice);
    e.down = cols_of(e.down, slice);
    e.gate_bias = rows_of(e.gate_bias, slice);
    e.up_bias = rows_of(e.up_bias, slice);
    if (tp > 0) e.down_bias = {};
  }
  if (tp > 0) {
    part.config.has_down_bias = false;
    part.config.shared = {};
    part.shared = {};
    part.shared_gate = {};
  }
  return part;
}

}  // namespace moekit
