// What a layer and its calls are made from, where it contradicts itself: tensors against the
// config, options, strides, layers that were moved from.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "moekit/layer.h"
#include "support/error_code.h"

namespace moekit::test {
namespace {

constexpr int64_t kExperts = 4, kHidden = 64, kInter = 32, kTopK = 2, kTokens = 3;

/// A small f32 layer whose parts all are there, announced or not.
struct Parts {
  MoeConfig config;
  LayerTensors tensors;
  PlanOptions options;
  std::vector<float> values = std::vector<float>(kExperts * 2 * kInter * kHidden);
  float scale = 0.5f;

  Parts() {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = 0.2f * std::sin(1.7f * static_cast<float>(i));
    config.num_experts = kExperts;
    config.top_k = kTopK;
    config.hidden = kHidden;
    config.inter = kInter;
    config.gate_up_weights = config.down_weights = {WeightFormat::f32};
    config.gate_up_input = config.down_input = {ActivationFormat::f32};
    config.shared.gate_up_weights = config.shared.down_weights = {WeightFormat::f32};
    config.shared.gate_up_input = config.shared.down_input = {ActivationFormat::f32};
    tensors.gate_up_stacked.codes = view({kExperts, 2 * kInter, kHidden});
    tensors.down_stacked.codes = view({kExperts, kHidden, kInter});
    options.max_tokens = kTokens;
    options.num_threads = 1;
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  TensorView view(std::initializer_list<int64_t> shape) const {
    return TensorView::contiguous(values.data(), DType::f32, shape);
  }
  MatrixTensors matrix(std::initializer_list<int64_t> shape) const {
    MatrixTensors m;
    m.codes = view(shape);
    return m;
  }
  TensorView one() { return TensorView::contiguous(&scale, DType::f32, {1}); }
  void per_expert() {
    tensors.gate_up_stacked = tensors.down_stacked = {};
    for (int64_t e = 0; e < kExperts; ++e) {
      tensors.gate.push_back(matrix({kInter, kHidden}));
      tensors.up.push_back(matrix({kInter, kHidden}));
      tensors.down.push_back(matrix({kHidden, kInter}));
    }
  }
  void with_router() { tensors.router_weight = view({kExperts, kHidden}); }
  void with_shared() {
    config.shared.inter = kInter;
    tensors.shared_gate_proj.codes = tensors.shared_up_proj.codes = view({kInter, kHidden});
    tensors.shared_down_proj.codes = view({kHidden, kInter});
  }
  Layer make() const { return Layer::create(config, tensors, options); }
};

/// Changes the parts of a good layer.
using Change = std::function<void(Parts&)>;

struct Case {
  const char* name;
  Change change;
  std::vector<const char*> words;  ///< of the message
  ErrorCode code = ErrorCode::invalid_argument;
};

void expect_refused(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    Parts parts;
    c.change(parts);
    std::string text;
    EXPECT_EQ(code_of([&] { parts.make(); }, &text), c.code) << c.name << ": " << text;
    for (const char* word : c.words) {
      EXPECT_NE(text.find(word), std::string::npos)
          << c.name << " lacks '" << word << "': " << text;
    }
  }
}

void expect_taken(const std::vector<std::pair<const char*, Change>>& cases) {
  for (const auto& [name, change] : cases) {
    Parts parts;
    change(parts);
    std::string text;
    EXPECT_EQ(code_of([&] { parts.make(); }, &text), ErrorCode::ok) << name << ": " << text;
  }
}

TEST(LayerInputs, AnnouncedTensorsMustBeThere) {
  expect_refused({
      {"gate_up bias",
       [](Parts& p) { p.config.has_gate_up_bias = true; },
       {"gate_up_stacked.bias is missing", "has_gate_up_bias"}},
      {"down bias",
       [](Parts& p) { p.config.has_down_bias = true; },
       {"down_stacked.bias is missing", "has_down_bias"}},
      {"bias of one expert",
       [](Parts& p) {
         p.per_expert();
         p.config.has_gate_up_bias = true;
         for (auto* matrices : {&p.tensors.gate, &p.tensors.up}) {
           for (MatrixTensors& m : *matrices) m.bias = p.view({kInter});
         }
         p.tensors.up[2].bias = {};
       },
       {"up[2].bias is missing", "has_gate_up_bias"}},
      {"logit bias",
       [](Parts& p) {
         p.with_router();
         p.config.router.has_logit_bias = true;
       },
       {"router_bias is missing", "has_logit_bias"}},
      {"selection bias",
       [](Parts& p) {
         p.with_router();
         p.config.router.has_selection_bias = true;
       },
       {"selection_bias is missing", "has_selection_bias"}},
      {"selection bias without a router",
       [](Parts& p) { p.config.router.has_selection_bias = true; },
       {"selection_bias is missing", "has_selection_bias"}},
      {"hash table",
       [](Parts& p) {
         p.with_router();
         p.config.router.hash_routing = true;
       },
       {"table", "hash_routing"}},
      {"static fp8 scale",
       [](Parts& p) {
         p.config.gate_up_input = {ActivationFormat::fp8_tensor, true};
       },
       {"gate_up_stacked.input_scale is missing", "gate_up_input.static_scale"}},
      {"static nvfp4 scale",
       [](Parts& p) {
         p.config.down_input = {ActivationFormat::nvfp4, true};
       },
       {"down_stacked.input_scale is missing", "down_input.static_scale"}},
      {"static scale of the shared experts",
       [](Parts& p) {
         p.with_shared();
         p.config.shared.down_input = {ActivationFormat::fp8_tensor, true};
       },
       {"shared_down_proj.input_scale is missing", "shared_down_input.static_scale"}},
      {"shared experts",
       [](Parts& p) { p.config.shared.inter = kInter; },
       {"shared_gate_proj is missing", "shared_inter"}},
      {"shared gate",
       [](Parts& p) {
         p.with_shared();
         p.config.shared.sigmoid_gate = true;
       },
       {"shared_gate is missing", "shared_sigmoid_gate"}},
      {"latent", [](Parts& p) { p.config.latent = kHidden; }, {"latent_in is missing", "latent"}},
  });
}

TEST(LayerInputs, GivenTensorsMustBeAnnounced) {
  expect_refused({
      {"gate_up bias",
       [](Parts& p) {
         p.tensors.gate_up_stacked.bias = p.view({kExperts, 2 * kInter});
       },
       {"gate_up_stacked.bias is given", "has_gate_up_bias"}},
      {"down bias",
       [](Parts& p) {
         p.tensors.down_stacked.bias = p.view({kExperts, kHidden});
       },
       {"down_stacked.bias is given", "has_down_bias"}},
      {"bias of one expert",
       [](Parts& p) {
         p.per_expert();
         p.tensors.down[3].bias = p.view({kHidden});
       },
       {"down[3].bias is given", "has_down_bias"}},
      {"logit bias",
       [](Parts& p) {
         p.with_router();
         p.tensors.router_bias = p.view({kExperts});
       },
       {"router_bias is given", "has_logit_bias"}},
      {"selection bias",
       [](Parts& p) {
         p.with_router();
         p.tensors.selection_bias = p.view({kExperts});
       },
       {"selection_bias is given", "has_selection_bias"}},
      {"logit bias without a router",
       [](Parts& p) {
         p.config.router.has_logit_bias = true;
         p.tensors.router_bias = p.view({kExperts});
       },
       {"router_weight is missing"}},
      {"input scale",
       [](Parts& p) { p.tensors.gate_up_stacked.input_scale = p.one(); },
       {"gate_up_stacked.input_scale is given", "gate_up_input.static_scale"}},
      {"zero points",
       [](Parts& p) {
         p.tensors.down_stacked.zeros = p.view({kExperts, kHidden, 1});
       },
       {"down_stacked[0]", "zero points"}},
      {"global",
       [](Parts& p) { p.tensors.down_stacked.global = p.one(); },
       {"down_stacked[0]", "global"}},
      {"shared experts",
       [](Parts& p) {
         p.with_shared();
         p.config.shared.inter = 0;
       },
       {"shared_gate_proj is given", "shared_inter"}},
      {"shared gate",
       [](Parts& p) {
         p.with_shared();
         p.tensors.shared_gate = p.view({1, kHidden});
       },
       {"shared_gate is given", "shared_sigmoid_gate"}},
      {"latent",
       [](Parts& p) {
         p.tensors.latent_out = p.view({kHidden, kHidden});
       },
       {"latent_out is given", "latent"}},
      {"stacked and per expert",
       [](Parts& p) {
         const MatrixTensors down = p.tensors.down_stacked;
         p.per_expert();
         p.tensors.down_stacked = down;
       },
       {"not both"}},
  });
}

TEST(LayerInputs, WhatAgreesIsTaken) {
  expect_taken({
      {"plain", [](Parts&) {}},
      {"per expert", [](Parts& p) { p.per_expert(); }},
      {"biases",
       [](Parts& p) {
         p.config.has_gate_up_bias = p.config.has_down_bias = true;
         p.tensors.gate_up_stacked.bias = p.view({kExperts, 2 * kInter});
         p.tensors.down_stacked.bias = p.view({kExperts, kHidden});
       }},
      {"router",
       [](Parts& p) {
         p.with_router();
         p.config.router.has_logit_bias = p.config.router.has_selection_bias = true;
         p.tensors.router_bias = p.tensors.selection_bias = p.view({kExperts});
       }},
      {"static scales",
       [](Parts& p) {
         p.config.gate_up_input = p.config.down_input = {ActivationFormat::fp8_tensor, true};
         p.tensors.gate_up_stacked.input_scale = p.tensors.down_stacked.input_scale = p.one();
       }},
      {"shared experts, gated, with a bias",
       [](Parts& p) {
         p.with_shared();
         p.config.shared.sigmoid_gate = true;
         p.tensors.shared_gate = p.view({1, kHidden});
         p.tensors.shared_down_proj.bias = p.view({kHidden});
       }},
  });
}

TEST(LayerInputs, Fp8TensorInputsNeedAStaticScale) {
  expect_refused({
      {"of the config",
       [](Parts& p) { p.config.gate_up_input = {ActivationFormat::fp8_tensor}; },
       {"gate_up_input", "static_scale"},
       ErrorCode::unsupported},
      {"of the options",
       [](Parts& p) { p.options.activations = ActivationFormat::fp8_tensor; },
       {"static input scale"},
       ErrorCode::unsupported},
      {"a static scale of a dynamic format",
       [](Parts& p) {
         p.config.down_input = {ActivationFormat::fp8_token, true};
         p.tensors.down_stacked.input_scale = p.one();
       },
       {"down_input.static_scale", "fp8_token"}},
      {"a damaged scale of the shared experts",
       [](Parts& p) {
         p.with_shared();
         p.config.shared.down_input = {ActivationFormat::fp8_tensor, true};
         p.scale = NAN;
         p.tensors.shared_down_proj.input_scale = p.one();
       },
       {"static input scale"}},
  });
}

TEST(LayerInputs, NumbersOutOfRangeAreRefused) {
  expect_refused({
      {"limit NaN", [](Parts& p) { p.config.activation.limit = NAN; }, {"limit"}},
      {"limit -1", [](Parts& p) { p.config.activation.limit = -1.0f; }, {"limit"}},
      {"alpha", [](Parts& p) { p.config.activation.alpha = NAN; }, {"alpha"}},
      {"beta", [](Parts& p) { p.config.activation.beta = INFINITY; }, {"beta"}},
      {"capacity_rows", [](Parts& p) { p.options.capacity_rows = -4; }, {"capacity_rows"}},
      {"device", [](Parts& p) { p.options.device.index = 5; }, {"index 5"}},
  });
}

TEST(LayerInputs, WeightsAreReadableHostMemory) {
  expect_refused({
      {"far rows",
       [](Parts& p) { p.tensors.down_stacked.codes.strides[1] = int64_t{1} << 61; },
       {"down_stacked.codes", "stride"}},
      {"far experts of a bias",
       [](Parts& p) {
         p.config.has_down_bias = true;
         p.tensors.down_stacked.bias = p.view({kExperts, kHidden});
         p.tensors.down_stacked.bias.strides[0] = INT64_MAX;
       },
       {"down_stacked.bias", "stride"}},
      {"no data",
       [](Parts& p) {
         p.with_router();
         p.tensors.router_weight.data = nullptr;
       },
       {"router_weight", "data is null"}},
      {"device",
       [](Parts& p) {
         p.tensors.gate_up_stacked.codes.device = {DeviceType::cuda, 0};
       },
       {"gate_up_stacked.codes", "host memory"}},
  });
}

/// Tensors of one call with routing of its own.
struct Call {
  std::vector<float> x = std::vector<float>(kTokens * kHidden, 0.5f),
                     y = std::vector<float>(2 * kTokens * kHidden, NAN),
                     weights = std::vector<float>(kTokens * kTopK, 0.5f);
  std::vector<int32_t> ids = {0, 1, 2, 3, 0, 2};
  LayerArgs args;

  Call() {
    args.hidden = TensorView::contiguous(x.data(), DType::f32, {kTokens, kHidden});
    args.output = TensorView::contiguous(y.data(), DType::f32, {kTokens, kHidden});
    args.topk_ids = TensorView::contiguous(ids.data(), DType::i32, {kTokens, kTopK});
    args.topk_weights = TensorView::contiguous(weights.data(), DType::f32, {kTokens, kTopK});
  }
};

TEST(LayerInputs, StridesOfACallAreChecked) {
  const Parts parts;
  const Layer layer = parts.make();
  const auto refused = [&](const std::function<void(LayerArgs&)>& change, const char* word) {
    Call call;
    change(call.args);
    std::string text;
    EXPECT_EQ(code_of([&] { layer.run(call.args); }, &text), ErrorCode::invalid_argument) << word;
    EXPECT_NE(text.find(word), std::string::npos) << text;
  };
  const int64_t far = int64_t{1} << 61;
  refused([&](LayerArgs& a) { a.hidden.strides[0] = far; }, "hidden: stride");
  refused([&](LayerArgs& a) { a.hidden.strides[1] = -far; }, "hidden: stride");
  refused([&](LayerArgs& a) { a.topk_ids.strides[0] = far; }, "topk_ids: stride");
  refused([&](LayerArgs& a) { a.topk_weights.strides[1] = far; }, "topk_weights: stride");
  refused([&](LayerArgs& a) { a.output.strides[0] = far; }, "output: stride");
  refused([](LayerArgs& a) { a.output.strides[0] = 0; }, "output: elements of it share memory");
  refused([](LayerArgs& a) { a.output.strides[0] = kHidden - 1; }, "output: elements of it share");
  refused([](LayerArgs& a) { a.hidden.shape[0] = a.output.shape[0] = -1; }, "hidden: shape[0]");
  refused([](LayerArgs& a) { a.hidden_scales = a.topk_weights; }, "hidden_scales");
  layer.run(Call().args);  // and none of it hurt the layer
}

TEST(LayerInputs, NegativeAndZeroStridesAreOrdinary) {
  const Parts parts;
  const Layer layer = parts.make();
  Call straight, turned;
  for (size_t i = 0; i < straight.x.size(); ++i)
    straight.x[i] = turned.x[i] = std::sin(static_cast<float>(i));
  layer.run(straight.args);
  // The same rows, and the ids that belong to them, from the last to the first.
  for (TensorView* v : {&turned.args.hidden, &turned.args.topk_ids}) {
    v->data = static_cast<char*>(v->data) + (kTokens - 1) * v->strides[0] * 4;
    v->strides[0] = -v->strides[0];
  }
  // One row of weights for all tokens.
  turned.args.topk_weights.strides[0] = 0;
  // Every second row of the output, upwards.
  turned.args.output.data = turned.y.data() + 2 * (kTokens - 1) * kHidden;
  turned.args.output.strides[0] = -2 * kHidden;
  layer.run(turned.args);
  for (int64_t t = 0; t < kTokens; ++t) {
    EXPECT_EQ(
        std::memcmp(&straight.y[t * kHidden], &turned.y[2 * t * kHidden], kHidden * sizeof(float)),
        0)
        << t;
  }
}

TEST(LayerInputs, AMovedFromLayerSaysSo) {
  const Parts parts;
  Layer first = parts.make();
  const Layer second = std::move(first);
  Call call;
  const std::vector<std::function<void()>> uses = {
      [&] { first.run(call.args); },
      [&] { first.dispatch(call.args); },
      [&] { first.config(); },
      [&] { first.explanation(); },
      [&] { first.make_workspace(); },
      [&] { first.placement(); },
      [&] { first.set_placement({}); },
      [&] { first.load_statistics(); },
      [&] { first.gather_load_statistics(); },
      [&] { first.reset_load_statistics(); },
  };
  for (size_t i = 0; i < uses.size(); ++i) {
    std::string text;
    EXPECT_EQ(code_of(uses[i], &text), ErrorCode::invalid_argument) << i;
    EXPECT_NE(text.find("moved from"), std::string::npos) << text;
  }
  second.run(call.args);
  first = parts.make();
  first.run(call.args);
}

}  // namespace
}  // namespace moekit::test
