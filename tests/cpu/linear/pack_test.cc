// Packed panels hold exactly what was stored, from any storage order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/buffer.h"
#include "cpu/linear/matrices.h"
#include "cpu/linear/run_member.h"
#include "linear/cpu_linear.h"
#include "linear/panel_pack.h"
#include "quant/stored_codec.h"

namespace moekit::linear {
namespace {

using testing::random_values;

/// The column of each place of a packed matrix; m.cols where there is none.
std::vector<int32_t> columns_of(const StoredMatrix& m, const PanelSpec& spec) {
  std::vector<int32_t> order(static_cast<size_t>(spec.k_padded()));
  if (spec.is_sorted()) {
    std::vector<int32_t> counters(static_cast<size_t>(count_groups(m)));
    fill_order(m, {spec.group, spec.places}, order.data(), counters.data());
  } else {
    for (size_t k = 0; k < order.size(); ++k) {
      order[k] = static_cast<int32_t>(std::min<int64_t>(static_cast<int64_t>(k), m.cols));
    }
  }
  return order;
}

Buffer pack_all(const StoredMatrix& m, const PanelSpec& spec) {
  Buffer blob(spec.total_bytes());
  const std::vector<int32_t> order = columns_of(m, spec);
  const Buffer scratch(pack_scratch_bytes(spec));
  const StoredVector bias;
  // Whatever pack_panel leaves unwritten would show as NaN or as huge codes.
  std::memset(blob.data(), 0xff, static_cast<size_t>(blob.size()));
  for (int64_t p = 0; p < spec.panels(); ++p) {
    pack_panel({&m, &bias, &spec, p, blob.data() + p * spec.panel_bytes(),
                spec.is_sorted() ? order.data() : nullptr},
               scratch.data());
  }
  return blob;
}

void expect_same_values(const StoredMatrix& m, const std::string& what) {
  const PanelSpec spec = plan_panels(m);
  const Buffer blob = pack_all(m, spec);
  const std::vector<int32_t> columns = columns_of(m, spec);
  std::vector<float> w(static_cast<size_t>(m.cols));
  for (int64_t n = 0; n < m.rows; ++n) {
    quant::decode_weights(m, n, 0, m.cols, w.data());
    std::vector<bool> seen(w.size());
    for (int64_t k = 0; k < spec.k_padded(); ++k) {
      const int32_t column = columns[k];
      if (column == m.cols) continue;
      ASSERT_FALSE(seen[column]) << what << " holds column " << column << " twice";
      seen[column] = true;
      const float got = packed_value_at(spec, blob.data(), n, k);
      ASSERT_NEAR(got, w[column], std::fabs(w[column]) * 0x1p-22)
          << what << " at (" << n << ", " << k << "), column " << column;
    }
    ASSERT_EQ(std::count(seen.begin(), seen.end(), false), 0) << what << " lacks columns";
  }
  // Pads are zero codes: they meet zeros of the input, and must not be NaN.
  for (int64_t n = 0; n < spec.panels() * kPanelCols; ++n) {
    for (int64_t k = 0; k < spec.k_padded(); ++k) {
      if (n < m.rows && columns[k] < m.cols) continue;
      ASSERT_EQ(packed_code_at(spec, blob.data(), n, k), 0u) << what << " pad " << n << " " << k;
    }
  }
}

TEST(Pack, EverySchemeInCanonicalStorage) {
  for (const WeightScheme& scheme : testing::all_weight_schemes()) {
    for (const auto& [rows, cols] : {std::pair{33, 96}, {64, 160}, {5, 33}, {70, 300}}) {
      const auto w = random_values(rows, cols, 1, 0.1f);
      const auto encoded = quant::encode_matrix(w.data(), rows, cols, scheme);
      const PanelSpec spec = plan_panels(encoded.view);
      EXPECT_FALSE(spec.widened) << testing::name_of(scheme);
      EXPECT_EQ(packing_note(encoded.view, spec), "");
      expect_same_values(encoded.view, testing::name_of(scheme));
    }
  }
}

TEST(Pack, KeepsEveryCodeByte) {
  std::vector<uint8_t> codes(64 * 64);
  for (size_t i = 0; i < codes.size(); ++i) {
    const auto byte = static_cast<uint8_t>(i);
    codes[i] = (byte & 0x7f) == 0x7f ? 0x7e : byte;
  }
  const float scale = 1.0f;
  StoredMatrix m;
  m.rows = 64;
  m.cols = 64;
  m.scheme.format = WeightFormat::fp8_tensor;
  m.codes = {.data = reinterpret_cast<const std::byte*>(codes.data()),
             .unit = DType::f8_e4m3,
             .row_stride = 64,
             .col_stride = 1};
  m.scales.values = {.data = reinterpret_cast<const std::byte*>(&scale),
                     .unit = DType::f32,
                     .row_stride = 4,
                     .col_stride = 4};
  const PanelSpec spec = plan_panels(m);
  const Buffer blob = pack_all(m, spec);
  for (int64_t n = 0; n < 64; ++n) {
    for (int64_t k = 0; k < 64; ++k) {
      ASSERT_EQ(packed_code_at(spec, blob.data(), n, k), codes[static_cast<size_t>(n * 64 + k)]);
    }
  }
}

/// The matrix [N, K] stored as [K, N].
TEST(Pack, TransposedInterleavedAndUnaligned) {
  const int64_t rows = 40;
  const int64_t cols = 100;
  std::vector<std::byte> storage(static_cast<size_t>(2 * rows * cols * 2 + 1));
  std::byte* base = storage.data() + 1;
  const Rng rng(5, 5);
  for (int64_t i = 0; i < 2 * rows * cols; ++i) {
    const auto code = static_cast<uint16_t>(0x3c00 + rng.below(static_cast<uint64_t>(i), 0x600));
    std::memcpy(base + i * 2, &code, 2);
  }
  for (int64_t half : {0, 1}) {
    StoredMatrix m;
    m.rows = rows;
    m.cols = cols;
    m.row_first = half;
    m.row_step = 2;
    m.codes = {.data = base, .unit = DType::bf16, .row_stride = 2, .col_stride = 4 * rows};
    expect_same_values(m, "interleaved, transposed bf16");
  }
}

TEST(Pack, Fp4PackedAlongInputsThatAreNotContiguous) {
  // [K / 2, N] bytes, scales [K / 16, N]: how ModelOpt stores fused experts.
  const int64_t rows = 40;
  const int64_t cols = 96;
  std::vector<uint8_t> codes(static_cast<size_t>(cols / 2 * rows));
  std::vector<uint8_t> scales(static_cast<size_t>(cols / 16 * rows));
  const Rng rng(6, 6);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(rng.below(i, 256));
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = static_cast<uint8_t>(0x20 + rng.below(i + 99999, 0x40));
  }
  StoredMatrix m;
  m.rows = rows;
  m.cols = cols;
  m.scheme.format = WeightFormat::nvfp4;
  m.global = 0.37f;
  m.codes = {.data = reinterpret_cast<const std::byte*>(codes.data()),
             .unit = DType::u8,
             .pack_axis = PackAxis::cols,
             .pack = 2,
             .row_stride = 1,
             .col_stride = rows};
  m.scales = {.values = {.data = reinterpret_cast<const std::byte*>(scales.data()),
                         .unit = DType::f8_e4m3,
                         .row_stride = 1,
                         .col_stride = rows},
              .row_group = 1,
              .col_group = 16};
  EXPECT_FALSE(plan_panels(m).widened);
  expect_same_values(m, "nvfp4 [K/2, N]");
}

TEST(Pack, AwqAndGptqWords) {
  const int64_t rows = 64;
  const int64_t cols = 128;
  const int64_t group = 32;
  std::vector<uint32_t> words(static_cast<size_t>(rows * cols / 8));
  std::vector<uint32_t> zeros(static_cast<size_t>(rows * cols / group / 8));
  std::vector<float> scales(static_cast<size_t>(rows * cols / group));
  const Rng rng(7, 7);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(rng.bits(i));
  for (size_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<uint32_t>(rng.bits(i + 5000));
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = 0.01f + rng.uniform(i);
  StoredMatrix awq;
  awq.rows = rows;
  awq.cols = cols;
  awq.scheme = {WeightFormat::int4_group, static_cast<int32_t>(group), true};
  awq.codes = {.data = reinterpret_cast<const std::byte*>(words.data()),
               .unit = DType::i32,
               .pack_axis = PackAxis::rows,
               .order = PackOrder::awq,
               .pack = 8,
               .row_stride = 4,
               .col_stride = rows / 2};
  awq.zeros = {.values = awq.codes, .row_group = 1, .col_group = group};
  awq.zeros.values.data = reinterpret_cast<const std::byte*>(zeros.data());
  awq.scales = {.values = {.data = reinterpret_cast<const std::byte*>(scales.data()),
                           .unit = DType::f32,
                           .row_stride = 4,
                           .col_stride = 4 * rows},
                .row_group = 1,
                .col_group = group};
  EXPECT_FALSE(plan_panels(awq).widened);
  expect_same_values(awq, "AWQ");

  StoredMatrix gptq = awq;
  gptq.codes.pack_axis = PackAxis::cols;
  gptq.codes.order = PackOrder::sequential;
  gptq.codes.row_stride = 4;
  gptq.codes.col_stride = 4 * rows;
  gptq.zeros.values.order = PackOrder::sequential;
  gptq.zero_offset = 1;
  EXPECT_FALSE(plan_panels(gptq).widened);
  expect_same_values(gptq, "GPTQ");

  // Act order: columns name their groups.
  std::vector<int32_t> groups(static_cast<size_t>(cols));
  for (int64_t k = 0; k < cols; ++k) groups[k] = static_cast<int32_t>(k * 7 % (cols / group));
  gptq.group_index = groups.data();
  const PanelSpec spec = plan_panels(gptq);
  EXPECT_FALSE(spec.widened);
  EXPECT_EQ(spec.code, Code::int4);
  EXPECT_EQ(spec.places, cols);
  EXPECT_NE(packing_note(gptq, spec).find("act order"), std::string::npos);
  EXPECT_EQ(packed_scheme(gptq, spec).format, WeightFormat::int4_group);
  expect_same_values(gptq, "GPTQ act order");
}

/// Integers of a storage that act order may meet, with zero points where asked.
struct IntegerStorage {
  const char* name;
  int bits;
  PackAxis axis;
  PackOrder order = PackOrder::sequential;
  bool inputs_first = false;  ///< [K, N] in place of [N, K]
  DType unit = DType::i32;
};

TEST(Pack, ActOrderInEveryStorage) {
  const IntegerStorage storages[] = {
      {"GPTQ 4 bits", 4, PackAxis::cols, PackOrder::sequential, true},
      {"GPTQ 8 bits", 8, PackAxis::cols, PackOrder::sequential, true},
      {"pack-quantized 4 bits", 4, PackAxis::cols},
      {"pack-quantized 8 bits", 8, PackAxis::cols},
      {"AWQ words", 4, PackAxis::rows, PackOrder::awq, true},
      {"words of outputs", 4, PackAxis::rows},
      {"bytes", 8, PackAxis::none, PackOrder::sequential, false, DType::u8},
      {"signed bytes", 8, PackAxis::none, PackOrder::sequential, false, DType::i8},
      {"bytes of two", 4, PackAxis::cols, PackOrder::sequential, false, DType::u8}};
  const Rng rng(17, 7);
  for (const IntegerStorage& s : storages) {
    for (const auto& [rows, cols] :
         {std::pair{64, 128}, {40, 320}, {72, 36}, {8, 2080}, {40, 75}}) {
      for (const bool unlike_groups : {false, true}) {
        const int64_t group = 32;
        const int64_t groups = ceil_div(int64_t{cols}, group);
        const int pack = s.axis == PackAxis::none ? 1 : std::max(8, bits_of(s.unit)) / s.bits;
        const int64_t unit_bytes = std::max(8, bits_of(s.unit)) / 8;
        const int64_t outer = s.axis == PackAxis::rows ? ceil_div(rows, pack) : rows;
        const int64_t inner = s.axis == PackAxis::cols ? ceil_div(cols, pack) : cols;
        std::vector<uint8_t> codes(static_cast<size_t>(outer * inner * unit_bytes));
        std::vector<uint16_t> scales(static_cast<size_t>(rows * groups));
        std::vector<uint8_t> zeros(scales.size());
        for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(rng.bits(i));
        for (size_t i = 0; i < scales.size(); ++i) {
          scales[i] = static_cast<uint16_t>(0x2c00 + rng.below(i + 7777, 0x400));
          zeros[i] = static_cast<uint8_t>(rng.below(i + 9999, uint64_t{1} << s.bits));
        }
        std::vector<int32_t> index(static_cast<size_t>(cols));
        for (int64_t k = 0; k < cols; ++k) {
          const auto at = static_cast<uint64_t>(k);
          index[at] = static_cast<int32_t>(
              unlike_groups ? rng.below(at + 5555, static_cast<uint64_t>(groups)) : at / 32);
        }
        for (uint64_t k = index.size(); !unlike_groups && k-- > 1;) {
          std::swap(index[k], index[rng.below(k, k + 1)]);
        }
        StoredMatrix m;
        m.rows = rows;
        m.cols = cols;
        m.scheme = {s.bits == 4 ? WeightFormat::int4_group : WeightFormat::int8_group,
                    static_cast<int32_t>(group), true};
        m.codes = {.data = reinterpret_cast<const std::byte*>(codes.data()),
                   .unit = s.unit,
                   .pack_axis = s.axis,
                   .order = s.order,
                   .pack = pack,
                   .row_stride = s.inputs_first ? unit_bytes : inner * unit_bytes,
                   .col_stride = s.inputs_first ? outer * unit_bytes : unit_bytes};
        m.scales = {.values = {.data = reinterpret_cast<const std::byte*>(scales.data()),
                               .unit = DType::f16,
                               .row_stride = s.inputs_first ? 2 : 2 * groups,
                               .col_stride = s.inputs_first ? 2 * rows : 2},
                    .row_group = 1,
                    .col_group = group};
        m.zeros = m.scales;
        m.zeros.values.data = reinterpret_cast<const std::byte*>(zeros.data());
        m.zeros.values.unit = DType::u8;
        m.zeros.values.row_stride /= 2;
        m.zeros.values.col_stride /= 2;
        if (s.unit == DType::i8) m.zeros = {};
        m.group_index = index.data();
        const PanelSpec spec = plan_panels(m);
        EXPECT_FALSE(spec.widened) << s.name;
        EXPECT_EQ(spec.places == cols, !unlike_groups) << s.name;
        expect_same_values(m, std::string(s.name) + (unlike_groups ? ", unlike groups " : " ") +
                                  std::to_string(rows) + "x" + std::to_string(cols));
      }
    }
  }
}

/// GPTQ stores z - 1 of 8-bit codes: all zero points but 256 are int8 once centred.
TEST(Pack, ZeroPointsStoredWithAnOffset) {
  const int64_t rows = 64, cols = 64, group = 32;
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols));
  std::vector<uint8_t> zeros(static_cast<size_t>(rows * cols / group));
  std::vector<float> scales(zeros.size(), 0.5f);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37);
  for (size_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<uint8_t>(i % 255);
  StoredMatrix m;
  m.rows = rows;
  m.cols = cols;
  m.scheme = {WeightFormat::int8_group, static_cast<int32_t>(group), true};
  m.codes = {.data = reinterpret_cast<const std::byte*>(codes.data()),
             .unit = DType::i32,
             .pack_axis = PackAxis::cols,
             .pack = 4,
             .row_stride = 4,
             .col_stride = 4 * rows};
  m.scales = {.values = {.data = reinterpret_cast<const std::byte*>(scales.data()),
                         .unit = DType::f32,
                         .row_stride = 4,
                         .col_stride = 4 * rows},
              .row_group = 1,
              .col_group = group};
  m.zeros = {.values = {.data = reinterpret_cast<const std::byte*>(zeros.data()),
                        .unit = DType::i32,
                        .pack_axis = PackAxis::rows,
                        .pack = 4,
                        .row_stride = 4,
                        .col_stride = rows},
             .row_group = 1,
             .col_group = group};
  m.zero_offset = 1;
  EXPECT_FALSE(plan_panels(m).widened);
  expect_same_values(m, "zero points to 255");
  zeros[70] = 255;  // stands for 256
  EXPECT_EQ(plan_panels(m).code, Code::f32);
  EXPECT_NE(packing_note(m, plan_panels(m)).find("exceed 8 bits"), std::string::npos);
  expect_same_values(m, "a zero point of 256");
}

TEST(Pack, ScalesAlongOutputsAreWidenedExactly) {
  const int64_t rows = 64;
  const int64_t cols = 48;
  std::vector<uint8_t> codes(static_cast<size_t>(rows / 2 * cols));
  std::vector<uint8_t> scales(static_cast<size_t>(rows / 32 * cols));
  const Rng rng(8, 8);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(rng.below(i, 256));
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = static_cast<uint8_t>(100 + rng.below(i, 50));
  }
  StoredMatrix m;
  m.rows = rows;
  m.cols = cols;
  m.scheme.format = WeightFormat::mxfp4;
  m.codes = {.data = reinterpret_cast<const std::byte*>(codes.data()),
             .unit = DType::u8,
             .pack_axis = PackAxis::rows,
             .pack = 2,
             .row_stride = 1,
             .col_stride = rows / 2};
  m.scales = {.values = {.data = reinterpret_cast<const std::byte*>(scales.data()),
                         .unit = DType::f8_e8m0,
                         .row_stride = 1,
                         .col_stride = rows / 32},
              .row_group = 32,
              .col_group = 1};
  const PanelSpec spec = plan_panels(m);
  EXPECT_TRUE(spec.widened);
  EXPECT_EQ(spec.code, Code::bf16);
  EXPECT_EQ(packed_scheme(m, spec).format, WeightFormat::bf16);
  EXPECT_FALSE(packing_note(m, spec).empty());
  expect_same_values(m, "mxfp4 scaled along outputs");
}

/// Every 8-bit and 4-bit code, NaN and infinity included, gives its exact value in a product.
TEST(Pack, AllCodePointsThroughTheKernels) {
  for (const auto format : {WeightFormat::fp8_tensor, WeightFormat::mxfp8_e5m2}) {
    const DType unit = format == WeightFormat::fp8_tensor ? DType::f8_e4m3 : DType::f8_e5m2;
    // Column n holds code n at K index n % 32 and zeros elsewhere; x picks it out with a one.
    std::vector<uint8_t> codes(256 * 32);
    std::vector<uint8_t> scales(256, 127);
    for (int n = 0; n < 256; ++n)
      codes[static_cast<size_t>(n * 32 + n % 32)] = static_cast<uint8_t>(n);
    const float one = 1.0f;
    StoredMatrix m;
    m.rows = 256;
    m.cols = 32;
    m.scheme.format = format;
    m.codes = {.data = reinterpret_cast<const std::byte*>(codes.data()),
               .unit = unit,
               .row_stride = 32,
               .col_stride = 1};
    if (format == WeightFormat::fp8_tensor) {
      m.scales.values = {.data = reinterpret_cast<const std::byte*>(&one),
                         .unit = DType::f32,
                         .row_stride = 4,
                         .col_stride = 4};
    } else {
      m.scales = {.values = {.data = reinterpret_cast<const std::byte*>(scales.data()),
                             .unit = DType::f8_e8m0,
                             .row_stride = 1,
                             .col_stride = 1},
                  .row_group = 1,
                  .col_group = 32};
    }
    for (CpuIsa isa : available_cpu_isas()) {
      const CpuLinear member(isa);
      for (const int64_t rows : {int64_t{1}, int64_t{16}}) {
        const std::vector<float> x(static_cast<size_t>(rows * 32), 1.0f);
        const std::vector<float> y =
            testing::run_member(member, m, {ActivationFormat::bf16}, x, rows, 1, 0.0f);
        for (int64_t n = 0; n < 256; ++n) {
          float expected;
          quant::decode_weights(m, n, n % 32, 1, &expected);
          const float got = y[static_cast<size_t>((rows - 1) * 256 + n)];
          if (std::isnan(expected)) {
            EXPECT_TRUE(std::isnan(got)) << to_string(isa) << " code " << n << " gave " << got;
          } else {
            EXPECT_EQ(got, expected) << to_string(isa) << " code " << n;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace moekit::linear
