// Expert matrices in 4 and 8 bits for the GPU tests: random codes and scales as checkpoints hold
// them, their values, and weight panels packed from them by plain loops, which share nothing with
// the product's packer but where a code lies.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/common/weight_panels.h"
#include "tensor/float_formats.h"
#include "tests/cuda/gpu.h"

namespace moekit::testing {

/// [rows, depth] of values of about 1 / sqrt(depth).
struct PanelMatrix {
  kernels::OperandFormat format = kernels::OperandFormat::mxfp4;
  int32_t rows = 0, depth = 0;
  std::vector<uint8_t> codes;   ///< e2m1 or e4m3, one a byte
  std::vector<uint8_t> scales;  ///< e8m0 or e4m3 (nvfp4), [rows, depth / group]
  float global = 1.0f;          ///< nvfp4: multiplies
  int32_t shift = 0;            ///< mx: exponent that the panels leave to the multiplier
  std::vector<float> values;

  PanelMatrix(kernels::OperandFormat f, int32_t num_rows, int32_t num_columns, Random& random)
      : format(f), rows(num_rows), depth(num_columns) {
    using kernels::OperandFormat;
    const int32_t group = kernels::PanelFormat::of(f).group;
    const bool nvfp4 = f == OperandFormat::nvfp4, mxfp8 = f == OperandFormat::mxfp8;
    const float size = 1.0f / std::sqrt(static_cast<float>(depth));
    // Root mean squares: 2.9 of e2m1's values, 0.8 of nvfp4's scales, 16 of the e4m3 codes here.
    const int exponent = static_cast<int>(std::lround(std::log2(size / (mxfp8 ? 16.0f : 2.9f))));
    if (nvfp4) global = size / (2.9f * 0.8f) * (0.5f + random.uniform());
    if (!nvfp4) shift = 127 + exponent - 20 - static_cast<int32_t>(random.below(80));
    codes.resize(int64_t{rows} * depth);
    scales.resize(int64_t{rows} * depth / group);
    values.resize(codes.size());
    for (auto& c : codes) {
      c = mxfp8 ? f32_to_e4m3(16.0f * random.normal()) : static_cast<uint8_t>(random.below(16));
    }
    for (auto& s : scales) {
      // Now and then a subnormal scale, or (nvfp4) none.
      if (nvfp4) s = f32_to_e4m3(0.2f + 1.2f * random.uniform());
      if (nvfp4 && random.below(50) == 0) s = static_cast<uint8_t>(random.below(8));
      if (!nvfp4) s = static_cast<uint8_t>(127 + exponent - 1 + random.below(3));
    }
    for (size_t i = 0; i < values.size(); ++i) {
      const uint8_t s = scales[i / group];
      const float code = mxfp8 ? e4m3_to_f32(codes[i]) : e2m1_to_f32(codes[i]);
      values[i] = code * (nvfp4 ? e4m3_to_f32(s) * global : e8m0_to_f32(s));
    }
  }

  /// What the sums over the panels are multiplied by.
  float multiplier() const {
    if (format == kernels::OperandFormat::nvfp4) return global * kernels::kNvfp4Multiplier;
    return std::ldexp(1.0f, shift);
  }

  /// To `out`, of panel_matrix_bytes() bytes.
  void pack(uint8_t* out) const {
    const auto panel = kernels::PanelFormat::of(format);
    std::memset(out, 0, static_cast<size_t>(kernels::panel_matrix_bytes(format, rows, depth)));
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t c = 0; c < depth; ++c) {
        uint8_t* const block =
            out + (int64_t{r / kernels::kPanelRows} * kernels::panel_steps(depth) +
                   c / kernels::kPanelDepth) *
                      panel.block_bytes();
        const int32_t row = r % kernels::kPanelRows, column = c % kernels::kPanelDepth;
        const auto place = kernels::CodePlace::of(panel, row, column);
        const uint8_t scale = scales[(int64_t{r} * depth + c) / panel.group];
        // Without a scale there is nothing: its codes are zero.
        const bool none = format == kernels::OperandFormat::nvfp4 && scale == 0;
        const uint32_t code = none ? 0 : codes[int64_t{r} * depth + c];
        uint32_t word;
        std::memcpy(&word, block + place.word, 4);
        word |= panel.code_bits == 4 ? kernels::place_code4(place.pair, place.odd, code)
                                     : kernels::place_code8(place.pair, place.odd, code);
        std::memcpy(block + place.word, &word, 4);
        block[panel.scale_offset(row, column)] =
            format == kernels::OperandFormat::nvfp4
                ? kernels::nvfp4_scale_byte(scale)
                : static_cast<uint8_t>(kernels::scale_exponent(format, scale, shift));
      }
    }
  }
};

}  // namespace moekit::testing
