// The call of a layer in apache-tvm-ffi's calling convention, without tvm-ffi: what it takes, and
// what it says to the rest.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "moekit/c_api.h"

extern "C" int __tvm_ffi_moekit_layer_run(void* self, const void* args, int32_t num_args,
                                          void* result);

namespace {

/// TVMFFIAny.
struct Any {
  int32_t type;
  uint32_t padding;
  const void* value;
};
constexpr int32_t kNone = 0, kInteger = 1, kFloat = 3, kTensorPointer = 7, kTensorObject = 70;
constexpr int64_t kTokens = 3;

class TvmFfi : public ::testing::Test {
 protected:
  void SetUp() override {
    moekit_plan_options options;
    ASSERT_EQ(moekit_plan_options_init(&options, sizeof options), MOEKIT_OK);
    options.max_tokens = kTokens;
    options.num_threads = 1;
    const std::string model = std::string(MOEKIT_FIXTURES) + "/qwen3moe-bf16-sharded";
    ASSERT_EQ(moekit_layer_open(model.c_str(), -1, &options, &layer_), MOEKIT_OK)
        << moekit_last_error();
    moekit_config config;
    config.struct_size = sizeof config;
    ASSERT_EQ(moekit_layer_config(layer_, &config), MOEKIT_OK);
    shape_[0] = kTokens;
    shape_[1] = config.hidden;
    for (int64_t i = 0; i < kTokens * config.hidden; ++i) {
      x_.push_back(std::sin(0.37f * static_cast<float>(i)));
    }
    y_.assign(x_.size(), 0.0f);
    hidden_ = tensor(x_);
    output_ = tensor(y_);
  }
  void TearDown() override { moekit_layer_free(layer_); }

  moekit_tensor tensor(std::vector<float>& data) {
    return {data.data(), {1, 0}, 2, {MOEKIT_DTYPE_FLOAT, 32, 1}, shape_, nullptr, 0};
  }
  std::vector<Any> arguments() const {
    return {{kInteger, 0, layer_},
            {kTensorPointer, 0, &hidden_},
            {kNone, 0, nullptr},
            {kNone, 0, nullptr},
            {kTensorPointer, 0, &output_}};
  }
  /// The status that comes back as an integer.
  static int64_t call(const std::vector<Any>& args) {
    Any result{-1, 9, nullptr};
    EXPECT_EQ(__tvm_ffi_moekit_layer_run(nullptr, args.data(), static_cast<int32_t>(args.size()),
                                         &result),
              0);
    EXPECT_EQ(result.type, kInteger);
    EXPECT_EQ(result.padding, 0u);
    return reinterpret_cast<intptr_t>(result.value);
  }

  moekit_layer* layer_ = nullptr;
  int64_t shape_[2] = {};
  std::vector<float> x_, y_;
  moekit_tensor hidden_{}, output_{};
};

TEST_F(TvmFfi, ComputesWhatTheCAbiComputes) {
  std::vector<float> wanted(y_.size());
  const moekit_tensor into = tensor(wanted);
  moekit_run_args args{};
  args.struct_size = sizeof args;
  args.hidden = &hidden_;
  args.output = &into;
  ASSERT_EQ(moekit_layer_run(layer_, &args), MOEKIT_OK) << moekit_last_error();

  EXPECT_EQ(call(arguments()), MOEKIT_OK) << moekit_last_error();
  EXPECT_EQ(y_, wanted);

  // As an object: its DLTensor lies behind a head of 24 bytes.
  alignas(8) std::byte object[24 + sizeof(moekit_tensor)] = {};
  std::memcpy(object + 24, &hidden_, sizeof hidden_);
  y_.assign(y_.size(), 0.0f);
  std::vector<Any> given = arguments();
  given[1] = {kTensorObject, 0, object};
  EXPECT_EQ(call(given), MOEKIT_OK) << moekit_last_error();
  EXPECT_EQ(y_, wanted);
}

TEST_F(TvmFfi, SaysWhatDoesNotFit) {
  const auto expect = [&](size_t at, Any value, moekit_status status, const char* words) {
    std::vector<Any> given = arguments();
    given[at] = value;
    EXPECT_EQ(call(given), status) << words;
    EXPECT_NE(std::string(moekit_last_error()).find(words), std::string::npos)
        << moekit_last_error();
  };
  expect(0, {kFloat, 0, nullptr}, MOEKIT_INVALID_ARGUMENT, "address of a moekit_layer");
  expect(0, {kInteger, 0, nullptr}, MOEKIT_INVALID_ARGUMENT, "layer is NULL");
  expect(1, {kFloat, 0, nullptr}, MOEKIT_INVALID_ARGUMENT, "hidden: expected a tensor or None");
  expect(1, {kNone, 0, nullptr}, MOEKIT_INVALID_ARGUMENT, "hidden");
  expect(2, {kTensorPointer, 0, &hidden_}, MOEKIT_INVALID_ARGUMENT, "topk");
  EXPECT_EQ(call({}), MOEKIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moekit_last_error()).find("5 arguments"), std::string::npos);

  moekit_tensor complex = hidden_;
  complex.dtype = {5, 64, 1};  // kDLComplex
  expect(1, {kTensorPointer, 0, &complex}, MOEKIT_INVALID_ARGUMENT, "none that moekit knows");
  // Without tvm-ffi in the process there is no current stream.
  moekit_tensor on_gpu = hidden_;
  on_gpu.device = {2, 0};
  expect(1, {kTensorPointer, 0, &on_gpu}, MOEKIT_UNSUPPORTED, "TVMFFIEnvGetStream");
  EXPECT_EQ(call(arguments()), MOEKIT_OK) << moekit_last_error();
}

}  // namespace
