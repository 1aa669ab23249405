// Conversion between the structs of the C ABI and the C++ types, without a layer.
#include "api/c_convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace moekit {
namespace {

moekit_tensor tensor(void* data, uint8_t code, uint8_t bits, uint16_t lanes, int32_t ndim,
                     const int64_t* shape, const int64_t* strides = nullptr) {
  return {data, {1, 0}, ndim, {code, bits, lanes}, shape, strides, 0};
}

ErrorCode code_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_FALSE(std::string(e.what()).empty());
    return e.code();
  }
  return ErrorCode::ok;
}

TEST(CConvert, EveryDtypeHasItsDlpackCode) {
  struct Row {
    uint8_t code, bits;
    DType dtype;
  };
  const Row rows[] = {{MOEKIT_DTYPE_FLOAT, 64, DType::f64},
                      {MOEKIT_DTYPE_FLOAT, 32, DType::f32},
                      {MOEKIT_DTYPE_FLOAT, 16, DType::f16},
                      {MOEKIT_DTYPE_BFLOAT, 16, DType::bf16},
                      {MOEKIT_DTYPE_FLOAT8_E4M3FN, 8, DType::f8_e4m3},
                      {MOEKIT_DTYPE_FLOAT8_E5M2, 8, DType::f8_e5m2},
                      {MOEKIT_DTYPE_FLOAT8_E8M0FNU, 8, DType::f8_e8m0},
                      {MOEKIT_DTYPE_FLOAT4_E2M1FN, 4, DType::f4_e2m1},
                      {MOEKIT_DTYPE_INT, 64, DType::i64},
                      {MOEKIT_DTYPE_INT, 32, DType::i32},
                      {MOEKIT_DTYPE_INT, 16, DType::i16},
                      {MOEKIT_DTYPE_INT, 8, DType::i8},
                      {MOEKIT_DTYPE_UINT, 64, DType::u64},
                      {MOEKIT_DTYPE_UINT, 32, DType::u32},
                      {MOEKIT_DTYPE_UINT, 16, DType::u16},
                      {MOEKIT_DTYPE_UINT, 8, DType::u8},
                      {MOEKIT_DTYPE_BOOL, 8, DType::boolean}};
  double data[4] = {};
  const int64_t shape[2] = {2, 2};
  for (const Row& row : rows) {
    const moekit_tensor t = tensor(data, row.code, row.bits, 1, 2, shape);
    EXPECT_EQ(c::view_of(&t, "t").dtype, row.dtype);
  }
  // Float8 without a range rule, float6, complex, and widths that no type has.
  for (const auto& [code, bits] : std::vector<std::pair<int, int>>{
           {8, 8}, {9, 8}, {11, 8}, {13, 8}, {15, 6}, {16, 6}, {5, 64}, {0, 4}, {2, 8}, {17, 8}}) {
    const moekit_tensor t =
        tensor(data, static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1, 2, shape);
    EXPECT_EQ(code_of([&] { c::view_of(&t, "t"); }), ErrorCode::invalid_argument)
        << code << ' ' << bits;
  }
}

TEST(CConvert, StridesOffsetAndAbsence) {
  float data[64] = {};
  const int64_t shape[3] = {2, 3, 4}, strides[3] = {24, 8, 1};
  moekit_tensor t = tensor(data, MOEKIT_DTYPE_FLOAT, 32, 1, 3, shape);
  TensorView v = c::view_of(&t, "t");
  EXPECT_TRUE(v.is_contiguous());
  EXPECT_EQ(v.strides[0], 12);
  t.strides = strides;
  t.byte_offset = 16;
  v = c::view_of(&t, "t");
  EXPECT_EQ(v.data, data + 4);
  EXPECT_EQ(v.strides[0], 24);
  EXPECT_EQ(v.strides[1], 8);
  EXPECT_TRUE(c::view_of(nullptr, "t").empty());

  // No tokens is ordinary, with or without a pointer, and is no absent tensor.
  const int64_t none[2] = {0, 8};
  const moekit_tensor empty = tensor(nullptr, MOEKIT_DTYPE_FLOAT, 32, 1, 2, none);
  EXPECT_FALSE(c::view_of(&empty, "t").empty());
  EXPECT_EQ(c::view_of(&empty, "t").num_elements(), 0);
}

TEST(CConvert, PairsOfFloat4CountSingleCodes) {
  uint8_t data[64] = {};
  const int64_t shape[2] = {4, 8}, strides[2] = {16, 1};
  moekit_tensor t = tensor(data, MOEKIT_DTYPE_FLOAT4_E2M1FN, 4, 2, 2, shape);
  TensorView v = c::view_of(&t, "t");
  EXPECT_EQ(v.shape[1], 16);
  EXPECT_EQ(v.strides[0], 16);
  t.strides = strides;
  v = c::view_of(&t, "t");
  EXPECT_EQ(v.strides[0], 32);
  EXPECT_EQ(v.strides[1], 1);
  const int64_t apart[2] = {16, 2};
  t.strides = apart;
  EXPECT_EQ(code_of([&] { c::view_of(&t, "t"); }), ErrorCode::invalid_argument);
}

TEST(CConvert, MalformedTensorsAreRefused) {
  float data[4] = {};
  const int64_t shape[2] = {2, 2}, negative[2] = {2, -2};
  const int64_t huge[3] = {int64_t{1} << 32, int64_t{1} << 32, 2};
  const auto refused = [](const moekit_tensor& t) {
    return code_of([&] { c::view_of(&t, "hidden"); }) == ErrorCode::invalid_argument;
  };
  EXPECT_TRUE(refused(tensor(data, MOEKIT_DTYPE_FLOAT, 32, 1, 7, shape)));
  EXPECT_TRUE(refused(tensor(data, MOEKIT_DTYPE_FLOAT, 32, 1, -1, shape)));
  EXPECT_TRUE(refused(tensor(data, MOEKIT_DTYPE_FLOAT, 32, 1, 2, nullptr)));
  EXPECT_TRUE(refused(tensor(nullptr, MOEKIT_DTYPE_FLOAT, 32, 1, 2, shape)));
  EXPECT_TRUE(refused(tensor(data, MOEKIT_DTYPE_FLOAT, 32, 1, 2, negative)));
  EXPECT_TRUE(refused(tensor(data, MOEKIT_DTYPE_FLOAT, 32, 4, 2, shape)));
  EXPECT_TRUE(refused(tensor(data, MOEKIT_DTYPE_FLOAT, 32, 1, 3, huge)));
  moekit_tensor elsewhere = tensor(data, MOEKIT_DTYPE_FLOAT, 32, 1, 2, shape);
  elsewhere.device.device_type = 7;
  EXPECT_TRUE(refused(elsewhere));
}

TEST(CConvert, ConfigSurvivesTheRoundTrip) {
  MoeConfig a;
  a.num_experts = 64;
  a.top_k = 6;
  a.hidden = 2048;
  a.inter = 1408;
  a.latent = 512;
  a.activation = {ActivationKind::swiglu_oai, true, 7.0f, 1.702f, 0.5f};
  a.has_gate_up_bias = a.has_down_bias = a.weight_on_input = true;
  a.gate_up_weights = {WeightFormat::int4_group, 128, true};
  a.down_weights = {WeightFormat::nvfp4, 0, false};
  a.gate_up_input = {ActivationFormat::nvfp4, true, ScaleSense::divisor, false};
  a.down_input = {ActivationFormat::fp8_block, false, ScaleSense::multiplier, true};
  a.router = {Scoring::sigmoid,
              SelectOn::logits,
              RouterWeight::sigmoid_logit,
              Renormalize::p_norm,
              1e-20f,
              2.0f,
              2.5f,
              8,
              4,
              GroupScore::max,
              true,
              true,
              true};
  a.shared = {2816,
              true,
              {WeightFormat::fp8_channel, 0, false},
              {WeightFormat::f16, 0, false},
              {ActivationFormat::fp8_token, false, ScaleSense::multiplier, false},
              {ActivationFormat::f32, false, ScaleSense::multiplier, false}};
  const MoeConfig b = c::from_c(c::to_c(a));
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.top_k, b.top_k);
  EXPECT_EQ(a.hidden, b.hidden);
  EXPECT_EQ(a.inter, b.inter);
  EXPECT_EQ(a.latent, b.latent);
  EXPECT_EQ(a.activation, b.activation);
  EXPECT_EQ(a.has_gate_up_bias, b.has_gate_up_bias);
  EXPECT_EQ(a.has_down_bias, b.has_down_bias);
  EXPECT_EQ(a.weight_on_input, b.weight_on_input);
  EXPECT_EQ(a.gate_up_weights, b.gate_up_weights);
  EXPECT_EQ(a.down_weights, b.down_weights);
  EXPECT_EQ(a.gate_up_input, b.gate_up_input);
  EXPECT_EQ(a.down_input, b.down_input);
  EXPECT_EQ(a.router, b.router);
  EXPECT_EQ(a.shared, b.shared);
}

TEST(CConvert, DefaultsAreThoseOfTheCppApi) {
  moekit_plan_options c_options;
  ASSERT_EQ(moekit_plan_options_init(&c_options, sizeof c_options), MOEKIT_OK);
  const PlanOptions a = c::from_c(c_options), b;
  EXPECT_EQ(a.backend, b.backend);
  EXPECT_EQ(a.prepare, b.prepare);
  EXPECT_EQ(a.device, b.device);
  EXPECT_EQ(a.activations, b.activations);
  EXPECT_EQ(a.max_tokens, b.max_tokens);
  EXPECT_EQ(a.placement, b.placement);
  EXPECT_EQ(a.combine, b.combine);
  EXPECT_EQ(a.combine_dtype, b.combine_dtype);
  EXPECT_EQ(a.wire, b.wire);
  EXPECT_EQ(a.batch_invariant, b.batch_invariant);
  EXPECT_EQ(a.capacity, b.capacity);
  EXPECT_EQ(a.capacity_rows, b.capacity_rows);
  EXPECT_EQ(a.deadline, b.deadline);
  EXPECT_EQ(a.num_threads, b.num_threads);
  EXPECT_EQ(a.checked, b.checked);
  EXPECT_EQ(a.pack_cache, b.pack_cache);
  EXPECT_EQ(a.slots_per_rank, b.slots_per_rank);
  EXPECT_EQ(a.staging_slots, b.staging_slots);
  EXPECT_EQ(a.load_statistics, b.load_statistics);
  EXPECT_EQ(a.tp, b.tp);

  moekit_config c_config;
  ASSERT_EQ(moekit_config_init(&c_config, sizeof c_config), MOEKIT_OK);
  EXPECT_TRUE(std::isinf(c_config.activation_limit));
  EXPECT_EQ(c::from_c(c_config).router, RouterSpec{});
}

TEST(CConvert, EnumeratorsOutOfRangeAreRefused) {
  moekit_config config = c::default_config();
  config.scoring = 4;
  EXPECT_EQ(code_of([&] { c::from_c(config); }), ErrorCode::invalid_argument);
  config.scoring = -1;
  EXPECT_EQ(code_of([&] { c::from_c(config); }), ErrorCode::invalid_argument);
  moekit_plan_options options = c::default_plan_options();
  options.activations = 8;
  EXPECT_EQ(code_of([&] { c::from_c(options); }), ErrorCode::invalid_argument);
  options = c::default_plan_options();
  options.deadline_ns = 0;
  EXPECT_EQ(code_of([&] { c::from_c(options); }), ErrorCode::invalid_argument);
}

// An older caller's struct ends early; what it lacks keeps the default, and bytes behind it are not
// touched.
TEST(CConvert, ShorterStructsOfOlderCallersWork) {
  const uint32_t old_size = offsetof(moekit_plan_options, backend);
  struct {
    moekit_plan_options options;
  } box;
  std::memset(&box, 0xab, sizeof box);
  ASSERT_EQ(moekit_plan_options_init(&box.options, old_size), MOEKIT_OK);
  EXPECT_EQ(box.options.struct_size, old_size);
  for (size_t i = old_size; i < sizeof box; ++i) {
    ASSERT_EQ(reinterpret_cast<unsigned char*>(&box)[i], 0xab) << i;
  }
  box.options.max_tokens = 9;
  const moekit_plan_options read =
      c::read_struct(&box.options, c::default_plan_options(), "moekit_plan_options");
  EXPECT_EQ(read.max_tokens, 9);
  EXPECT_EQ(read.backend, nullptr);
  EXPECT_EQ(read.checked, 1);
  EXPECT_EQ(read.device.device_type, 1);
}

TEST(CConvert, LongerStructsOfNewerCallersWorkWhileTheNewPartIsZero) {
  struct Newer {
    moekit_plan_options options;
    int64_t unknown;
  } newer;
  ASSERT_EQ(moekit_plan_options_init(&newer.options, sizeof newer), MOEKIT_OK);
  EXPECT_EQ(newer.unknown, 0);
  EXPECT_EQ(c::read_struct(&newer.options, c::default_plan_options(), "o").struct_size,
            sizeof(moekit_plan_options));
  newer.unknown = 1;
  EXPECT_EQ(code_of([&] { c::read_struct(&newer.options, c::default_plan_options(), "o"); }),
            ErrorCode::unsupported);
}

TEST(CConvert, StructSizeMustBeSet) {
  moekit_plan_options options{};
  EXPECT_EQ(code_of([&] { c::read_struct(&options, c::default_plan_options(), "o"); }),
            ErrorCode::invalid_argument);
  options.struct_size = 0xdeadbeef;
  EXPECT_EQ(code_of([&] { c::read_struct(&options, c::default_plan_options(), "o"); }),
            ErrorCode::invalid_argument);
}

// The step of the arrays is the caller's size of a matrix.
TEST(CConvert, MatricesOfOlderCallersAreReadWithTheirStep) {
  float data[4] = {};
  const int64_t shape[2] = {2, 2};
  const moekit_tensor t = tensor(data, MOEKIT_DTYPE_FLOAT, 32, 1, 2, shape);
  struct OldMatrix {
    const moekit_tensor *codes, *scales;
  };
  const OldMatrix old[2] = {{&t, nullptr}, {&t, &t}};
  moekit_layer_tensors tensors{};
  tensors.struct_size = sizeof tensors;
  tensors.matrix_size = sizeof(OldMatrix);
  tensors.up = reinterpret_cast<const moekit_matrix*>(old);
  MoeConfig config;
  config.num_experts = 2;
  const LayerTensors read = c::from_c(tensors, config);
  ASSERT_EQ(read.up.size(), 2u);
  EXPECT_TRUE(read.up[0].scales.empty());
  EXPECT_EQ(read.up[1].scales.data, data);
  EXPECT_TRUE(read.up[1].bias.empty());
  EXPECT_TRUE(read.gate.empty());
}

}  // namespace
}  // namespace moekit
