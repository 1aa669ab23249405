// Stored matrices of any codes, scales and storage for the tests of panels, and the codec's values
// that their panels are held to.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "base/math.h"
#include "experts/gpu/expert_image.h"
#include "experts/gpu/panel_pack.h"
#include "quant/stored_codec.h"
#include "support/panel_values.h"
#include "tensor/float_formats.h"
#include "tensor/float_tables.h"

namespace moekit::experts::cuda {

using kernels::OperandFormat;
using Grid = std::function<uint32_t(int64_t, int64_t)>;

inline constexpr WeightFormat kFormats[] = {WeightFormat::mxfp4, WeightFormat::nvfp4,
                                            WeightFormat::mxfp8};

/// How a matrix lies in memory. Logical rows are storage rows first, first + step, ...
struct Storage {
  DType unit = DType::u8;
  int pack = 2;
  PackAxis axis = PackAxis::cols;
  bool transposed = false;  ///< inputs first
  int64_t first = 0;
  int64_t step = 1;
  DType scale_unit = DType::u8;
  bool scales_transposed = false;
};

/// A matrix with codes and scale bytes of any bits. Storage rows of other matrices have codes and
/// scales that would show.
struct Stored {
  std::vector<std::byte> codes, scales;
  StoredMatrix m;

  Stored(WeightFormat format, int64_t rows, int64_t cols, const Grid& code, const Grid& scale,
         const Storage& s) {
    m.rows = rows;
    m.cols = cols;
    m.scheme.format = format;
    m.row_first = s.first;
    m.row_step = s.step;
    const int64_t stored_rows = s.first + rows * s.step;
    const int64_t group = format == WeightFormat::nvfp4 ? 16 : 32;
    // Codes: blank ones are 6 and 448.
    const int64_t bytes = std::max(8, bits_of(s.unit)) / 8;
    const int64_t us = s.axis == PackAxis::rows ? ceil_div(stored_rows, s.pack) : stored_rows;
    const int64_t vs = s.axis == PackAxis::cols ? ceil_div(cols, s.pack) : cols;
    m.codes = {nullptr, s.unit, s.axis, PackOrder::sequential, s.pack, 0, 0};
    m.codes.row_stride = s.transposed ? bytes : vs * bytes;
    m.codes.col_stride = s.transposed ? us * bytes : bytes;
    // One byte off, as in a mapped file.
    codes.assign(static_cast<size_t>(us * vs * bytes + 1), std::byte{0x77});
    m.codes.data = codes.data() + 1;
    const int bits = static_cast<int>(bytes * 8 / s.pack);
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t k = 0; k < cols; ++k) {
        const int64_t p = s.first + s.step * n;
        const int64_t u = s.axis == PackAxis::rows ? p / s.pack : p;
        const int64_t v = s.axis == PackAxis::cols ? k / s.pack : k;
        const int64_t inside = s.axis == PackAxis::rows   ? p % s.pack
                               : s.axis == PackAxis::cols ? k % s.pack
                                                          : 0;
        std::byte* at = codes.data() + 1 + u * m.codes.row_stride + v * m.codes.col_stride;
        uint64_t word = 0;
        std::memcpy(&word, at, static_cast<size_t>(bytes));
        const uint64_t mask = ((uint64_t{1} << bits) - 1) << (inside * bits);
        word = (word & ~mask) | uint64_t{code(n, k)} << (inside * bits);
        std::memcpy(at, &word, static_cast<size_t>(bytes));
      }
    }
    const int64_t groups = ceil_div(cols, group), scale_bytes = bytes_of(s.scale_unit);
    scales.assign(static_cast<size_t>(stored_rows * groups * scale_bytes), std::byte{0x7f});
    m.scales = {{scales.data(), s.scale_unit}, 1, group};
    m.scales.values.row_stride = s.scales_transposed ? scale_bytes : groups * scale_bytes;
    m.scales.values.col_stride = s.scales_transposed ? stored_rows * scale_bytes : scale_bytes;
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t g = 0; g < groups; ++g) {
        const uint32_t stored = in_unit(format, scale(n, g), s.scale_unit);
        std::memcpy(scales.data() + (s.first + s.step * n) * m.scales.values.row_stride +
                        g * m.scales.values.col_stride,
                    &stored, static_cast<size_t>(scale_bytes));
      }
    }
  }
  Stored(WeightFormat format, int64_t rows, int64_t cols, const Grid& code, const Grid& scale)
      : Stored(format, rows, cols, code, scale, plain(format)) {}
  Stored(const Stored&) = delete;

  static Storage plain(WeightFormat format) {
    Storage s;
    if (format == WeightFormat::mxfp8) s.pack = 1, s.axis = PackAxis::none;
    return s;
  }

  /// A scale byte in another type.
  static uint32_t in_unit(WeightFormat format, uint32_t byte, DType unit) {
    const auto b = static_cast<uint8_t>(byte);
    const float value = format == WeightFormat::nvfp4 ? kE4m3Values[b] : e8m0_to_f32(b);
    if (unit == DType::f32) return f32_bits(value);
    if (unit == DType::bf16) return f32_to_bf16(value);
    return byte;
  }
};

struct Panels {
  std::vector<std::byte> bytes;
  float multiplier = 0;
};

inline OperandFormat operand(WeightFormat format) { return *operand_format(format); }

inline Panels pack(const StoredMatrix& m) {
  const OperandFormat format = operand(m.scheme.format);
  Panels p;
  p.bytes.resize(static_cast<size_t>(kernels::panel_matrix_bytes(format, m.rows, m.cols)));
  p.multiplier = pack_panels(m, format, "gate of expert 5", p.bytes.data());
  return p;
}

/// Each weight: the codec's, of a product that bf16 holds exactly.
inline void expect_codecs_values(const StoredMatrix& m, const Panels& panels) {
  std::vector<float> want(static_cast<size_t>(m.cols));
  for (int64_t n = 0; n < m.rows; ++n) {
    quant::decode_weights(m, n, 0, m.cols, want.data());
    for (int64_t k = 0; k < m.cols; ++k) {
      const test::PanelValue v =
          test::panel_value(operand(m.scheme.format), panels.bytes.data(), m.cols, n, k);
      const float expected = want[static_cast<size_t>(k)];
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(v.as_bf16())) << n << ", " << k;
        continue;
      }
      ASSERT_EQ(v.as_bf16(), v.product()) << n << ", " << k;
      ASSERT_EQ(v.as_bf16() * panels.multiplier, expected) << n << ", " << k;
    }
  }
}

}  // namespace moekit::experts::cuda
