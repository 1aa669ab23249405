// The packed dense layer against a double-precision evaluation of decoded weights and round-tripped
// rows, on every ISA that this machine runs.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/buffer.h"
#include "cpu/linear/matrices.h"
#include "cpu/linear/run_member.h"
#include "linear/cpu_linear.h"
#include "moekit/error.h"
#include "quant/row_codec.h"
#include "quant/stored_codec.h"

namespace moekit::linear {
namespace {

using testing::random_values;
using testing::run_member;

/// |y - sum w x| <= (sqrt(K) + 16) 2^-23 sum |w x|: fp32 sums wander like a random walk, scales and
/// their products add a few roundings.
void expect_product(const StoredMatrix& w, const ActivationScheme& input, std::vector<float> x,
                    int64_t rows, const std::vector<float>& y, const std::string& what) {
  const double bound = (std::sqrt(static_cast<double>(w.cols)) + 16.0) * 0x1p-23;
  for (int64_t i = 0; i < rows; ++i) {
    quant::round_trip_row(input, w.input_scale, x.data() + i * w.cols, w.cols);
  }
  std::vector<float> v(static_cast<size_t>(w.cols));
  int failures = 0;
  for (int64_t n = 0; n < w.rows && failures < 3; ++n) {
    quant::decode_weights(w, n, 0, w.cols, v.data());
    for (int64_t i = 0; i < rows && failures < 3; ++i) {
      double sum = 0;
      double magnitude = 0;
      for (int64_t k = 0; k < w.cols; ++k) {
        const double product = double{v[k]} * x[i * w.cols + k];
        sum += product;
        magnitude += std::fabs(product);
      }
      const double got = y[static_cast<size_t>(i * w.rows + n)];
      const bool near = std::fabs(got - sum) <= bound * magnitude;
      EXPECT_TRUE(near) << what << " row " << i << " column " << n << ": " << got << ", expected "
                        << sum << " +- " << bound * magnitude;
      failures += near ? 0 : 1;
    }
  }
}

struct Shape {
  int64_t rows, cols, inputs;
};

TEST(CpuLinear, EveryFormatOnEveryIsa) {
  for (CpuIsa isa : available_cpu_isas()) {
    const CpuLinear member(isa);
    for (const WeightScheme& scheme : testing::all_weight_schemes()) {
      for (const ActivationScheme& input : testing::all_activation_schemes()) {
        for (const Shape& s : {Shape{33, 96, 1}, Shape{64, 160, 7}, Shape{40, 176, 15}}) {
          const auto w = random_values(s.rows, s.cols, 1, 0.1f);
          auto encoded = quant::encode_matrix(w.data(), s.rows, s.cols, scheme);
          encoded.view.input_scale = testing::static_scale_of(input);
          const auto x = random_values(s.inputs, s.cols, 2);
          const auto y = run_member(member, encoded.view, input, x, s.inputs, 2);
          expect_product(encoded.view, input, x, s.inputs, y,
                         std::string(to_string(isa)) + " " + testing::name_of(scheme) + " x " +
                             to_string(input.format));
        }
      }
    }
  }
}

/// Columns dealt out to places far apart, each naming its group, under rows dealt alike: sorting
/// brings them back, so that the bits are those of the matrix in order.
TEST(CpuLinear, ActOrderHasTheBitsOfSortedColumns) {
  const int64_t rows = 40, cols = 192, group = 32, inputs = 9;
  const auto w = random_values(rows, cols, 31, 0.1f);
  for (const WeightScheme& scheme : {WeightScheme{WeightFormat::int4_group, group, true},
                                     WeightScheme{WeightFormat::int8_group, group}}) {
    const auto encoded = quant::encode_matrix(w.data(), rows, cols, scheme);
    const StoredMatrix& plain = encoded.view;
    const int64_t groups = cols / group;
    const auto dealt = [&](int64_t k) { return k % group * groups + k / group; };
    const int bits = scheme.format == WeightFormat::int4_group ? 4 : 8;
    std::vector<std::byte> codes(static_cast<size_t>(rows * cols));
    std::vector<int32_t> index(static_cast<size_t>(cols));
    for (int64_t k = 0; k < cols; ++k) index[dealt(k)] = static_cast<int32_t>(k / group);
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t k = 0; k < cols; ++k) {
        const auto code = static_cast<uint8_t>(quant::code_at(plain, n, k));
        auto& byte = codes[static_cast<size_t>((n * cols + dealt(k)) * bits / 8)];
        byte |= static_cast<std::byte>(bits == 8 ? code : (code & 15) << (dealt(k) % 2 * 4));
      }
    }
    StoredMatrix m = plain;
    m.codes.data = codes.data();
    m.codes.row_stride = cols * bits / 8;
    ASSERT_TRUE(quant::is_dense(m.codes, bits));
    m.group_index = index.data();
    const auto x = random_values(inputs, cols, 32);
    std::vector<float> dealt_x(x.size());
    for (int64_t i = 0; i < inputs; ++i) {
      for (int64_t k = 0; k < cols; ++k) dealt_x[i * cols + dealt(k)] = x[i * cols + k];
    }
    for (CpuIsa isa : available_cpu_isas()) {
      const CpuLinear member(isa);
      for (const ActivationFormat format : {ActivationFormat::bf16, ActivationFormat::f32}) {
        const ActivationScheme input{format};
        const auto expected = run_member(member, plain, input, x, inputs, 2);
        EXPECT_EQ(run_member(member, m, input, dealt_x, inputs, 2), expected)
            << to_string(isa) << " " << testing::name_of(scheme);
        expect_product(m, input, dealt_x, inputs, expected, to_string(isa));
      }
    }
  }
}

TEST(CpuLinear, OddShapes) {
  for (CpuIsa isa : available_cpu_isas()) {
    const CpuLinear member(isa);
    for (const WeightScheme& scheme : testing::all_weight_schemes()) {
      const ActivationScheme input{ActivationFormat::bf16};
      for (const Shape& s : {Shape{1, 1, 1}, Shape{31, 33, 2}, Shape{33, 65, 5}, Shape{8, 300, 3},
                             Shape{70, 513, 26}, Shape{32, 2880, 4}}) {
        const auto w = random_values(s.rows, s.cols, 3, 0.1f);
        const auto encoded = quant::encode_matrix(w.data(), s.rows, s.cols, scheme);
        const auto x = random_values(s.inputs, s.cols, 4);
        const auto y = run_member(member, encoded.view, input, x, s.inputs, 3);
        expect_product(encoded.view, input, x, s.inputs, y,
                       std::string(to_string(isa)) + " " + testing::name_of(scheme) + " " +
                           std::to_string(s.rows) + "x" + std::to_string(s.cols));
      }
    }
  }
}

TEST(CpuLinear, BitsDoNotDependOnThreadsOrBatch) {
  const int64_t rows = 37;
  const int64_t cols = 608;
  const int64_t inputs = 150;
  for (CpuIsa isa : available_cpu_isas()) {
    const CpuLinear member(isa);
    for (const WeightScheme& scheme : testing::all_weight_schemes()) {
      for (const ActivationScheme& input :
           {ActivationScheme{ActivationFormat::f32}, ActivationScheme{ActivationFormat::bf16},
            ActivationScheme{ActivationFormat::fp8_block}}) {
        const auto w = random_values(rows, cols, 5, 0.1f);
        const auto encoded = quant::encode_matrix(w.data(), rows, cols, scheme);
        const auto x = random_values(inputs, cols, 6);
        const auto all = run_member(member, encoded.view, input, x, inputs, 1);
        EXPECT_EQ(all, run_member(member, encoded.view, input, x, inputs, 3));
        for (const int64_t first : {int64_t{0}, int64_t{11}, int64_t{149}}) {
          const int64_t n = std::min<int64_t>(inputs - first, first == 11 ? 9 : 1);
          const std::vector<float> part(x.begin() + first * cols, x.begin() + (first + n) * cols);
          const std::vector<float> expected(all.begin() + first * rows,
                                            all.begin() + (first + n) * rows);
          EXPECT_EQ(expected, run_member(member, encoded.view, input, part, n, 2))
              << to_string(isa) << " " << testing::name_of(scheme) << " rows from " << first;
        }
      }
    }
  }
}

/// Tiles of every height, in place and through scratch, give a row the bits that it has alone.
TEST(CpuLinear, BitsDoNotDependOnTheNumberOfRows) {
  const int64_t rows = 33;
  const int64_t cols = 672;  // neither whole chunks nor whole segments of 128
  const int64_t inputs = 27;
  for (CpuIsa isa : available_cpu_isas()) {
    const CpuLinear member(isa);
    for (const WeightScheme& scheme : testing::all_weight_schemes()) {
      const ActivationScheme input{ActivationFormat::bf16};
      const auto w = random_values(rows, cols, 5, 0.1f);
      const auto encoded = quant::encode_matrix(w.data(), rows, cols, scheme);
      const auto x = random_values(inputs, cols, 6);
      const auto all = run_member(member, encoded.view, input, x, inputs, 1);
      for (int64_t n = 1; n < inputs; ++n) {
        const std::vector<float> expected(all.begin(), all.begin() + n * rows);
        ASSERT_EQ(expected, run_member(member, encoded.view, input, x, n, 1))
            << to_string(isa) << " " << testing::name_of(scheme) << ", " << n << " rows";
      }
    }
  }
}

/// Every code of a byte or less in every place of a 64-byte unit, for one row and for many.
TEST(CpuLinear, EveryCodeIsDecoded) {
  using F = WeightFormat;
  const int64_t rows = 40;
  const int64_t cols = 544;
  for (const WeightScheme& scheme :
       {WeightScheme{F::fp8_channel}, WeightScheme{F::mxfp8_e5m2}, WeightScheme{F::int8_group, 32},
        WeightScheme{F::int8_channel, 0, true}, WeightScheme{F::mxfp4},
        WeightScheme{F::int4_group, 32}}) {
    const auto w = random_values(rows, cols, 12, 0.1f);
    auto encoded = quant::encode_matrix(w.data(), rows, cols, scheme);
    auto* codes = reinterpret_cast<uint8_t*>(encoded.storage.data() +
                                             (encoded.view.codes.data - encoded.storage.data()));
    const int64_t bytes = rows * encoded.view.codes.row_stride;
    for (int64_t i = 0; i < bytes; ++i) {
      // An odd factor: each 256 bytes hold every code, and rows differ in where.
      auto code = static_cast<uint8_t>(i * 37 + i / 256 * 11);
      const uint8_t special = scheme.format == F::fp8_channel ? 0x7f : 0x7c;
      const bool is_float = scheme.format == F::fp8_channel || scheme.format == F::mxfp8_e5m2;
      if (is_float && (code & special) == special) code = 0;  // NaN and infinity
      codes[i] = code;
    }
    for (CpuIsa isa : available_cpu_isas()) {
      const CpuLinear member(isa);
      for (const int64_t inputs : {1, 14}) {
        const auto x = random_values(inputs, cols, 13);
        const ActivationScheme input{ActivationFormat::bf16};
        const auto y = run_member(member, encoded.view, input, x, inputs, 1);
        expect_product(encoded.view, input, x, inputs, y,
                       std::string(to_string(isa)) + " every code of " + testing::name_of(scheme));
      }
    }
  }
}

TEST(CpuLinear, ReferenceMemberIsTheDefinition) {
  const auto w = random_values(20, 70, 8, 0.1f);
  const auto encoded = quant::encode_matrix(w.data(), 20, 70, {WeightFormat::mxfp4});
  const auto x = random_values(5, 70, 9);
  const ActivationScheme input{ActivationFormat::fp8_token};
  expect_product(encoded.view, input, x, 5, run_member(ref_linear(), encoded.view, input, x, 5, 2),
                 "ref");
  EXPECT_EQ(registry().back()->name(), "ref");
  EXPECT_EQ(registry().front()->name(), "cpu");
}

TEST(CpuLinear, RowsMayBeFarApart) {
  // A row stride whose multiples leave 32 bits.
  const int64_t stride = int64_t{1} << 29;
  const auto w = random_values(8, 64, 10, 0.1f);
  const auto encoded = quant::encode_matrix(w.data(), 8, 64, {WeightFormat::bf16});
  const auto x = random_values(3, 64, 11);
  // Only the rows' own pages of the reserved range are ever touched.
  Buffer sparse((2 * stride + 64) * 4);
  for (int64_t i = 0; i < 3; ++i) {
    std::memcpy(sparse.as<float>() + i * stride, x.data() + i * 64, 64 * 4);
  }
  const CpuLinear member;
  ThreadPool pool(1);
  Buffer blob(member.packed_bytes(encoded.view));
  member.pack(encoded.view, blob.data(), pool);
  const ActivationScheme input{ActivationFormat::f32};
  Buffer workspace(member.workspace_bytes(encoded.view, input, 3, 1));
  std::vector<float> y(24);
  member.run({.weight = &encoded.view,
              .blob = blob.data(),
              .input = input,
              .num_rows = 3,
              .x = sparse.as<float>(),
              .x_stride = stride,
              .y = y.data(),
              .y_stride = 8,
              .workspace = workspace.data(),
              .threads = &pool});
  EXPECT_EQ(y, run_member(member, encoded.view, input, x, 3, 1));
}

TEST(CpuIsaChoice, ForcedByNameOrRefused) {
  ASSERT_EQ(setenv("MOEKIT_CPU_ISA", "generic", 1), 0);
  EXPECT_EQ(chosen_cpu_isa(), CpuIsa::generic);
  ASSERT_EQ(setenv("MOEKIT_CPU_ISA", "sse9", 1), 0);
  EXPECT_THROW(chosen_cpu_isa(), Error);
  for (CpuIsa isa : {CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx}) {
    ASSERT_EQ(setenv("MOEKIT_CPU_ISA", to_string(isa), 1), 0);
    if (has_cpu_isa(isa)) {
      EXPECT_EQ(chosen_cpu_isa(), isa);
      continue;
    }
    try {
      chosen_cpu_isa();
      FAIL() << to_string(isa) << " is not here and was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::unsupported);
      EXPECT_NE(std::string(e.what()).find(to_string(isa)), std::string::npos);
    }
  }
  unsetenv("MOEKIT_CPU_ISA");
  EXPECT_EQ(chosen_cpu_isa(), best_cpu_isa());
}

}  // namespace
}  // namespace moekit::linear
