// Weight panels without a GPU: where codes lie, and that expanding a word gives back what was
// placed in it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/common/weight_panels.h"
#include "tensor/float_formats.h"
#include "tensor/float_tables.h"

namespace moekit::kernels {
namespace {

constexpr OperandFormat kFormats[] = {OperandFormat::mxfp4, OperandFormat::nvfp4,
                                      OperandFormat::mxfp8};

float bf16_value(uint32_t bits) { return bf16_to_f32(static_cast<uint16_t>(bits)); }

TEST(WeightPanels, EveryCodeOfABlockHasItsOwnPlace) {
  for (const OperandFormat format : kFormats) {
    const PanelFormat panel = PanelFormat::of(format);
    const int32_t pairs = 32 / panel.code_bits / 2;
    std::set<std::tuple<int32_t, int32_t, int32_t>> seen;
    for (int32_t row = 0; row < kPanelRows; ++row) {
      for (int32_t column = 0; column < kPanelDepth; ++column) {
        const CodePlace p = CodePlace::of(panel, row, column);
        ASSERT_EQ(p.word % 4, 0);
        ASSERT_TRUE(p.word >= 0 && p.word < panel.code_bytes()) << p.word;
        ASSERT_TRUE(p.pair >= 0 && p.pair < pairs) << p.pair;
        ASSERT_TRUE(p.odd == column % 2);
        seen.insert({p.word, p.pair, p.odd});
      }
    }
    // As many places as a block's codes fill: one to one and onto.
    EXPECT_EQ(seen.size(), static_cast<size_t>(panel.code_bytes() * 8 / panel.code_bits));
  }
}

TEST(WeightPanels, LanesHoldTheirPartOfTheTensorCoresOperand) {
  for (const OperandFormat format : kFormats) {
    const PanelFormat panel = PanelFormat::of(format);
    for (int32_t row = 0; row < kPanelRows; ++row) {
      for (int32_t column = 0; column < kPanelDepth; ++column) {
        // mma.m16n8k16: lane 4 g + t has rows g, g + 8 and columns 2 t, 2 t + 1, and 8 more.
        const int32_t word = CodePlace::of(panel, row, column).word;
        EXPECT_EQ(word / panel.strip_bytes(), row / 16);
        EXPECT_EQ(word % 512 / 16, row % 8 * 4 + column % 8 / 2);
      }
    }
  }
}

TEST(WeightPanels, ScalesFollowTheCodesAndBlocksSuitBulkCopies) {
  for (const OperandFormat format : kFormats) {
    const PanelFormat panel = PanelFormat::of(format);
    EXPECT_EQ(panel.block_bytes() % 128, 0);
    std::set<int32_t> seen;
    for (int32_t row = 0; row < kPanelRows; ++row) {
      for (int32_t column = 0; column < kPanelDepth; ++column) {
        const int32_t at = panel.scale_offset(row, column);
        ASSERT_TRUE(at >= panel.code_bytes() && at < panel.block_bytes());
        ASSERT_EQ(at, panel.scale_offset(row, column / panel.group * panel.group));
        seen.insert(at);
      }
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(panel.block_bytes() - panel.code_bytes()));
    EXPECT_EQ(panel_matrix_bytes(format, 65, 129), 2 * 3 * panel.block_bytes());
  }
}

/// Every pair of codes at every place of a word, beside zeros and beside ones.
template <typename Place, typename Expand, typename Value>
void expect_inverse(int pairs, int bits, const Place& place, const Expand& expand,
                    const Value& value) {
  const uint32_t codes = 1u << bits;
  uint32_t all = 0;
  for (int pair = 0; pair < pairs; ++pair) {
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t mask = place(pair, odd, codes - 1);
      EXPECT_EQ(std::popcount(mask), bits);
      EXPECT_EQ(all & mask, 0u) << "pair " << pair << " overlaps";
      all |= mask;
    }
    const uint32_t mine = place(pair, 0, codes - 1) | place(pair, 1, codes - 1);
    for (uint32_t even = 0; even < codes; ++even) {
      for (uint32_t odd = 0; odd < codes; ++odd) {
        const uint32_t word = place(pair, 0, even) | place(pair, 1, odd);
        ASSERT_EQ(word & ~mine, 0u);
        for (const uint32_t others : {0u, ~mine}) {
          const uint32_t expanded = expand(pair, word | others);
          ASSERT_EQ(bf16_value(expanded), value(even)) << pair << " " << even << " " << odd;
          ASSERT_EQ(bf16_value(expanded >> 16), value(odd)) << pair << " " << even << " " << odd;
          // Zero keeps its sign as well.
          ASSERT_EQ(std::signbit(bf16_value(expanded)), even >> (bits - 1) != 0);
        }
      }
    }
  }
  EXPECT_EQ(all, 0xffffffffu);
}

TEST(WeightPanels, WordsGiveBackTheirCodes) {
  expect_inverse(4, 4, place_code4, expand_code4,
                 [](uint32_t code) { return std::ldexp(kE2m1Values[code], -126); });
  expect_inverse(2, 8, place_code8, expand_code8, [](uint32_t code) {
    // The two NaN codes have no meaning here: read as numbers they are 480.
    const float magnitude = (code & 0x7f) == 0x7f ? 480.0f : kE4m3Values[code & 0x7f];
    return std::ldexp(code < 128 ? magnitude : -magnitude, -120);
  });
}

TEST(WeightPanels, ScaleBytesAreThePowersThatCodesLack) {
  for (const OperandFormat format : {OperandFormat::mxfp4, OperandFormat::mxfp8}) {
    const int lacking = format == OperandFormat::mxfp8 ? 120 : 126;
    for (const int32_t shift : {0, 1, 77, 126}) {
      for (int32_t e8m0 = 0; e8m0 < 255; ++e8m0) {
        const int32_t exponent = e8m0 - shift;
        if (exponent < smallest_exponent(format) || exponent > largest_exponent(format)) continue;
        const int32_t byte = scale_exponent(format, e8m0, shift);
        ASSERT_TRUE(byte > 0 && byte < 255) << e8m0;
        EXPECT_EQ(bf16_value(expand_scale(format, static_cast<uint32_t>(byte))),
                  std::ldexp(1.0f, exponent - 127 + lacking));
      }
    }
    EXPECT_EQ(scale_exponent(format, largest_exponent(format), 0), 254);
  }
  for (uint32_t code = 1; code < 0x7f; ++code) {
    const uint32_t byte = nvfp4_scale_byte(static_cast<uint8_t>(code));
    EXPECT_EQ(bf16_value(expand_scale(OperandFormat::nvfp4, byte)) * 0x1p-126f * kNvfp4Multiplier,
              kE4m3Values[code])
        << code;
  }
}

TEST(WeightPanels, ANanScaleMakesNanOfZeroCodes) {
  for (const OperandFormat format : kFormats) {
    const float scale = bf16_value(expand_scale(format, nan_scale(format)));
    EXPECT_TRUE(std::isnan(0.0f * scale));
    // Padding: no bits at all.
    EXPECT_EQ(0.0f * bf16_value(expand_scale(format, 0)), 0.0f);
  }
}

}  // namespace
}  // namespace moekit::kernels
