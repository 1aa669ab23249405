// Every storage order and every set of packing loops gives the same panel, byte for byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "base/cpu_features.h"
#include "cpu/linear/matrices.h"
#include "linear/pack_loops.h"
#include "linear/panel_pack.h"
#include "linear/panel_scales.h"

namespace moekit::linear {
namespace {

using testing::random_values;
using Bytes = std::vector<std::byte>;

Bytes random_bytes(int64_t count, uint64_t seed) {
  const Rng rng(seed, 3);
  Bytes bytes(static_cast<size_t>(count));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(rng.below(i, 256));
  return bytes;
}

Bytes pack_all(const StoredMatrix& m) {
  const PanelSpec spec = plan_panels(m);
  EXPECT_FALSE(spec.widened);
  Bytes blob(static_cast<size_t>(spec.total_bytes()), std::byte{0xff});
  const StoredVector bias;
  for (int64_t p = 0; p < spec.panels(); ++p) {
    pack_panel({&m, &bias, &spec, p, blob.data() + p * spec.panel_bytes()});
  }
  return blob;
}

/// Units of `bytes` each, [rows, units] as [units, rows].
Bytes turned(const std::byte* data, int64_t row_stride, int64_t rows, int64_t units,
             int64_t bytes) {
  Bytes out(static_cast<size_t>(rows * units * bytes));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t u = 0; u < units; ++u) {
      std::memcpy(out.data() + (u * rows + r) * bytes, data + r * row_stride + u * bytes,
                  static_cast<size_t>(bytes));
    }
  }
  return out;
}

TEST(PackOrders, InputsOutside) {
  for (const WeightScheme& scheme : testing::all_weight_schemes()) {
    for (const auto& [rows, cols] : {std::pair{96, 160}, {64, 100}, {70, 256}, {33, 48}}) {
      const auto w = random_values(rows, cols, 3, 0.1f);
      const auto encoded = quant::encode_matrix(w.data(), rows, cols, scheme);
      const Bytes expected = pack_all(encoded.view);
      StoredMatrix m = encoded.view;
      const int64_t units = ceil_div(int64_t{cols}, int64_t{m.codes.pack});
      const Bytes codes = turned(m.codes.data, m.codes.row_stride, rows, units, m.codes.col_stride);
      m.codes.data = codes.data();
      m.codes.row_stride = m.codes.col_stride;
      m.codes.col_stride = rows * m.codes.row_stride;
      EXPECT_TRUE(pack_all(m) == expected) << testing::name_of(scheme) << " codes " << rows;
      // Scales and zero points beside each other too.
      Bytes scales;
      if (m.scales.row_group == 1) {
        CodeGrid& g = m.scales.values;
        scales = turned(g.data, g.row_stride, rows, g.row_stride / g.col_stride, g.col_stride);
        g.data = scales.data();
        g.row_stride = g.col_stride;
        g.col_stride = rows * g.row_stride;
      }
      Bytes zeros;
      if (m.zeros.row_group == 1) {
        CodeGrid& g = m.zeros.values;
        zeros = turned(g.data, g.row_stride, rows, g.row_stride, 1);
        g.data = zeros.data();
        g.col_stride = rows;
        g.row_stride = 1;
      }
      EXPECT_TRUE(pack_all(m) == expected) << testing::name_of(scheme) << " scales " << rows;
    }
  }
}

TEST(PackOrders, SingleBytesOfCodes) {
  // Two FP4 or int4 codes a byte, bytes along K outside; int8 a byte each.
  for (const WeightScheme& scheme : {WeightScheme{WeightFormat::mxfp4},
                                     {WeightFormat::int4_group, 32},
                                     {WeightFormat::int8_channel}}) {
    const int64_t rows = 96;
    const int64_t cols = 128;
    const auto encoded =
        quant::encode_matrix(random_values(rows, cols, 4).data(), rows, cols, scheme);
    StoredMatrix m = encoded.view;
    const int64_t row_bytes = m.codes.row_stride;
    const int32_t pack = m.codes.pack * 8 / std::max(8, bits_of(m.codes.unit));
    const Bytes codes = turned(m.codes.data, row_bytes, rows, row_bytes, 1);
    m.codes.data = codes.data();
    m.codes.unit = DType::u8;
    m.codes.pack = pack;
    m.codes.pack_axis = pack == 1 ? PackAxis::none : PackAxis::cols;
    m.codes.row_stride = 1;
    m.codes.col_stride = rows;
    EXPECT_TRUE(pack_all(m) == pack_all(encoded.view)) << testing::name_of(scheme);
  }
}

TEST(PackOrders, GateAndUpInterleaved) {
  const int64_t rows = 64;
  const int64_t cols = 96;
  // [K, 2 N]: gate and up by turns. The end of the storage is the end of the vector.
  const Bytes storage = random_bytes(2 * rows * cols * 2, 5);
  for (int64_t half : {0, 1}) {
    StoredMatrix m;
    m.rows = rows;
    m.cols = cols;
    m.row_first = half;
    m.row_step = 2;
    m.codes = {
        .data = storage.data(), .unit = DType::bf16, .row_stride = 2, .col_stride = 4 * rows};
    Bytes plain(static_cast<size_t>(rows * cols * 2));
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < cols; ++k) {
        std::memcpy(plain.data() + (r * cols + k) * 2,
                    storage.data() + (k * 2 * rows + 2 * r + half) * 2, 2);
      }
    }
    StoredMatrix canonical = m;
    canonical.row_first = 0;
    canonical.row_step = 1;
    canonical.codes.data = plain.data();
    canonical.codes.row_stride = 2 * cols;
    canonical.codes.col_stride = 2;
    EXPECT_TRUE(pack_all(m) == pack_all(canonical)) << "half " << half;
  }
}

TEST(PackOrders, GateAndUpInterleavedInSingleBytes) {
  // nvfp4 [K / 2, 2 N] with scales [K / 16, 2 N], gate and up by turns.
  const int64_t rows = 64;
  const int64_t cols = 96;
  const Bytes codes = random_bytes(2 * rows * cols / 2, 15);
  Bytes scales = random_bytes(2 * rows * cols / 16, 16);
  for (std::byte& b : scales) b &= std::byte{0x3f};
  for (int64_t half : {0, 1}) {
    StoredMatrix m;
    m.rows = rows;
    m.cols = cols;
    m.scheme.format = WeightFormat::nvfp4;
    m.row_first = half;
    m.row_step = 2;
    m.codes = {.data = codes.data(),
               .unit = DType::u8,
               .pack_axis = PackAxis::cols,
               .pack = 2,
               .row_stride = 1,
               .col_stride = 2 * rows};
    m.scales = {.values = {.data = scales.data(),
                           .unit = DType::f8_e4m3,
                           .row_stride = 1,
                           .col_stride = 2 * rows},
                .row_group = 1,
                .col_group = 16};
    const auto of_half = [&](const Bytes& all, int64_t units) {
      const Bytes whole = turned(all.data(), 2 * rows, units, 2 * rows, 1);  // [2 N, units]
      Bytes part;
      for (int64_t r = 0; r < rows; ++r) {
        const auto first = whole.begin() + (2 * r + half) * units;
        part.insert(part.end(), first, first + units);
      }
      return part;
    };
    const Bytes plain_codes = of_half(codes, cols / 2), plain_scales = of_half(scales, cols / 16);
    StoredMatrix canonical = m;
    canonical.row_first = 0;
    canonical.row_step = 1;
    canonical.codes.data = plain_codes.data();
    canonical.codes.row_stride = cols / 2;
    canonical.codes.col_stride = 1;
    canonical.scales.values.data = plain_scales.data();
    canonical.scales.values.row_stride = cols / 16;
    canonical.scales.values.col_stride = 1;
    EXPECT_TRUE(pack_all(m) == pack_all(canonical)) << "half " << half;
  }
}

/// Matrices of random codes with K outside, `unit` bytes a code unit (AWQ: words along outputs).
StoredMatrix with_inputs_outside(WeightFormat format, int64_t rows, int64_t cols, Bytes& codes,
                                 uint64_t seed) {
  StoredMatrix m;
  m.rows = rows;
  m.cols = cols;
  m.scheme = {format, 0, format == WeightFormat::int4_channel};
  const bool awq = format == WeightFormat::int4_channel;
  const int64_t unit = awq ? 4 : format == WeightFormat::bf16 ? 2 : 1;
  const int64_t per_row = awq ? rows / 8 : rows;
  const int64_t unit_rows = format == WeightFormat::mxfp4 ? cols / 2 : cols;
  codes = random_bytes(per_row * unit_rows * unit, seed);
  m.codes = {.data = codes.data(), .row_stride = unit, .col_stride = per_row * unit};
  switch (format) {
    case WeightFormat::int4_channel:
      m.codes.unit = DType::i32;
      m.codes.pack_axis = PackAxis::rows;
      m.codes.order = PackOrder::awq;
      m.codes.pack = 8;
      break;
    case WeightFormat::mxfp4:
      m.codes.unit = DType::u8;
      m.codes.pack_axis = PackAxis::cols;
      m.codes.pack = 2;
      break;
    case WeightFormat::mxfp8: m.codes.unit = DType::f8_e4m3; break;
    default: m.codes.unit = DType::bf16; break;
  }
  return m;
}

TEST(PackOrders, RunsOfPanelsGiveTheBytesOfSinglePanels) {
  for (const auto format :
       {WeightFormat::int4_channel, WeightFormat::mxfp4, WeightFormat::mxfp8, WeightFormat::bf16}) {
    // Ends of K and of the outputs inside the run; several turns over K.
    for (const auto& [rows, cols] : {std::pair{128, 320}, {104, 290}, {32, 64}}) {
      Bytes gate_codes, up_codes;
      const StoredMatrix gate = with_inputs_outside(format, rows, cols, gate_codes, 21);
      const StoredMatrix up = with_inputs_outside(format, rows, cols, up_codes, 22);
      const Bytes wide = random_bytes(int64_t{rows} * cols * 2, 23);
      StoredMatrix dense = gate;
      dense.scheme = {WeightFormat::bf16};
      dense.codes = {
          .data = wide.data(), .unit = DType::bf16, .row_stride = 2 * cols, .col_stride = 2};
      const StoredVector bias;
      const PanelSpec gate_spec = plan_panels(gate), up_spec = plan_panels(up);
      const PanelSpec dense_spec = plan_panels(dense);
      const Bytes expected_gate = pack_all(gate), expected_up = pack_all(up);
      const Bytes expected_dense = pack_all(dense);
      const auto blob = [](const Bytes& like) { return Bytes(like.size(), std::byte{0xff}); };
      Bytes together_gate = blob(expected_gate), together_up = blob(expected_up);
      Bytes alone = blob(expected_up), mixed_gate = blob(expected_gate),
            mixed = blob(expected_dense);
      PanelRun pairs, singles, others;
      for (int64_t p = 0; p < gate_spec.panels(); ++p) {
        pairs.add(
            {&gate, &bias, &gate_spec, p, together_gate.data() + p * gate_spec.panel_bytes()});
        pairs.add({&up, &bias, &up_spec, p, together_up.data() + p * up_spec.panel_bytes()});
        singles.add({&up, &bias, &up_spec, p, alone.data() + p * up_spec.panel_bytes()});
        others.add({&gate, &bias, &gate_spec, p, mixed_gate.data() + p * gate_spec.panel_bytes()});
        others.add({&dense, &bias, &dense_spec, p, mixed.data() + p * dense_spec.panel_bytes()});
      }
      pairs.pack();
      singles.pack();
      others.pack();
      const int which = static_cast<int>(format);
      EXPECT_TRUE(together_gate == expected_gate) << which << " " << rows;
      EXPECT_TRUE(together_up == expected_up) << which << " " << rows;
      EXPECT_TRUE(alone == expected_up) << which << " " << rows;
      EXPECT_TRUE(mixed_gate == expected_gate) << which << " " << rows;
      EXPECT_TRUE(mixed == expected_dense) << which << " " << rows;
    }
  }
}

TEST(PackOrders, PackedZeroPoints) {
  const int64_t rows = 96;
  const int64_t groups = 5;
  for (const int32_t pack : {8, 4}) {
    for (const PackOrder order : {PackOrder::sequential, PackOrder::awq}) {
      if (pack == 4 && order == PackOrder::awq) continue;
      const Bytes words = random_bytes(rows / pack * groups * 4, 6);
      for (const bool beside : {true, false}) {
        StoredMatrix m;
        m.rows = rows;
        m.cols = groups * 32;
        m.scheme = {pack == 8 ? WeightFormat::int4_group : WeightFormat::int8_group, 32, true};
        m.zero_offset = pack == 8 ? 1 : 0;
        m.zeros = {.values = {.data = words.data(),
                              .unit = DType::i32,
                              .pack_axis = PackAxis::rows,
                              .order = order,
                              .pack = pack,
                              .row_stride = beside ? 4 : groups * 4,
                              .col_stride = beside ? rows / pack * 4 : 4},
                   .row_group = 1,
                   .col_group = 32};
        PanelSpec spec;
        spec.rows = m.rows;
        spec.cols = m.cols;
        spec.group = 32;
        spec.code = pack == 8 ? Code::int4 : Code::int8;
        spec.zeros = true;
        Bytes out(static_cast<size_t>(spec.zero_bytes()));
        for (int64_t p = 0; p < spec.panels(); ++p) {
          pack_zeros(m, spec, PanelGroups::of(m, spec, nullptr), p, pack == 8 ? 8 : 128,
                     out.data());
          for (int64_t g = 0; g < groups; ++g) {
            for (int64_t c = 0; c < kPanelCols; ++c) {
              const int64_t n = p * kPanelCols + c;
              uint32_t word;
              std::memcpy(&word,
                          words.data() + n / pack * m.zeros.values.row_stride +
                              g * m.zeros.values.col_stride,
                          4);
              const int64_t i = n % pack;
              const int64_t place = order == PackOrder::awq ? (i % 2 == 0 ? i / 2 : 4 + i / 2) : i;
              const uint32_t z = pack == 8 ? word >> (4 * place) & 15 : word >> (8 * i) & 255;
              const int expected = static_cast<int>(z) + m.zero_offset - (pack == 8 ? 8 : 128);
              ASSERT_EQ(static_cast<int8_t>(out[static_cast<size_t>(g * kPanelCols + c)]), expected)
                  << "pack " << pack << " output " << n << " group " << g;
            }
          }
        }
      }
    }
  }
}

TEST(PackOrders, AllLoopsWriteTheSameBytes) {
  const PackLoops& a = generic_pack_loops();
  if (!has_cpu_isa(CpuIsa::avx2)) GTEST_SKIP() << "no AVX2 here: there is one set of loops";
  const PackLoops& b = avx2_pack_loops();
  for (int i = 0; i < kNumCodes; ++i) {
    const auto code = static_cast<Code>(i);
    const int64_t count = 160;
    const int64_t row_bytes = count * bits_of(code) / 8;
    CodeOrder order{code, 0};
    if (code == Code::int4) order.flip = 0x88888888u;
    // One more byte: neither source nor destination need be aligned.
    const Bytes codes = random_bytes(kPanelCols * row_bytes * 2 + 1, 7 + static_cast<uint64_t>(i));
    const std::byte* rows[kPanelCols];
    for (int64_t c = 0; c < kPanelCols; ++c) rows[c] = codes.data() + 1 + c * row_bytes;
    const auto bytes = static_cast<size_t>(kPanelCols * row_bytes);
    for (const size_t shift : {size_t{0}, size_t{1}}) {
      Buffer x(static_cast<int64_t>(bytes) + 64), y(static_cast<int64_t>(bytes) + 64);
      EXPECT_EQ(a.rows(order, rows, count, {}, x.data() + shift),
                b.rows(order, rows, count, {codes.data(), 4096, true}, y.data() + shift));
      EXPECT_EQ(std::memcmp(x.data() + shift, y.data() + shift, bytes), 0) << "rows, code " << i;
      for (const int32_t element : {1, 2, 4}) {
        for (const bool paired : {false, true}) {
          if (element * 8 < bits_of(code) || (paired && element == 4)) continue;
          OuterCodes outer{codes.data() + 1, kPanelCols * element * (paired ? 2 : 1), element,
                           paired, paired ? 8 * element : 0};
          EXPECT_EQ(a.outer(order, outer, count, x.data() + shift),
                    b.outer(order, outer, count, y.data() + shift));
          EXPECT_EQ(std::memcmp(x.data() + shift, y.data() + shift, bytes), 0)
              << "outer, code " << i << " element " << element << " paired " << paired;
        }
      }
    }
  }
  for (const bool is_signed : {false, true}) {
    for (const int32_t offset : {-3, 0, 130, -1000}) {
      Bytes x = random_bytes(256, 9);
      for (size_t i = 0; i < 256; ++i) x[i] = std::byte(i);
      Bytes y = x;
      a.shift_zeros(x.data(), 256, is_signed, offset);
      b.shift_zeros(y.data(), 256, is_signed, offset);
      EXPECT_TRUE(x == y);
      for (int i = 0; i < 256; ++i) {
        const int z = (is_signed ? static_cast<int8_t>(i) : i) + offset;
        ASSERT_EQ(static_cast<int8_t>(x[static_cast<size_t>(i)]), std::clamp(z, -128, 127));
      }
    }
  }
}

}  // namespace
}  // namespace moekit::linear
