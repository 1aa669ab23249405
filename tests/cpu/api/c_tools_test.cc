// Routing and number formats through the C ABI.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "moekit/c_api.h"
#include "quant/stored_codec.h"
#include "quant/weight_codec.h"

namespace {

/// A contiguous tensor that owns shape and bytes.
struct Owned {
  Owned(moekit_dtype dtype, std::vector<int64_t> shape_) : shape(std::move(shape_)) {
    int64_t n = dtype.bits / 8;
    for (const int64_t s : shape) n *= s;
    bytes.resize(static_cast<size_t>(n));
    tensor = {bytes.data(), {1, 0}, static_cast<int32_t>(shape.size()), dtype, shape.data(),
              nullptr,      0};
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(bytes.data());
  }
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
  moekit_tensor tensor{};
};

constexpr moekit_dtype kF32{MOEKIT_DTYPE_FLOAT, 32, 1};
constexpr moekit_dtype kI32{MOEKIT_DTYPE_INT, 32, 1};
constexpr moekit_dtype kU8{MOEKIT_DTYPE_UINT, 8, 1};

moekit_config config_of(int64_t experts, int64_t top_k) {
  moekit_config config;
  EXPECT_EQ(moekit_config_init(&config, sizeof config), MOEKIT_OK);
  config.num_experts = experts;
  config.top_k = top_k;
  return config;
}

moekit_route_args route_args(const moekit_config& config, const Owned& logits, const Owned& ids,
                             const Owned& weights) {
  moekit_route_args args{};
  args.struct_size = sizeof args;
  args.num_threads = 1;
  args.config = &config;
  args.logits = &logits.tensor;
  args.out_topk_ids = &ids.tensor;
  args.out_topk_weights = &weights.tensor;
  return args;
}

TEST(CRoute, ChoosesAndWeighs) {
  moekit_config config = config_of(4, 2);
  config.renormalize = MOEKIT_RENORMALIZE_SUM;
  Owned logits(kF32, {2, 4}), ids(kI32, {2, 2}), weights(kF32, {2, 2});
  const float values[] = {0, std::log(3.0f), 0, -9, 5, 5, 5, 5};
  std::memcpy(logits.bytes.data(), values, sizeof values);
  const moekit_route_args args = route_args(config, logits, ids, weights);
  ASSERT_EQ(moekit_route(&args), MOEKIT_OK) << moekit_last_error();
  const int32_t expected[] = {1, 0, 0, 1};  // ties go to the lower id
  EXPECT_EQ(std::memcmp(ids.bytes.data(), expected, sizeof expected), 0);
  EXPECT_NEAR(weights.as<float>()[0], 0.75f, 1e-6f);
  EXPECT_NEAR(weights.as<float>()[1], 0.25f, 1e-6f);
  EXPECT_FLOAT_EQ(weights.as<float>()[2], 0.5f);
}

TEST(CRoute, SelectionBiasSelectsOnly) {
  moekit_config config = config_of(4, 1);
  config.scoring = MOEKIT_SCORING_SIGMOID;
  Owned logits(kF32, {1, 4}), ids(kI32, {1, 1}), weights(kF32, {1, 1}), bias(kF32, {4});
  bias.as<float>()[3] = 2.0f;
  moekit_route_args args = route_args(config, logits, ids, weights);
  args.selection_bias = &bias.tensor;
  ASSERT_EQ(moekit_route(&args), MOEKIT_OK) << moekit_last_error();
  EXPECT_EQ(ids.as<int32_t>()[0], 3);
  EXPECT_FLOAT_EQ(weights.as<float>()[0], 0.5f);
}

TEST(CRoute, RefusesWhatDoesNotFit) {
  moekit_config config = config_of(4, 5);
  Owned logits(kF32, {1, 4}), ids(kI32, {1, 5}), weights(kF32, {1, 5});
  moekit_route_args args = route_args(config, logits, ids, weights);
  EXPECT_EQ(moekit_route(&args), MOEKIT_INVALID_ARGUMENT);
  config.top_k = 2;
  EXPECT_EQ(moekit_route(&args), MOEKIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moekit_last_error()).find("out_topk_ids"), std::string::npos);
  args.logits = nullptr;
  EXPECT_EQ(moekit_route(&args), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_route(nullptr), MOEKIT_INVALID_ARGUMENT);
}

struct FormatCase {
  int32_t format;
  int32_t group;
  int32_t zero_points;
  int64_t code_cols;
  int64_t scale_rows, scale_cols;
  bool byte_scales;
};

class CQuantize : public ::testing::TestWithParam<FormatCase> {};

TEST_P(CQuantize, HoldsWhatTheCodecEncodes) {
  constexpr int64_t kRows = 130, kCols = 72;
  const FormatCase& format = GetParam();
  Owned weights(kF32, {kRows, kCols}), back(kF32, {kRows, kCols});
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    weights.as<float>()[i] = std::sin(0.37f * static_cast<float>(i)) * static_cast<float>(i % 7);
  }
  Owned codes(kU8, {kRows, format.code_cols});
  Owned scales(format.byte_scales ? kU8 : kF32, {format.scale_rows, format.scale_cols});
  Owned zeros(kU8, {format.scale_rows, format.scale_cols}), global(kF32, {1});
  moekit_quantize_args args{};
  args.struct_size = sizeof args;
  args.num_threads = 2;
  args.scheme = {format.format, format.group, format.zero_points};
  args.global_sense = MOEKIT_SCALE_DIVIDES;
  args.weights = &weights.tensor;
  args.codes = &codes.tensor;
  args.scales = &scales.tensor;
  if (format.zero_points) args.zeros = &zeros.tensor;
  if (format.format == MOEKIT_WEIGHT_NVFP4) args.global = &global.tensor;
  ASSERT_EQ(moekit_quantize(&args), MOEKIT_OK) << moekit_last_error();
  args.weights = &back.tensor;
  ASSERT_EQ(moekit_dequantize(&args), MOEKIT_OK) << moekit_last_error();

  const moekit::WeightScheme scheme{static_cast<moekit::WeightFormat>(format.format), format.group,
                                    format.zero_points != 0};
  const moekit::quant::EncodedMatrix expected = moekit::quant::encode_matrix(
      weights.as<float>(), kRows, kCols, scheme, {.global_sense = moekit::ScaleSense::divisor});
  std::vector<float> row(kCols);
  for (int64_t r = 0; r < kRows; ++r) {
    moekit::quant::decode_weights(expected.view, r, 0, kCols, row.data());
    ASSERT_EQ(std::memcmp(row.data(), back.as<float>() + r * kCols, kCols * sizeof(float)), 0)
        << "row " << r;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, CQuantize,
    ::testing::Values(FormatCase{MOEKIT_WEIGHT_FP8_TENSOR, 0, 0, 72, 1, 1, false},
                      FormatCase{MOEKIT_WEIGHT_FP8_CHANNEL, 0, 0, 72, 130, 1, false},
                      FormatCase{MOEKIT_WEIGHT_FP8_BLOCK, 0, 0, 72, 2, 1, false},
                      FormatCase{MOEKIT_WEIGHT_MXFP8, 0, 0, 72, 130, 3, true},
                      FormatCase{MOEKIT_WEIGHT_MXFP8_E5M2, 0, 0, 72, 130, 3, true},
                      FormatCase{MOEKIT_WEIGHT_MXFP4, 0, 0, 36, 130, 3, true},
                      FormatCase{MOEKIT_WEIGHT_NVFP4, 0, 0, 36, 130, 5, true},
                      FormatCase{MOEKIT_WEIGHT_INT4_GROUP, 32, 0, 36, 130, 3, false},
                      FormatCase{MOEKIT_WEIGHT_INT4_GROUP, 32, 1, 36, 130, 3, false},
                      FormatCase{MOEKIT_WEIGHT_INT8_GROUP, 32, 1, 72, 130, 3, false},
                      FormatCase{MOEKIT_WEIGHT_INT4_CHANNEL, 0, 0, 36, 130, 1, false},
                      FormatCase{MOEKIT_WEIGHT_INT8_CHANNEL, 0, 0, 72, 130, 1, false}));

TEST(CQuantizeErrors, NamesWhatIsMissing) {
  Owned weights(kF32, {4, 32}), codes(kU8, {4, 16}), scales(kU8, {4, 2});
  moekit_quantize_args args{};
  args.struct_size = sizeof args;
  args.scheme = {MOEKIT_WEIGHT_NVFP4, 0, 0};
  args.weights = &weights.tensor;
  args.codes = &codes.tensor;
  args.scales = &scales.tensor;
  EXPECT_EQ(moekit_quantize(&args), MOEKIT_INVALID_ARGUMENT);  // no global
  Owned global(kF32, {1});
  args.global = &global.tensor;
  EXPECT_EQ(moekit_quantize(&args), MOEKIT_OK) << moekit_last_error();
  weights.as<float>()[7] = std::nanf("");
  EXPECT_EQ(moekit_quantize(&args), MOEKIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moekit_last_error()).find("finite"), std::string::npos);
  args.scheme.format = 99;
  EXPECT_EQ(moekit_quantize(&args), MOEKIT_INVALID_ARGUMENT);
}

}  // namespace
