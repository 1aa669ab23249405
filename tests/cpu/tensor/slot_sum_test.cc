// The ordered sum of rows against its one-line definition, and bulk bf16 against the scalar
// conversions.
#include "tensor/slot_sum.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "tensor/bf16_rows.h"
#include "tensor/rng.h"

namespace moekit {
namespace {

TEST(Bf16Rows, EveryRoundingIsThatOfTheScalar) {
  std::vector<float> in;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      in.push_back(f32_from_bits(high << 16 | low));
    }
  }
  std::vector<uint16_t> out(in.size());
  f32_to_bf16_row(in.data(), static_cast<int64_t>(in.size()), out.data());
  for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], f32_to_bf16(in[i])) << f32_bits(in[i]);
  std::vector<float> back(out.size());
  bf16_to_f32_row(out.data(), static_cast<int64_t>(out.size()), back.data());
  for (size_t i = 0; i < out.size(); ++i)
    ASSERT_EQ(f32_bits(back[i]), f32_bits(bf16_to_f32(out[i])));
}

TEST(SlotSum, EveryTypeWidthAndMask) {
  const Rng rng(3, 0);
  for (int64_t width : {1, 7, 63, 64, 65, 200}) {
    for (unsigned mask = 0; mask < 16; ++mask) {
      std::vector<std::vector<float>> rows(4, std::vector<float>(static_cast<size_t>(width)));
      std::vector<std::vector<uint16_t>> halves(4,
                                                std::vector<uint16_t>(static_cast<size_t>(width)));
      std::vector<float> weights(4);
      const void* full[4];
      const void* half[4];
      for (int64_t j = 0; j < 4; ++j) {
        weights[j] = rng.normal(static_cast<uint64_t>(9000 + j));
        for (int64_t i = 0; i < width; ++i) {
          rows[j][i] = rng.normal(static_cast<uint64_t>(j * 1000 + i));
          halves[j][i] = f32_to_bf16(rows[j][i]);
        }
        full[j] = (mask >> j & 1u) != 0 ? rows[j].data() : nullptr;
        half[j] = (mask >> j & 1u) != 0 ? halves[j].data() : nullptr;
      }
      for (const bool weighted : {true, false}) {
        const float* w = weighted ? weights.data() : nullptr;
        std::vector<float> f32(static_cast<size_t>(width), -1), bf16 = f32, rounded = f32;
        sum_rows(SumRow::f32, full, w, 4, width, f32.data());
        sum_rows(SumRow::bf16, half, w, 4, width, bf16.data());
        sum_rows(SumRow::f32_as_bf16, full, w, 4, width, rounded.data());
        for (int64_t i = 0; i < width; ++i) {
          float sum = 0.0f, sum_half = 0.0f;
          bool any = false;
          for (int64_t j = 0; j < 4; ++j) {
            if (full[j] == nullptr) continue;
            const float a = (weighted ? weights[j] : 1.0f) * rows[j][i];
            const float b = (weighted ? weights[j] : 1.0f) * bf16_to_f32(halves[j][i]);
            sum = any ? sum + a : a;
            sum_half = any ? sum_half + b : b;
            any = true;
          }
          ASSERT_EQ(f32_bits(f32[i]), f32_bits(sum));
          ASSERT_EQ(f32_bits(bf16[i]), f32_bits(sum_half));
          ASSERT_EQ(f32_bits(rounded[i]), f32_bits(sum_half));
        }
      }
    }
  }
}

TEST(SlotSum, StreamedStoresHaveTheSameBitsAtEveryAlignment) {
  const Rng rng(5, 0);
  for (int64_t width : {1, 15, 64, 79, 80, 200, 512}) {
    std::vector<std::vector<float>> rows(3, std::vector<float>(static_cast<size_t>(width)));
    const float weights[3] = {0.3f, -1.7f, 0.9f};
    const void* pointers[4] = {};
    for (int64_t j = 0; j < 3; ++j) {
      for (int64_t i = 0; i < width; ++i) {
        rows[j][i] = rng.normal(static_cast<uint64_t>(j * 1000 + i));
      }
      pointers[j == 0 ? 0 : j + 1] = rows[j].data();  // the second is missing
    }
    const float all[4] = {weights[0], 5.0f, weights[1], weights[2]};
    for (int64_t first = 0; first < 17; ++first) {
      for (SumRow type : {SumRow::f32, SumRow::f32_as_bf16}) {
        std::vector<float> plain(static_cast<size_t>(width + 40), -1), streamed = plain;
        sum_rows(type, pointers, all, 4, width, plain.data() + first);
        sum_rows(type, pointers, all, 4, width, streamed.data() + first, SumStore::streamed);
        ASSERT_EQ(plain, streamed) << width << " columns from " << first;
        ASSERT_NE(plain[static_cast<size_t>(first)], -1.0f);
        sum_rows(type, pointers, all, 0, width, streamed.data() + first, SumStore::streamed);
        for (int64_t i = 0; i < width; ++i) ASSERT_EQ(streamed[first + i], 0.0f);
        ASSERT_EQ(streamed[static_cast<size_t>(first + width)], -1.0f);
      }
    }
  }
}

TEST(SlotSum, KeepsTheSignOfZeroAndMayWriteOverItsRow) {
  float row[3] = {-0.0f, 2.0f, -std::numeric_limits<float>::infinity()};
  const void* rows[1] = {row};
  sum_rows(SumRow::f32, rows, nullptr, 1, 3, row);
  EXPECT_EQ(f32_bits(row[0]), f32_bits(-0.0f));
  EXPECT_EQ(row[1], 2.0f);
  EXPECT_EQ(row[2], -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace moekit
