// Encoded weights decode to what each format's rule says; the chains of single rows are those of
// the row codec, which is tested by value on its own.
#include "quant/weight_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "moekit/error.h"
#include "quant/row_codec.h"
#include "quant/stored_codec.h"
#include "support/reference_floats.h"
#include "tensor/float_formats.h"
#include "tensor/rng.h"

namespace moekit::quant {
namespace {

using F = WeightFormat;

std::vector<float> random_matrix(int64_t rows, int64_t cols, uint64_t seed) {
  const Rng rng(seed, 1);
  std::vector<float> w(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const auto i = static_cast<size_t>(r * cols + c);
      w[i] = rng.normal(i) * std::ldexp(0.01f, static_cast<int>((r * 3 + c / 16) % 5));
    }
  }
  return w;
}

std::vector<float> decoded(const StoredMatrix& m) {
  std::vector<float> w(static_cast<size_t>(m.rows * m.cols));
  for (int64_t r = 0; r < m.rows; ++r) decode_weights(m, r, 0, m.cols, w.data() + r * m.cols);
  return w;
}

float largest(const std::vector<float>& w) {
  float amax = 0;
  for (float x : w) amax = std::max(amax, std::fabs(x));
  return amax;
}

std::vector<WeightScheme> quantized_schemes() {
  return {{F::fp8_tensor},
          {F::fp8_channel},
          {F::fp8_block},
          {F::mxfp8},
          {F::mxfp8_e5m2},
          {F::mxfp4},
          {F::nvfp4},
          {F::int4_group, 32},
          {F::int4_group, 128, true},
          {F::int8_group, 64},
          {F::int8_group, 48, true},
          {F::int4_channel},
          {F::int4_channel, 0, true},
          {F::int8_channel},
          {F::int8_channel, 0, true}};
}

constexpr int64_t kSizes[][2] = {{1, 1}, {3, 17}, {130, 200}, {128, 128}, {257, 45}, {64, 160}};

TEST(WeightCodec, PlainFloats) {
  const std::vector<float> w = random_matrix(9, 33, 4);
  for (F format : {F::f32, F::bf16, F::f16}) {
    const std::vector<float> got = decoded(encode_matrix(w.data(), 9, 33, {format}).view);
    for (size_t i = 0; i < w.size(); ++i) {
      const float want = format == F::f32    ? w[i]
                         : format == F::bf16 ? bf16_to_f32(f32_to_bf16(w[i]))
                                             : f16_to_f32(f32_to_f16(w[i]));
      ASSERT_EQ(got[i], want);
    }
  }
}

TEST(WeightCodec, RowFormatsFollowTheRowCodec) {
  for (const auto& [rows, cols] : kSizes) {
    const std::vector<float> w = random_matrix(rows, cols, 5);
    const float global = largest(w) / 2688.0f;
    const struct {
      F format;
      ActivationScheme row;
      float scale;
      ScaleSense sense;
    } pairs[] = {
        {F::fp8_channel, {ActivationFormat::fp8_token}, 1, ScaleSense::multiplier},
        {F::fp8_tensor,
         {ActivationFormat::fp8_tensor, true},
         largest(w) / 448,
         ScaleSense::multiplier},
        {F::mxfp8, {ActivationFormat::mxfp8}, 1, ScaleSense::multiplier},
        {F::mxfp4, {ActivationFormat::mxfp4}, 1, ScaleSense::multiplier},
        {F::nvfp4, {ActivationFormat::nvfp4, true}, global, ScaleSense::multiplier},
    };
    for (const auto& pair : pairs) {
      const EncodedMatrix m = encode_matrix(w.data(), rows, cols, {pair.format});
      std::vector<float> want = w;
      for (int64_t r = 0; r < rows; ++r) {
        round_trip_row(pair.row, pair.scale, want.data() + r * cols, cols);
      }
      EXPECT_EQ(decoded(m.view), want) << to_string(pair.format) << " " << rows << "x" << cols;
    }
  }
}

TEST(WeightCodec, Fp8BlocksWithPartialEdges) {
  for (const auto& [rows, cols] : kSizes) {
    const std::vector<float> w = random_matrix(rows, cols, 6);
    const EncodedMatrix m = encode_matrix(w.data(), rows, cols, {F::fp8_block});
    const std::vector<float> got = decoded(m.view);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        float amax = 0;
        for (int64_t i = r / 128 * 128; i < std::min(rows, r / 128 * 128 + 128); ++i) {
          for (int64_t j = c / 128 * 128; j < std::min(cols, c / 128 * 128 + 128); ++j) {
            amax = std::max(amax, std::fabs(w[static_cast<size_t>(i * cols + j)]));
          }
          if (rows > 64 && r % 50 != 0) break;  // full search for some rows only
        }
        if (rows > 64 && r % 50 != 0) continue;
        const float scale = amax / 448.0f;
        const auto i = static_cast<size_t>(r * cols + c);
        ASSERT_EQ(scale_at(m.view, r, c), scale);
        ASSERT_EQ(got[i], static_cast<float>(test::nearest_e4m3(w[i] / scale)) * scale);
      }
    }
  }
}

TEST(WeightCodec, E5m2Elements) {
  const std::vector<float> w = random_matrix(4, 96, 7);
  const EncodedMatrix m = encode_matrix(w.data(), 4, 96, {F::mxfp8_e5m2});
  const std::vector<float> got = decoded(m.view);
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t g = 0; g < 3; ++g) {
      const float* block = w.data() + r * 96 + g * 32;
      double amax = 0;
      for (int i = 0; i < 32; ++i) amax = std::max(amax, double{std::fabs(block[i])});
      const int e = std::ilogb(amax) + (amax >= std::ldexp(1.75, std::ilogb(amax)) ? 1 : 0) - 15;
      EXPECT_EQ(scale_at(m.view, r, g * 32), std::ldexp(1.0f, e));
      for (int i = 0; i < 32; ++i) {
        EXPECT_EQ(got[static_cast<size_t>(r * 96 + g * 32 + i)],
                  std::ldexp(test::nearest_e5m2(std::ldexp(double{block[i]}, -e)), e));
      }
    }
  }
}

TEST(WeightCodec, IntegersRoundToTheNearestLevel) {
  for (const auto& [rows, cols] : kSizes) {
    const std::vector<float> w = random_matrix(rows, cols, 8);
    for (const WeightScheme& scheme : quantized_schemes()) {
      const bool four = scheme.format == F::int4_group || scheme.format == F::int4_channel;
      if (!four && scheme.format != F::int8_group && scheme.format != F::int8_channel) continue;
      for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        const EncodedMatrix m =
            encode_matrix(w.data(), rows, cols, scheme, {dtype, ScaleSense::multiplier});
        const std::vector<float> got = decoded(m.view);
        const int levels = four ? 15 : 255;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            const auto i = static_cast<size_t>(r * cols + c);
            const float s = scale_at(m.view, r, c);
            const int zero = scheme.zero_points ? zero_at(m.view, r, c) : (levels + 1) / 2;
            const int code = static_cast<int>(code_at(m.view, r, c));
            const double exact =
                std::clamp(std::nearbyint(double{w[i] / s}) + zero, 0.0, double(levels));
            ASSERT_EQ(code, exact);
            ASSERT_EQ(got[i], static_cast<float>(code - zero) * s);
            // Half a step, plus what the rounded scale and zero point clip at the ends: half a step
            // and levels / 2 rounding errors of the scale.
            const double slack = dtype == DType::f32 ? 1e-5 : levels * 0x1p-9;
            ASSERT_LE(std::fabs(got[i] - w[i]), s * (0.5 + (scheme.zero_points ? 0.5 : 0) + slack));
          }
        }
      }
    }
  }
}

TEST(WeightCodec, Nvfp4BothSensesHoldTheSameWeights) {
  std::vector<float> w = random_matrix(7, 48, 9);
  w[3] = 2688.0f * 0x1p-12f;  // amax: the global is a power of two, so its reciprocal is exact
  for (float& x : w) x = std::clamp(x, -w[3], w[3]);
  const EncodedMatrix a = encode_matrix(w.data(), 7, 48, {F::nvfp4});
  const EncodedMatrix b =
      encode_matrix(w.data(), 7, 48, {F::nvfp4}, {DType::f32, ScaleSense::divisor});
  EXPECT_EQ(a.view.global, 0x1p-12f);
  EXPECT_EQ(b.view.global, 4096.0f);
  EXPECT_EQ(decoded(a.view), decoded(b.view));
}

// Field bug F25: no NaN scale byte, exact zeros, and neighbours as without the zero block.
TEST(WeightCodec, ZeroBlocksAndZeroMatrices) {
  for (const WeightScheme& scheme : quantized_schemes()) {
    for (ScaleSense sense : {ScaleSense::multiplier, ScaleSense::divisor}) {
      std::vector<float> w = random_matrix(3, 256, 10);
      for (float& x : w) x *= 6e-3f;
      w[0] = 2 * largest(w);  // the matrix's amax stays
      const std::vector<float> before =
          decoded(encode_matrix(w.data(), 3, 256, scheme, {DType::f32, sense}).view);
      std::fill(w.begin() + 256, w.begin() + 256 + 128, 0.0f);
      const EncodedMatrix m = encode_matrix(w.data(), 3, 256, scheme, {DType::f32, sense});
      const std::vector<float> got = decoded(m.view);
      for (size_t i = 0; i < got.size(); ++i) {
        if (i >= 256 && i < 256 + 128) {
          ASSERT_EQ(got[i], 0.0f) << to_string(scheme.format);
        } else if (i / 256 != 1 ? scheme.format != F::fp8_block : scheme.format == F::nvfp4) {
          // Other rows, and blocks of the same row where those have scales of their own.
          ASSERT_EQ(got[i], before[i]) << to_string(scheme.format);
        }
      }
      for (int64_t r = 0; r < 3; ++r) {
        for (int64_t c = 0; c < 256; ++c) ASSERT_TRUE(std::isfinite(scale_at(m.view, r, c)));
      }
      const std::vector<float> zeros(3 * 45, 0.0f);
      for (float x :
           decoded(encode_matrix(zeros.data(), 3, 45, scheme, {DType::f32, sense}).view)) {
        ASSERT_EQ(x, 0.0f) << to_string(scheme.format);
      }
    }
  }
}

TEST(WeightCodec, ScaleTypes) {
  const std::vector<float> w = random_matrix(130, 200, 11);
  for (F format : {F::fp8_tensor, F::fp8_channel, F::fp8_block}) {
    for (DType dtype : {DType::bf16, DType::f16, DType::f8_e8m0}) {
      const EncodedMatrix m = encode_matrix(w.data(), 130, 200, {format}, {dtype});
      const std::vector<float> got = decoded(m.view);
      for (int64_t r = 0; r < 130; ++r) {
        for (int64_t c = 0; c < 200; ++c) {
          const auto i = static_cast<size_t>(r * 200 + c);
          const float s = scale_at(m.view, r, c);
          ASSERT_EQ(got[i], static_cast<float>(test::nearest_e4m3(w[i] / s)) * s);
          if (dtype == DType::f8_e8m0) {
            ASSERT_EQ(s, std::ldexp(1.0f, std::ilogb(s)));
          }
        }
      }
    }
  }
}

TEST(WeightCodec, ThreadsDoNotChangeBits) {
  const std::vector<float> w = random_matrix(300, 70, 12);
  ThreadPool threads(3);
  for (const WeightScheme& scheme : quantized_schemes()) {
    const EncodedMatrix a = encode_matrix(w.data(), 300, 70, scheme);
    const EncodedMatrix b = encode_matrix(w.data(), 300, 70, scheme, {}, &threads);
    EXPECT_EQ(a.view.global, b.view.global);
    EXPECT_EQ(
        std::memcmp(a.storage.data(), b.storage.data(), static_cast<size_t>(a.storage.size())), 0)
        << to_string(scheme.format);
  }
}

TEST(WeightCodec, RefusesWhatItCannotEncode) {
  const std::vector<float> w(64, 1.0f);
  EXPECT_THROW(encode_matrix(w.data(), 2, 32, {F::int4_group, 0}), Error);
  EXPECT_THROW(encode_matrix(w.data(), 0, 32, {F::bf16}), Error);
  EXPECT_THROW(encode_matrix(w.data(), 2, 32, {F::fp8_block, 0, true}), Error);
  EXPECT_THROW(encode_matrix(w.data(), 2, 32, {F::int8_channel}, {DType::f8_e8m0}), Error);
  EXPECT_THROW(encode_matrix(w.data(), 2, 32, {F::fp8_block}, {DType::i32}), Error);
  std::vector<float> bad = w;
  bad[40] = std::numeric_limits<float>::quiet_NaN();
  try {
    encode_matrix(bad.data(), 2, 32, {F::nvfp4});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(e.what()).find("row 1, column 8"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace moekit::quant
