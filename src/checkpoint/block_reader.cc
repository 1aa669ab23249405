#include "checkpoint/block_reader.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/math.h"
#include "checkpoint/error_codes.h"
#include "tensor/float_formats.h"

namespace moekit::checkpoint {
namespace {

bool is_plain(DType t) { return t == DType::bf16 || t == DType::f16 || t == DType::f32; }

WeightFormat plain_format(DType t) {
  return t == DType::bf16  ? WeightFormat::bf16
         : t == DType::f16 ? WeightFormat::f16
                           : WeightFormat::f32;
}

std::string dtype_names(unsigned dtypes) {
  std::vector<const char*> names;
  for (unsigned i = 0; i < 32; ++i) {
    if (dtypes & (1u << i)) names.push_back(safetensors_name(static_cast<DType>(i)));
  }
  return fmt::format("{}", fmt::join(names, " or "));
}

/// Throws unless the tensor has one of the dtypes and shapes.
void check_tensor(const Tensor& t, unsigned dtypes,
                  const std::vector<std::vector<int64_t>>& shapes) {
  const TensorEntry& entry = *t.entry;
  const bool shaped = std::ranges::find(shapes, entry.shape) != shapes.end();
  if (shaped && (dtypes & bit(entry.dtype)) != 0) return;
  std::vector<std::string> wanted;
  for (const auto& s : shapes) wanted.push_back(fmt::format("[{}]", fmt::join(s, ", ")));
  fail(kCorrupt,
       "{}: tensor {}: expected {} {} from the configuration, came {} (does config.json describe "
       "this checkpoint?)",
       t.file->path(), entry.name, dtype_names(dtypes), fmt::join(wanted, " or "), describe(entry));
}

template <typename T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

}  // namespace

/// The codes (or scales, or zero points) of `place` inside `tensor`: `outputs` x `inputs` codes of
/// `kind` a matrix. The shape is checked, strides and the expert's offset are set.
CodeGrid BlockReader::grid(const MatrixPlace& place, const Tensor& tensor, const CodeGrid& kind,
                           unsigned dtypes, bool input_first, int64_t outputs, int64_t inputs,
                           bool blocks_of_16) const {
  const int64_t out_units =
      kind.pack_axis == PackAxis::rows ? ceil_div(outputs, kind.pack) : outputs;
  int64_t in_units = kind.pack_axis == PackAxis::cols ? ceil_div(inputs, kind.pack) : inputs;
  std::vector<int64_t> shape = {input_first ? in_units : out_units,
                                input_first ? out_units : in_units};
  if (blocks_of_16) {
    // Two codes a byte, 32 codes a block: the last axis is stored as [blocks, 16].
    shape = {out_units, ceil_div(inputs, 32), 16};
    in_units = shape[1] * 16;
  }
  const int64_t matrix_units = checked_mul(out_units, in_units, "matrix size", kCorrupt);
  if (place.experts > 0) {
    if (place.flat) {
      shape[0] = checked_mul(shape[0], place.experts, "stacked size", kCorrupt);
    } else {
      shape.insert(shape.begin(), place.experts);
    }
  }
  check_tensor(tensor, dtypes, {shape});
  CodeGrid g = kind;
  const int64_t unit = bytes_of(g.unit);
  g.row_stride = (input_first ? 1 : in_units) * unit;
  g.col_stride = (input_first ? out_units : 1) * unit;
  // In range: the shape was checked and the file holds all of it.
  g.data = tensor.data() + (place.experts > 0 ? place.expert * matrix_units * unit : 0);
  return g;
}

ScaleGrid BlockReader::scales(const MatrixPlace& place, const Scheme& scheme,
                              const Tensor& tensor) const {
  ScaleGrid out;
  out.row_group = scheme.row_group;
  out.col_group = scheme.col_group;
  out.values.unit = scheme.scale_is_e8m0 ? DType::f8_e8m0 : tensor.entry->dtype;
  const int64_t row_groups =
      scheme.row_group > 0 ? ceil_div(place.stored_rows, scheme.row_group) : 1;
  const int64_t col_groups = scheme.col_group > 0 ? ceil_div(place.cols, scheme.col_group) : 1;
  const bool single = row_groups == 1 && col_groups == 1;
  const std::vector<int64_t>& shape = tensor.entry->shape;
  const bool scalar_legal =
      (scheme.scale_shapes & kScalar) != 0 || (single && (scheme.scale_shapes & kIfSingle) != 0);
  if (scalar_legal && (shape.empty() || shape == std::vector<int64_t>{1})) {
    // One value for every element (and, in stacks, for every expert): a stride of zero.
    check_tensor(tensor, scheme.scale_dtypes, {{}, {1}});
    out.values.data = tensor.data();
    return out;
  }
  std::vector<std::vector<int64_t>> legal;
  if (place.experts == 0) {
    if (scheme.scale_shapes & kVector) legal.push_back({place.rows});
    if (scheme.scale_shapes & kGrid4) legal.push_back({row_groups, 1, col_groups, 1});
  }
  const bool special = std::ranges::find(legal, shape) != legal.end();
  if (special) {
    check_tensor(tensor, scheme.scale_dtypes, legal);
    const int64_t unit = bytes_of(out.values.unit);
    out.values.data = tensor.data();
    out.values.row_stride = col_groups * unit;
    out.values.col_stride = unit;
    return out;
  }
  if ((scheme.scale_shapes & kGrid) == 0) check_tensor(tensor, scheme.scale_dtypes, {{}, {1}});
  out.values = grid(place, tensor, out.values, scheme.scale_dtypes,
                    place.input_first || scheme.input_first, row_groups, col_groups, false);
  return out;
}

float BlockReader::scalar(const Tensor& tensor, bool positive) const {
  constexpr unsigned kDTypes = bit(DType::f32) | bit(DType::bf16) | bit(DType::f16);
  check_tensor(tensor, kDTypes, {{}, {1}});
  if (!read_values_) return 1.0f;
  const std::byte* p = tensor.data();
  const DType t = tensor.entry->dtype;
  const float value = t == DType::f32    ? load<float>(p)
                      : t == DType::bf16 ? bf16_to_f32(load<uint16_t>(p))
                                         : f16_to_f32(load<uint16_t>(p));
  MOEKIT_CHECK_AS(kCorrupt, std::isfinite(value) && (positive ? value > 0.0f : value >= 0.0f),
                  "{}: tensor {}: expected a finite, {} scale, came {}; {}", tensor.file->path(),
                  tensor.name(), positive ? "positive" : "non-negative", value, kDamagedFile);
  return value;
}

// ---- matrices

void BlockReader::read_plain(const MatrixPlace& place, const Tensor& tensor,
                             ReadMatrix& out) const {
  const DType t = tensor.entry->dtype;
  MOEKIT_CHECK_AS(kCorrupt, is_plain(t),
                  "{}: tensor {}: expected BF16, F16 or F32 (the configuration leaves it "
                  "unquantized), came {}",
                  tensor.file->path(), tensor.name(), describe(*tensor.entry));
  out.matrix.scheme.format = plain_format(t);
  out.matrix.codes = grid(place, tensor, {.unit = t}, bit(t), place.input_first, place.stored_rows,
                          place.cols, false);
  out.input.format = t == DType::bf16 ? ActivationFormat::bf16 : ActivationFormat::f32;
  out.label = to_string(t);
}

void BlockReader::read_group_index(const MatrixPlace& place, const Tensor& tensor, int64_t groups,
                                   int64_t group, StoredMatrix& out) {
  check_tensor(tensor, bit(DType::i32), {{place.cols}});
  if (!read_values_ || group == 0) return;
  auto index = std::make_unique<std::vector<int32_t>>(static_cast<size_t>(place.cols));
  std::memcpy(index->data(), tensor.data(), index->size() * sizeof(int32_t));
  bool ordered = true;
  for (int64_t k = 0; k < place.cols; ++k) {
    const int32_t g = (*index)[static_cast<size_t>(k)];
    MOEKIT_CHECK_AS(kCorrupt, g >= 0 && g < groups,
                    "{}: tensor {}: expected groups in [0, {}), came {} at {}; {}",
                    tensor.file->path(), tensor.name(), groups, g, k, kDamagedFile);
    ordered = ordered && g == k / group;
  }
  if (ordered) return;  // the plain order needs no table, and fast paths prefer none
  out.group_index = index->data();
  owned_.group_indices.push_back(std::move(index));
}

void BlockReader::check_shape_tensor(const MatrixPlace& place, const Tensor& tensor) const {
  check_tensor(tensor, bit(DType::i64) | bit(DType::i32), {{2}});
  if (!read_values_) return;
  const bool wide = tensor.entry->dtype == DType::i64;
  const std::byte* p = tensor.data();
  const int64_t n = wide ? load<int64_t>(p) : load<int32_t>(p);
  const int64_t k = wide ? load<int64_t>(p + 8) : load<int32_t>(p + 4);
  MOEKIT_CHECK_AS(kCorrupt, n == place.rows && k == place.cols,
                  "{}: tensor {}: expected [{}, {}] from the configuration, came [{}, {}]",
                  tensor.file->path(), tensor.name(), place.rows, place.cols, n, k);
}

void BlockReader::read_quantized(const MatrixPlace& place, const Scheme& s, ReadMatrix& out) {
  StoredMatrix& m = out.matrix;
  const bool input_first = place.input_first || s.input_first;
  const Tensor* codes = claim(part(place, s.codes));
  const Tensor* scale = claim(part(place, s.scales));
  const Tensor* global = s.global.empty() ? nullptr : claim(part(place, s.global));
  const Tensor* input = s.input_scale.empty() ? nullptr : claim(part(place, s.input_scale));
  const Tensor* zeros = s.zeros.empty() ? nullptr : claim(part(place, s.zeros));
  const Tensor* shape = s.shape.empty() ? nullptr : claim(part(place, s.shape));
  const Tensor* order = nullptr;
  if (!s.group_index.empty()) {
    const std::string name = part(place, s.group_index);
    order = s.group_index_required ? claim(name) : claim_optional(name);
  }
  m.scheme = s.weights;
  m.global_sense = s.global_sense;
  m.code_offset = s.code_offset;
  m.zero_offset = s.zero_offset;
  out.input = s.input;
  out.label = s.label;
  if (codes != nullptr) {
    const CodeGrid kind = {
        .unit = s.unit, .pack_axis = s.pack_axis, .order = s.pack_order, .pack = s.pack};
    m.codes = grid(place, *codes, kind, s.code_dtypes, input_first, place.stored_rows, place.cols,
                   s.blocks_of_16);
  }
  if (scale != nullptr) m.scales = scales(place, s, *scale);
  if (global != nullptr) m.global = scalar(*global, s.global_sense == ScaleSense::divisor);
  if (input != nullptr) m.input_scale = scalar(*input, true);
  if (shape != nullptr) check_shape_tensor(place, *shape);
  const int64_t groups = s.col_group > 0 ? ceil_div(place.cols, s.col_group) : 1;
  if (zeros != nullptr) {
    const CodeGrid kind = {.unit = s.zero_unit,
                           .pack_axis = s.zero_pack_axis,
                           .order = s.pack_order,
                           .pack = s.zero_pack};
    m.zeros.row_group = s.row_group;
    m.zeros.col_group = s.col_group;
    m.zeros.values =
        grid(place, *zeros, kind, bit(s.zero_unit), input_first, place.stored_rows, groups, false);
  }
  if (order != nullptr) read_group_index(place, *order, groups, s.col_group, m);
}

ReadMatrix BlockReader::matrix(const MatrixPlace& place) {
  ReadMatrix out;
  StoredMatrix& m = out.matrix;
  m.rows = place.rows;
  m.cols = place.cols;
  m.row_first = place.row_first;
  m.row_step = place.row_step;
  const Scheme* scheme = quant_.scheme_of(place.module);
  const std::string plain_name = part(place, "weight");
  bool plain = scheme == nullptr;
  if (scheme != nullptr && quant_.presence_decides()) {
    // A floating-point tensor without scales beside it was left alone by the tool.
    const Slot* slot = find(plain_name);
    plain = slot != nullptr && is_plain(slot->tensor.entry->dtype) &&
            find(part(place, scheme->scales)) == nullptr;
  }
  if (!plain) {
    read_quantized(place, place.along_outputs ? QuantConfig::along_outputs(*scheme) : *scheme, out);
  } else if (const Tensor* tensor = claim(plain_name)) {
    read_plain(place, *tensor, out);
  }
  return out;
}

StoredMatrix BlockReader::plain(std::string_view name, int64_t rows, int64_t cols) {
  ReadMatrix out;
  out.matrix.rows = rows;
  out.matrix.cols = cols;
  MatrixPlace place;
  place.rows = place.stored_rows = rows;
  place.cols = cols;
  if (const Tensor* tensor = claim(prefix_ + std::string(name))) read_plain(place, *tensor, out);
  return out.matrix;
}

StoredMatrix BlockReader::dense(std::string_view name, int64_t rows, int64_t cols) {
  constexpr std::string_view kEnding = ".weight";
  MatrixPlace place;
  place.module = prefix_ + std::string(name.substr(0, name.size() - kEnding.size()));
  place.rows = place.stored_rows = rows;
  place.cols = cols;
  const Slot* slot = find(prefix_ + std::string(name));
  const bool left_alone = slot != nullptr && is_plain(slot->tensor.entry->dtype);
  return left_alone ? plain(name, rows, cols) : matrix(place).matrix;
}

StoredVector BlockReader::vector(std::string_view name, int64_t size) {
  StoredVector v;
  const Tensor* tensor = claim(prefix_ + std::string(name));
  if (tensor == nullptr) return v;
  check_tensor(*tensor, bit(DType::bf16) | bit(DType::f16) | bit(DType::f32), {{size}});
  v.data = tensor->data();
  v.dtype = tensor->entry->dtype;
  v.size = size;
  return v;
}

StoredVector BlockReader::bias(const MatrixPlace& place) {
  StoredVector v;
  const Tensor* tensor = claim(part(place, "bias"));
  if (tensor == nullptr) return v;
  std::vector<int64_t> shape = {place.stored_rows};
  if (place.experts > 0) shape.insert(shape.begin(), place.experts);
  check_tensor(*tensor, bit(DType::bf16) | bit(DType::f16) | bit(DType::f32), {shape});
  v.data = tensor->data();
  v.dtype = tensor->entry->dtype;
  v.size = place.rows;
  v.first = place.row_first + place.expert * place.stored_rows;
  v.step = place.row_step;
  return v;
}

const int64_t* BlockReader::table(std::string_view name, int64_t rows, int64_t cols,
                                  int64_t limit) {
  const Tensor* tensor = claim(prefix_ + std::string(name));
  if (tensor == nullptr) return nullptr;
  check_tensor(*tensor, bit(DType::i32) | bit(DType::i64), {{rows, cols}});
  if (!read_values_) return nullptr;
  const bool wide = tensor->entry->dtype == DType::i64;
  owned_.hash_table.resize(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t id =
        wide ? load<int64_t>(tensor->data() + 8 * i) : load<int32_t>(tensor->data() + 4 * i);
    MOEKIT_CHECK_AS(kCorrupt, id >= 0 && id < limit,
                    "{}: tensor {}: expected expert ids in [0, {}), came {} for token {}; {}",
                    tensor->file->path(), tensor->name(), limit, id, i / cols, kDamagedFile);
    owned_.hash_table[static_cast<size_t>(i)] = id;
  }
  return owned_.hash_table.data();
}

}  // namespace moekit::checkpoint
