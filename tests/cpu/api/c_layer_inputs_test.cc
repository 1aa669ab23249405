// What the C ABI refuses where a layer or a call contradicts itself: layer_inputs_test.cc from the
// outside, and what C alone has (reserved fields, ranks by number, byte offsets).
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "moekit/c_api.h"

namespace {

constexpr int64_t kExperts = 4, kHidden = 64, kInter = 32, kTopK = 2, kTokens = 3;

/// A small f32 layer in memory.
struct CLayer {
  std::vector<float> values = std::vector<float>(kExperts * 2 * kInter * kHidden, 0.1f);
  int64_t gate_up_shape[3] = {kExperts, 2 * kInter, kHidden};
  int64_t down_shape[3] = {kExperts, kHidden, kInter};
  moekit_tensor gate_up, down;
  moekit_matrix gate_up_matrix{}, down_matrix{};
  moekit_config config;
  moekit_plan_options options;
  moekit_layer_tensors tensors{};

  CLayer() {
    gate_up = down = {values.data(), {1, 0}, 3, {MOEKIT_DTYPE_FLOAT, 32, 1}, nullptr, nullptr, 0};
    gate_up.shape = gate_up_shape;
    down.shape = down_shape;
    gate_up_matrix.codes = &gate_up;
    down_matrix.codes = &down;
    EXPECT_EQ(moekit_config_init(&config, sizeof config), MOEKIT_OK);
    EXPECT_EQ(moekit_plan_options_init(&options, sizeof options), MOEKIT_OK);
    config.num_experts = kExperts;
    config.top_k = kTopK;
    config.hidden = kHidden;
    config.inter = kInter;
    config.gate_up_weights.format = config.down_weights.format = MOEKIT_WEIGHT_F32;
    config.gate_up_input.format = config.down_input.format = MOEKIT_INPUT_F32;
    options.max_tokens = kTokens;
    options.num_threads = 1;
    tensors.struct_size = sizeof tensors;
    tensors.matrix_size = sizeof(moekit_matrix);
    tensors.gate_up_stacked = &gate_up_matrix;
    tensors.down_stacked = &down_matrix;
  }
  CLayer(const CLayer&) = delete;
  CLayer& operator=(const CLayer&) = delete;

  moekit_status make(moekit_layer** out = nullptr) const {
    moekit_layer* layer = nullptr;
    const moekit_status status = moekit_layer_create(&config, &tensors, &options, &layer);
    if (out != nullptr) {
      *out = layer;
    } else {
      moekit_layer_free(layer);
    }
    return status;
  }
};

TEST(CLayerInputs, LayersThatContradictThemselvesAreRefused) {
  EXPECT_EQ(CLayer().make(), MOEKIT_OK) << moekit_last_error();
  const auto refused = [](const std::function<void(CLayer&)>& change, const char* word,
                          moekit_status status = MOEKIT_INVALID_ARGUMENT) {
    CLayer c;
    change(c);
    EXPECT_EQ(c.make(), status) << word;
    EXPECT_NE(std::string(moekit_last_error()).find(word), std::string::npos)
        << word << ": " << moekit_last_error();
  };
  refused([](CLayer& c) { c.config.has_gate_up_bias = 1; }, "has_gate_up_bias");
  refused([](CLayer& c) { c.config.has_selection_bias = 1; }, "has_selection_bias");
  refused([](CLayer& c) { c.config.hash_routing = 1; }, "hash_routing");
  refused(
      [](CLayer& c) {
        c.config.gate_up_input = {MOEKIT_INPUT_NVFP4, 1, 0, 0};
      },
      "gate_up_input.static_scale");
  refused([](CLayer& c) { c.config.gate_up_input.format = MOEKIT_INPUT_FP8_TENSOR; },
          "static input scale", MOEKIT_UNSUPPORTED);
  refused([](CLayer& c) { c.config.activation_limit = NAN; }, "limit");
  refused([](CLayer& c) { c.config.reserved = 1; }, "moekit_config.reserved");
  refused([](CLayer& c) { c.tensors.reserved = -1; }, "moekit_layer_tensors.reserved");
  refused([](CLayer& c) { c.options.rank = 3; }, "group is NULL");
  refused([](CLayer& c) { c.options.device.device_id = 5; }, "index 5");
  refused([](CLayer& c) { c.options.capacity_rows = -4; }, "capacity_rows");
  const int64_t far[3] = {int64_t{1} << 61, kHidden, 1};
  refused([&](CLayer& c) { c.gate_up.strides = far; }, "gate_up_stacked[0].codes: stride");
  refused([](CLayer& c) { c.down.byte_offset = UINT64_MAX; }, "down_stacked[0].codes: byte_offset");
}

TEST(CLayerInputs, CallsAreChecked) {
  const CLayer c;
  moekit_layer* layer = nullptr;
  ASSERT_EQ(c.make(&layer), MOEKIT_OK) << moekit_last_error();
  std::vector<float> in(kTokens * kHidden, 0.5f), out(in.size()), share(kTokens * kTopK, 0.5f);
  std::vector<int32_t> chosen = {0, 1, 2, 3, 0, 2};
  const int64_t rows[2] = {kTokens, kHidden}, slots[2] = {kTokens, kTopK};
  const auto tensor = [](void* data, uint8_t code, const int64_t* shape) {
    return moekit_tensor{data, {1, 0}, 2, {code, 32, 1}, shape, nullptr, 0};
  };
  moekit_tensor x = tensor(in.data(), MOEKIT_DTYPE_FLOAT, rows);
  moekit_tensor y = tensor(out.data(), MOEKIT_DTYPE_FLOAT, rows);
  const moekit_tensor ids = tensor(chosen.data(), MOEKIT_DTYPE_INT, slots);
  const moekit_tensor weights = tensor(share.data(), MOEKIT_DTYPE_FLOAT, slots);
  moekit_run_args args{};
  args.struct_size = sizeof args;
  args.hidden = &x;
  args.output = &y;
  args.topk_ids = &ids;
  args.topk_weights = &weights;
  EXPECT_EQ(moekit_layer_run(layer, &args), MOEKIT_OK) << moekit_last_error();
  const int64_t far[2] = {int64_t{1} << 61, 1}, same[2] = {0, 1};
  x.strides = far;
  EXPECT_EQ(moekit_layer_run(layer, &args), MOEKIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moekit_last_error()).find("hidden: stride"), std::string::npos);
  x.strides = nullptr;
  y.strides = same;
  EXPECT_EQ(moekit_layer_run(layer, &args), MOEKIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moekit_last_error()).find("share memory"), std::string::npos);
  y.strides = nullptr;
  args.reserved = 1;
  EXPECT_EQ(moekit_layer_run(layer, &args), MOEKIT_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moekit_last_error()).find("moekit_run_args.reserved"), std::string::npos);
  moekit_layer_free(layer);
}

}  // namespace
