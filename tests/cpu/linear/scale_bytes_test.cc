// Scale bytes at the ends of their range, and NaN, through packing and a product.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/linear/run_member.h"
#include "linear/cpu_linear.h"

namespace moekit::linear {
namespace {

using testing::run_member;

constexpr ActivationScheme kInput{ActivationFormat::f32};

/// FP4 weights of 1.0, two codes a byte, with a scale byte for each row and group.
struct Fp4Matrix {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  int64_t groups;
  StoredMatrix m;

  Fp4Matrix(WeightFormat format, int64_t rows, int64_t num_groups, uint8_t scale)
      : groups(num_groups) {
    const bool is_mx = format == WeightFormat::mxfp4;
    const int64_t group = is_mx ? 32 : 16;
    m.rows = rows;
    m.cols = groups * group;
    m.scheme.format = format;
    codes.assign(static_cast<size_t>(rows * m.cols / 2), 0x22);
    scales.assign(static_cast<size_t>(rows * groups), scale);
    m.codes = {.data = reinterpret_cast<const std::byte*>(codes.data()),
               .unit = DType::u8,
               .pack_axis = PackAxis::cols,
               .pack = 2,
               .row_stride = m.cols / 2,
               .col_stride = 1};
    m.scales = {.values = {.data = reinterpret_cast<const std::byte*>(scales.data()),
                           .unit = is_mx ? DType::f8_e8m0 : DType::f8_e4m3,
                           .row_stride = groups,
                           .col_stride = 1},
                .row_group = 1,
                .col_group = group};
  }
  uint8_t& scale(int64_t row, int64_t group) {
    return scales[static_cast<size_t>(row * groups + group)];
  }
};

TEST(ScaleBytes, EndsOfTheRange) {
  // e8m0 0 is 2^-127; 255 is NaN and poisons its column alone.
  Fp4Matrix weights(WeightFormat::mxfp4, 32, 1, 127);
  weights.scale(3, 0) = 0;
  weights.scale(5, 0) = 255;
  weights.scale(7, 0) = 254;
  std::vector<float> x(32, 0.0f);
  x[0] = 1.0f;
  for (CpuIsa isa : available_cpu_isas()) {
    const std::vector<float> y = run_member(CpuLinear(isa), weights.m, kInput, x, 1, 1, 0.0f);
    EXPECT_EQ(y[0], 1.0f);
    EXPECT_EQ(y[3], 0x1p-127f);
    EXPECT_TRUE(std::isnan(y[5]));
    EXPECT_EQ(y[7], 0x1p127f);
  }
}

/// Places that packing looks at in vectors, beside them, and in the rows of a panel that is not
/// full.
TEST(ScaleBytes, NanPoisonsItsColumnAlone) {
  struct Place {
    int64_t row, group;
  };
  constexpr Place kNans[] = {{3, 2}, {31, 15}, {20, 17}, {36, 4}};
  for (const WeightFormat format : {WeightFormat::mxfp4, WeightFormat::nvfp4}) {
    const bool is_mx = format == WeightFormat::mxfp4;
    Fp4Matrix weights(format, 40, 18, is_mx ? 127 : 0x38);
    for (const Place& at : kNans) weights.scale(at.row, at.group) = 0xff;
    if (!is_mx) weights.scale(kNans[0].row, kNans[0].group) = 0x7f;
    const std::vector<float> x(static_cast<size_t>(weights.m.cols), 1.0f);
    for (CpuIsa isa : available_cpu_isas()) {
      const std::vector<float> y = run_member(CpuLinear(isa), weights.m, kInput, x, 1, 1, 0.0f);
      for (int64_t row = 0; row < weights.m.rows; ++row) {
        const bool poisoned = std::any_of(std::begin(kNans), std::end(kNans),
                                          [&](const Place& at) { return at.row == row; });
        SCOPED_TRACE(fmt::format("{} {} row {}", to_string(format), to_string(isa), row));
        const float got = y[static_cast<size_t>(row)];
        if (poisoned) {
          EXPECT_TRUE(std::isnan(got)) << got;
        } else {
          EXPECT_EQ(got, static_cast<float>(weights.m.cols));
        }
      }
    }
  }
}

}  // namespace
}  // namespace moekit::linear
