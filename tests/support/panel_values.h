// Reads weight panels on the host, one element at a time, by the functions with which kernels
// expand them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/common/weight_panels.h"
#include "tensor/float_formats.h"

namespace moekit::test {

/// One element as a kernel expands it: the two factors, and their product in f32.
struct PanelValue {
  float code = 0;
  float scale = 0;
  float product() const { return code * scale; }
  /// What a register holds.
  float as_bf16() const { return bf16_to_f32(f32_to_bf16(product())); }
};

/// Element (row, column) of a matrix of `columns` in panels, its padding included, before the
/// matrix's multiplier.
inline PanelValue panel_value(kernels::OperandFormat format, const std::byte* panels,
                              int64_t columns, int64_t row, int64_t column) {
  using kernels::CodePlace;
  using kernels::PanelFormat;
  const PanelFormat panel = PanelFormat::of(format);
  const int64_t steps = (columns + kernels::kPanelDepth - 1) / kernels::kPanelDepth;
  const int64_t index = row / kernels::kPanelRows * steps + column / kernels::kPanelDepth;
  const std::byte* block = panels + index * panel.block_bytes();
  const auto r = static_cast<int32_t>(row % kernels::kPanelRows);
  const auto k = static_cast<int32_t>(column % kernels::kPanelDepth);
  const CodePlace place = CodePlace::of(panel, r, k);
  uint32_t word;
  std::memcpy(&word, block + place.word, sizeof(word));
  const uint32_t pair = panel.code_bits == 4 ? kernels::expand_code4(place.pair, word)
                                             : kernels::expand_code8(place.pair, word);
  const auto byte = static_cast<uint32_t>(block[panel.scale_offset(r, k)]);
  return {bf16_to_f32(static_cast<uint16_t>(pair >> (16 * place.odd))),
          bf16_to_f32(static_cast<uint16_t>(kernels::expand_scale(format, byte)))};
}

}  // namespace moekit::test
