// Weight panels: how weights of less than 16 bits lie in device memory for products on bf16 rows.
// A matrix [rows, depth] is cut into blocks of 64 rows by 64 columns of depth, all blocks of 64
// rows one after the other: a stream for bulk copies. In a block codes come first, in the order in
// which the lanes of a warp hold the A operand of mma.m16n8k16 and wgmma.m64nNk16 (PTX ISA,
// register fragments), then scales. Rows and columns past the matrix have zero codes.
//
// Codes lie inside their 32-bit words such that a few shifts and masks make pairs of bf16 of them
// (expand.cuh), each too small by a power of two that the scales' own bf16 form makes up for:
//
//   format   value of a code as bf16   scale byte s      multiplier of the matrix
//   mxfp4    v * 2^-126                bf16 bits s << 7  the shift of the e8m0 scales, a power of 2
//   nvfp4    v * 2^-126                (s + 1792) << 4   global * 2^19
//   mxfp8    v * 2^-120 (e4m3)         bf16 bits s << 7  as mxfp4
//
// The product of the two is exact in bf16. Host and device.
#pragma once

#include <cstdint>

#include "kernels/common/weight_view.h"
#include "tensor/host_device.h"

namespace moekit::kernels {

inline constexpr int32_t kPanelRows = 64;   ///< of a block
inline constexpr int32_t kPanelDepth = 64;  ///< columns of a block
inline constexpr int32_t kStripRows = 16;   ///< rows of a block that one warp takes

/// Whether weights of this format lie in panels.
MOEKIT_HOST_DEVICE constexpr bool in_panels(OperandFormat format) {
  return format == OperandFormat::mxfp4 || format == OperandFormat::nvfp4 ||
         format == OperandFormat::mxfp8;
}

struct PanelFormat {
  int32_t code_bits = 4;
  int32_t group = 32;  ///< columns under one scale

  MOEKIT_HOST_DEVICE static constexpr PanelFormat of(OperandFormat format) {
    return {format == OperandFormat::mxfp8 ? 8 : 4, format == OperandFormat::nvfp4 ? 16 : 32};
  }
  MOEKIT_HOST_DEVICE constexpr int32_t row_scales() const { return kPanelDepth / group; }
  MOEKIT_HOST_DEVICE constexpr int32_t code_bytes() const {
    return kPanelRows * kPanelDepth * code_bits / 8;
  }
  /// A multiple of 128, as bulk copies want.
  MOEKIT_HOST_DEVICE constexpr int32_t block_bytes() const {
    return code_bytes() + kPanelRows * row_scales();
  }
  /// Bytes of the codes of 16 rows.
  MOEKIT_HOST_DEVICE constexpr int32_t strip_bytes() const { return code_bytes() / 4; }
  /// Offset in a block of the scale of row `row` for columns from `column` on.
  MOEKIT_HOST_DEVICE constexpr int32_t scale_offset(int32_t row, int32_t column) const {
    return code_bytes() + row * row_scales() + column / group;
  }
};

MOEKIT_HOST_DEVICE constexpr int32_t panel_tiles(int32_t rows) {
  return (rows + kPanelRows - 1) / kPanelRows;
}
MOEKIT_HOST_DEVICE constexpr int32_t panel_steps(int32_t depth) {
  return (depth + kPanelDepth - 1) / kPanelDepth;
}
constexpr int64_t panel_matrix_bytes(OperandFormat format, int64_t rows, int64_t depth) {
  const int64_t tiles = (rows + kPanelRows - 1) / kPanelRows;
  const int64_t steps = (depth + kPanelDepth - 1) / kPanelDepth;
  return tiles * steps * PanelFormat::of(format).block_bytes();
}

/// Where the code of (row, column) of a block is: byte offset of its 32-bit word, which pair of the
/// word's, and whether it is the pair's odd one. A lane (g, t) = (lane / 4, lane % 4) of the warp
/// of 16 rows holds rows g and g + 8 and, of every 16 columns, 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
struct CodePlace {
  int32_t word = 0;  ///< byte offset
  int32_t pair = 0;  ///< 4 bits: 0-3, two for each 16 of 32 columns; 8 bits: 0-1, of 16 columns
  int32_t odd = 0;

  MOEKIT_HOST_DEVICE static constexpr CodePlace of(PanelFormat format, int32_t row,
                                                   int32_t column) {
    const int32_t strip = row / kStripRows, half = row % kStripRows / 8;
    const int32_t step = column % 32 / 16, high = column % 16 / 8;
    const int32_t lane = row % 8 * 4 + column % 8 / 2;
    CodePlace p;
    p.odd = column % 2;
    if (format.code_bits == 4) {
      // Words of a lane: 32 columns of row g, of row g + 8, the next 32 columns of both.
      p.word = strip * format.strip_bytes() + lane * 16 + (column / 32 * 2 + half) * 4;
      p.pair = step * 2 + high;
    } else {
      // 32 columns a 16-byte piece: two words of row g, two of row g + 8.
      p.word = strip * format.strip_bytes() + column / 32 * 512 + lane * 16 + (half * 2 + step) * 4;
      p.pair = high;
    }
    return p;
  }
};

/// Bits of a pair of bf16 that 4-bit codes have, and of pair 3's the two parts.
inline constexpr uint32_t kPlainBits4 = 0x81c081c0u;
inline constexpr uint32_t kFirstBits4 = 0x01000100u;
inline constexpr uint32_t kOtherBits4 = kPlainBits4 ^ kFirstBits4;

/// The bits of a 4-bit code (e2m1: sign, two exponent bits, one mantissa bit) at its place in a
/// word whose other codes are zero. Pairs 0 to 2 are bf16 (bits 15 and 8-6 of each half) where they
/// belong, rotated up by 4, and moved down by 6; pair 3 has the places that are left: bit 8 moved
/// up by 6, the others down by 2.
MOEKIT_HOST_DEVICE constexpr uint32_t place_code4(int32_t pair, int32_t odd, uint32_t code) {
  const uint32_t base = ((code >> 3 & 1) << 15 | (code & 7) << 6) << (16 * odd);
  switch (pair) {
    case 0: return base;
    case 1: return base << 4 | base >> 28;
    case 2: return base >> 6;
    default: return (base & kFirstBits4) << 6 | (base & kOtherBits4) >> 2;
  }
}

/// The same of an 8-bit code (e4m3).
MOEKIT_HOST_DEVICE constexpr uint32_t place_code8(int32_t pair, int32_t odd, uint32_t code) {
  const uint32_t sign = code >> 7 & 1, magnitude = code & 0x7f;
  if (pair == 0) return (sign << 15 | magnitude << 4) << (16 * odd);
  return ((magnitude >> 3) << 11 | (magnitude & 7) | sign << 3) << (16 * odd);
}

/// Pairs of bf16 from a word: the inverse of place_code4 and place_code8, low half the even column.
MOEKIT_HOST_DEVICE constexpr uint32_t expand_code4(int32_t pair, uint32_t word) {
  switch (pair) {
    case 0: return word & kPlainBits4;
    case 1: return (word >> 4 | word << 28) & kPlainBits4;
    case 2: return word << 6 & kPlainBits4;
    default: return (word >> 6 & kFirstBits4) | (word << 2 & kOtherBits4);
  }
}
MOEKIT_HOST_DEVICE constexpr uint32_t expand_code8(int32_t pair, uint32_t word) {
  if (pair == 0) return word & 0x87f087f0u;
  return (word >> 4 & 0x07800780u) | (word << 4 & 0x00700070u) | (word << 12 & 0x80008000u);
}

/// bf16 bits of a scale byte.
MOEKIT_HOST_DEVICE constexpr uint32_t expand_scale(OperandFormat format, uint32_t byte) {
  return format == OperandFormat::nvfp4 ? (byte + 1792) << 4 : byte << 7;
}

/// The scale byte that stands for NaN: with it every code of the group is stored as zero, which
/// makes NaN of infinity (mx) or stays NaN (nvfp4) under the multiplication.
MOEKIT_HOST_DEVICE constexpr uint8_t nan_scale(OperandFormat format) {
  return format == OperandFormat::nvfp4 ? 0xf9 : 0xff;
}

/// The scale byte of a power of two 2^(e8m0 - 127) divided by 2^shift; e8m0 below 255. Products
/// are exact for e8m0 - shift in [smallest_exponent(), largest_exponent()]; below, bf16 has no room
/// for the smallest codes.
MOEKIT_HOST_DEVICE constexpr int32_t scale_exponent(OperandFormat format, int32_t e8m0,
                                                    int32_t shift) {
  return e8m0 - shift + (format == OperandFormat::mxfp8 ? 120 : 126);
}
/// 0.5 * 2^(-5 - 127) and 2^-9 * 2^(3 - 127) are bf16's smallest subnormal, 2^-133.
MOEKIT_HOST_DEVICE constexpr int32_t smallest_exponent(OperandFormat format) {
  return format == OperandFormat::mxfp8 ? 3 : -5;
}
/// Byte 254 is the largest finite scale.
MOEKIT_HOST_DEVICE constexpr int32_t largest_exponent(OperandFormat format) {
  return format == OperandFormat::mxfp8 ? 134 : 128;
}

/// The scale byte of a positive e4m3 code below 0x7f: exponent + 10 in five bits, the subnormals
/// normalized, mantissa in three. A zero scale has the smallest byte, and zero codes.
MOEKIT_HOST_DEVICE constexpr uint8_t nvfp4_scale_byte(uint8_t e4m3) {
  int32_t exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
  if (exponent == 0) {
    if (mantissa == 0) return 0x08;
    exponent = 1;
    while (mantissa < 8) {
      mantissa *= 2;
      --exponent;
    }
    mantissa -= 8;
  }
  // e4m3's exponent has a bias of 7; -9 is the lowest there is.
  return static_cast<uint8_t>((exponent - 7 + 10) << 3 | mantissa);
}
inline constexpr float kNvfp4Multiplier = 524288.0f;  ///< 2^19: see the table above

}  // namespace moekit::kernels
