#include "experts/gpu/panel_pack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "quant/block.h"
#include "quant/stored_codec.h"
#include "tensor/float_formats.h"
#include "tensor/float_tables.h"

namespace moekit::experts::cuda {
namespace {

using kernels::CodePlace;
using kernels::OperandFormat;
using kernels::PanelFormat;

constexpr int kChunk = 32;        // columns that are placed at a time
constexpr uint8_t kNoE8m0 = 255;  // e8m0's NaN

/// [pair][byte]: a byte of two 4-bit codes, even column first, at its place in a word.
constexpr auto kPairs4 = [] {
  std::array<std::array<uint32_t, 256>, 4> table{};
  for (int32_t pair = 0; pair < 4; ++pair) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      table[static_cast<size_t>(pair)][byte] =
          kernels::place_code4(pair, 0, byte & 15) | kernels::place_code4(pair, 1, byte >> 4);
    }
  }
  return table;
}();

/// [pair][code]: an 8-bit code of an even column; 16 bits higher for the odd one.
constexpr auto kCodes8 = [] {
  std::array<std::array<uint32_t, 256>, 2> table{};
  for (int32_t pair = 0; pair < 2; ++pair) {
    for (uint32_t code = 0; code < 256; ++code) {
      table[static_cast<size_t>(pair)][code] = kernels::place_code8(pair, 0, code);
    }
  }
  return table;
}();

void store_word(uint32_t word, uint8_t* to) { std::memcpy(to, &word, sizeof(word)); }

/// 16 bytes of codes to the four words of a row that begin at `to`, one a lane.
void place_chunk4(const uint8_t* codes, uint8_t* to) {
  for (int t = 0; t < 4; ++t) {
    store_word(kPairs4[0][codes[t]] | kPairs4[1][codes[4 + t]] | kPairs4[2][codes[8 + t]] |
                   kPairs4[3][codes[12 + t]],
               to + t * 16);
  }
}

/// 32 codes to eight words, two a lane.
void place_chunk8(const uint8_t* codes, uint8_t* to) {
  for (int step = 0; step < 2; ++step) {
    for (int t = 0; t < 4; ++t) {
      const uint8_t* c = codes + step * 16 + t * 2;
      store_word(
          kCodes8[0][c[0]] | kCodes8[0][c[1]] << 16 | kCodes8[1][c[8]] | kCodes8[1][c[9]] << 16,
          to + t * 16 + step * 4);
    }
  }
}

/// Whether eight e4m3 codes at a time have a NaN among them: all bits but the sign set.
bool has_nan(const uint8_t* codes, int count) {
  uint64_t found = 0;
  for (int i = 0; i < count; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, sizeof(eight));
    found |= (eight & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u;  // no byte carries
  }
  return (found & 0x8080808080808080u) != 0;
}

/// What becomes of the codes under a scale.
enum class Codes : uint8_t { kept, cleared, negated };

struct PackedScale {
  uint8_t byte = 0;
  Codes codes = Codes::kept;
  bool any_code = true;  ///< else only codes that stay exact in bf16
};

PackedScale pack_mx_scale(OperandFormat format, uint8_t e8m0, int32_t shift) {
  if (e8m0 == kNoE8m0) return {kernels::nan_scale(format), Codes::cleared, true};
  const int32_t exponent = e8m0 - shift;
  // A larger one has only zeros below it: that is how the shift was chosen.
  const int32_t byte = std::clamp(kernels::scale_exponent(format, e8m0, shift), 0, 254);
  return {static_cast<uint8_t>(byte), Codes::kept, exponent >= kernels::smallest_exponent(format)};
}

PackedScale pack_nvfp4_scale(uint8_t e4m3) {
  const uint8_t magnitude = e4m3 & 0x7f;
  if (magnitude == 0x7f) return {kernels::nan_scale(OperandFormat::nvfp4), Codes::cleared, true};
  const Codes codes = magnitude == 0 ? Codes::cleared : e4m3 >= 0x80 ? Codes::negated : Codes::kept;
  return {kernels::nvfp4_scale_byte(magnitude), codes, true};
}

template <OperandFormat kFormat>
class Packer {
 public:
  Packer(const StoredMatrix& m, std::string_view name)
      : m_(m),
        name_(name),
        groups_(m.cols / kGroup),
        steps_(ceil_div(m.cols, kernels::kPanelDepth)),
        dense_(quant::is_dense(m.codes, kBits)) {
    MOEKIT_CHECK_AS(ErrorCode::internal, m.cols % kChunk == 0,
                    "{}: panels need whole columns of 32, got {}", name, m.cols);
    read_scales();
    if (!kNvfp4) choose_shift();
    for (int s = 0; s < 256; ++s) {
      const auto byte = static_cast<uint8_t>(s);
      table_[byte] = kNvfp4 ? pack_nvfp4_scale(byte) : pack_mx_scale(kFormat, byte, shift_);
    }
  }

  void pack(std::byte* to) {
    const int64_t row_bytes = m_.cols * kBits / 8;
    if (!dense_) copied_.resize(static_cast<size_t>(kernels::kStripRows * row_bytes));
    for (int64_t first = 0; first < m_.rows; first += kernels::kStripRows) {
      const auto rows = static_cast<int>(std::min<int64_t>(kernels::kStripRows, m_.rows - first));
      if (!dense_) copy_strip(first, rows, row_bytes);
      for (int64_t column = 0; column < m_.cols; column += kChunk) {
        for (int r = 0; r < rows; ++r) {
          const uint8_t* codes = dense_ ? reinterpret_cast<const uint8_t*>(stored_row(first + r))
                                        : copied_.data() + r * row_bytes;
          pack_chunk(first + r, column, codes + column * kBits / 8, to);
        }
      }
    }
  }

  float multiplier() const {
    const float base = kNvfp4 ? kernels::kNvfp4Multiplier : std::ldexp(1.0f, shift_);
    // One rounding: base is a power of two.
    const float all =
        m_.global_sense == ScaleSense::multiplier ? base * m_.global : base / m_.global;
    MOEKIT_CHECK_AS(ErrorCode::unsupported, quant::is_finite(all) || !quant::is_finite(m_.global),
                    "{}: its global {} leaves the range of f32 with the factor {} of the packed "
                    "form",
                    name_, m_.global, base);
    return all;
  }

 private:
  static constexpr PanelFormat kPanel = PanelFormat::of(kFormat);
  static constexpr int kGroup = kPanel.group;
  static constexpr int kBits = kPanel.code_bits;
  static constexpr int kGroupBytes = kGroup * kBits / 8;
  static constexpr bool kNvfp4 = kFormat == OperandFormat::nvfp4;

  const std::byte* stored_row(int64_t n) const {
    return m_.codes.data + (m_.row_first + m_.row_step * n) * m_.codes.row_stride;
  }

  /// Rows [first, first + rows) of any storage as bytes in column order. Rows inside columns: the
  /// storage that is not dense by rows is most often so by columns.
  void copy_strip(int64_t first, int rows, int64_t row_bytes) {
    std::fill(copied_.begin(), copied_.end(), uint8_t{0});
    const CodeGrid& g = m_.codes;
    if (std::max(8, bits_of(g.unit)) == 8) return copy_bytes(first, rows, row_bytes);
    for (int64_t k = 0; k < m_.cols; ++k) {
      for (int r = 0; r < rows; ++r) {
        put_code(copied_.data() + r * row_bytes, k, quant::code_at(m_, first + r, k));
      }
    }
  }

  static void put_code(uint8_t* row, int64_t k, uint32_t code) {
    if constexpr (kBits == 4) {
      row[k / 2] = static_cast<uint8_t>(row[k / 2] | (code & 15) << (k % 2 * 4));
    } else {
      row[k] = static_cast<uint8_t>(code);
    }
  }

  /// Of units of a byte: one code, or two along either axis.
  void copy_bytes(int64_t first, int rows, int64_t row_bytes) {
    const CodeGrid& g = m_.codes;
    const std::byte* from[kernels::kStripRows];
    int row_shift[kernels::kStripRows];
    for (int r = 0; r < rows; ++r) {
      const int64_t p = m_.row_first + m_.row_step * (first + r);
      const bool shared = g.pack_axis == PackAxis::rows;
      from[r] = g.data + (shared ? p / g.pack : p) * g.row_stride;
      row_shift[r] = shared ? static_cast<int>(p % g.pack) * kBits : 0;
    }
    const bool shared = g.pack_axis == PackAxis::cols;
    for (int64_t k = 0; k < m_.cols; ++k) {
      const int64_t offset = (shared ? k / g.pack : k) * g.col_stride;
      const int shift = shared ? static_cast<int>(k % g.pack) * kBits : 0;
      for (int r = 0; r < rows; ++r) {
        put_code(copied_.data() + r * row_bytes, k,
                 static_cast<uint32_t>(from[r][offset]) >> (shift + row_shift[r]));
      }
    }
  }

  /// All scales as bytes of the format's own kind, [rows, groups_].
  void read_scales() {
    const CodeGrid& g = m_.scales.values;
    const DType own = kNvfp4 ? DType::f8_e4m3 : DType::f8_e8m0;
    const bool bytes = !m_.scales.empty() && (g.unit == own || g.unit == DType::u8) &&
                       g.pack_axis == PackAxis::none && m_.scales.row_group == 1 &&
                       m_.scales.col_group == kGroup && m_.group_index == nullptr;
    scales_.resize(static_cast<size_t>(m_.rows * groups_));
    uint8_t* to = scales_.data();
    for (int64_t n = 0; n < m_.rows; ++n) {
      const int64_t row = (m_.row_first + m_.row_step * n) * g.row_stride;
      for (int64_t i = 0; i < groups_; ++i) {
        *to++ = bytes ? static_cast<uint8_t>(g.data[row + i * g.col_stride]) : scale_byte(n, i);
      }
    }
  }

  uint8_t scale_byte(int64_t n, int64_t group) const {
    const float scale = quant::scale_at(m_, n, group * kGroup);
    if (quant::is_nan(scale)) return kNvfp4 ? 0x7f : kNoE8m0;
    const uint8_t byte = kNvfp4 ? f32_to_e4m3(scale) : power_to_e8m0(scale);
    const float value = kNvfp4 ? kE4m3Values[byte] : e8m0_to_f32(byte);
    MOEKIT_CHECK_AS(ErrorCode::unsupported, value == scale,
                    "{}: the scale {} of row {}, columns {} to {}, is no {}", name_, scale, n,
                    group * kGroup, (group + 1) * kGroup - 1,
                    kNvfp4 ? "e4m3 number" : "power of two from 2^-127 to 2^127");
    return byte;
  }

  float code_value(uint32_t code) const {
    return kBits == 4 ? kE2m1Values[code & 15] : kE4m3Values[code & 255];
  }

  /// Whether a group has a code other than zero and none that is NaN.
  bool has_values(int64_t n, int64_t group) const {
    bool any = false;
    for (int64_t k = group * kGroup; k < (group + 1) * kGroup; ++k) {
      const float value = code_value(quant::code_at(m_, n, k));
      if (quant::is_nan(value)) return false;
      any = any || value != 0.0f;
    }
    return any;
  }

  /// The smallest shift under which no scale of values leaves bf16.
  void choose_shift() {
    int32_t largest = kernels::largest_exponent(kFormat);
    for (int64_t i = 0; i < m_.rows * groups_; ++i) {
      const uint8_t e8m0 = scales_[static_cast<size_t>(i)];
      if (e8m0 <= largest || e8m0 == kNoE8m0) continue;
      if (has_values(i / groups_, i % groups_)) largest = e8m0;
    }
    shift_ = largest - kernels::largest_exponent(kFormat);
  }

  /// The scale of the group that begins at `column`, whose codes begin at `codes`.
  PackedScale scale_of(int64_t n, int64_t column, const uint8_t* codes) const {
    const int64_t group = column / kGroup;
    const uint8_t stored = scales_[static_cast<size_t>(n * groups_ + group)];
    const PackedScale scale = table_[stored];
    if (kBits == 8 && has_nan(codes, kGroup))
      return {kernels::nan_scale(kFormat), Codes::cleared, true};
    if (!scale.any_code) require_exact(n, group, stored);
    return scale;
  }

  /// bf16 is the upper half of f32.
  void require_exact(int64_t n, int64_t group, uint8_t e8m0) const {
    for (int64_t k = group * kGroup; k < (group + 1) * kGroup; ++k) {
      const float value = code_value(quant::code_at(m_, n, k));
      const float product = std::ldexp(value, e8m0 - shift_ - 127);
      const bool exact = (f32_bits(product) & 0xffff) == 0 && (product != 0.0f || value == 0.0f);
      MOEKIT_CHECK_AS(ErrorCode::unsupported, exact,
                      "{}: row {}, column {} is too small for bf16 beside the largest scale of its "
                      "matrix: {} * 2^{} with a shift of {}; back-end cuda_ref takes it",
                      name_, n, k, value, e8m0 - 127, shift_);
    }
  }

  /// 32 columns of a row: scales and codes.
  void pack_chunk(int64_t n, int64_t column, const uint8_t* codes, std::byte* to) const {
    const int64_t index = n / kernels::kPanelRows * steps_ + column / kernels::kPanelDepth;
    auto* block = reinterpret_cast<uint8_t*>(to) + index * kPanel.block_bytes();
    const auto row = static_cast<int32_t>(n % kernels::kPanelRows);
    const auto inside = static_cast<int32_t>(column % kernels::kPanelDepth);
    uint8_t changed[kChunk];
    for (int g = 0; g < kChunk / kGroup; ++g) {
      const PackedScale scale = scale_of(n, column + g * kGroup, codes + g * kGroupBytes);
      block[kPanel.scale_offset(row, inside + g * kGroup)] = scale.byte;
      if (scale.codes == Codes::kept) continue;
      if (codes != changed) {
        std::memcpy(changed, codes, static_cast<size_t>(kChunk * kBits / 8));
        codes = changed;
      }
      for (int i = g * kGroupBytes; i < (g + 1) * kGroupBytes; ++i) {
        // Only nvfp4 has scales with a sign.
        changed[i] = scale.codes == Codes::cleared ? 0 : changed[i] ^ 0x88;
      }
    }
    uint8_t* first = block + CodePlace::of(kPanel, row, inside).word;
    if constexpr (kBits == 4) {
      place_chunk4(codes, first);
    } else {
      place_chunk8(codes, first);
    }
  }

  const StoredMatrix& m_;
  std::string_view name_;
  int64_t groups_;  // of a row
  int64_t steps_;   // blocks of a row of blocks
  bool dense_;
  int32_t shift_ = 0;
  std::vector<uint8_t> scales_;
  std::vector<uint8_t> copied_;  // codes of a strip that is not dense
  std::array<PackedScale, 256> table_;
};

template <OperandFormat kFormat>
float pack_as(const StoredMatrix& m, std::string_view name, std::byte* to) {
  Packer<kFormat> packer(m, name);
  packer.pack(to);
  return packer.multiplier();
}

}  // namespace

float pack_panels(const StoredMatrix& m, OperandFormat format, std::string_view name,
                  std::byte* to) {
  switch (format) {
    case OperandFormat::mxfp4: return pack_as<OperandFormat::mxfp4>(m, name, to);
    case OperandFormat::nvfp4: return pack_as<OperandFormat::nvfp4>(m, name, to);
    case OperandFormat::mxfp8: return pack_as<OperandFormat::mxfp8>(m, name, to);
    default: fail(ErrorCode::internal, "{}: its format has no panels", name);
  }
}

}  // namespace moekit::experts::cuda
