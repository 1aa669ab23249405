// The layer's edges: bad tensors, empty calls, ids without experts, quantized input, overlapping
// memory, steps apart.
#include "moekit/layer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>

#include "engine/synthetic.h"
#include "quant/row_codec.h"
#include "support/error_code.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

constexpr const char* kSpec = "E=8,k=2,H=96,I=64,weights=bf16,tokens=8";

Layer open_layer(const std::string& spec, int64_t max_tokens = 16,
                 const std::string& backend = "") {
  PlanOptions options = options_for(backend);
  options.max_tokens = max_tokens;
  return Layer::from_canonical(make_layer(spec).canonical, options);
}

/// Rows, ids, weights and output of one call.
struct Batch {
  int64_t tokens, hidden, top_k;
  std::vector<float> rows, output, weights;
  std::vector<int32_t> ids;
  Batch(const Layer& layer, int64_t num_tokens)
      : tokens(num_tokens), hidden(layer.config().hidden), top_k(layer.config().top_k) {
    rows = engine::make_hidden(tokens, hidden, 3);
    output.assign(tokens * hidden, NAN);
    ids.assign(tokens * top_k, 0);
    weights.assign(tokens * top_k, 0.5f);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 3 % 8);
  }
  LayerArgs args() {
    LayerArgs a;
    a.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, hidden});
    a.output = TensorView::contiguous(output.data(), DType::f32, {tokens, hidden});
    return a;
  }
  LayerArgs routed() {
    LayerArgs a = args();
    a.topk_ids = TensorView::contiguous(ids.data(), DType::i32, {tokens, top_k});
    a.topk_weights = TensorView::contiguous(weights.data(), DType::f32, {tokens, top_k});
    return a;
  }
};

TEST(LayerTest, ZeroTokensAreAnOrdinaryCall) {
  for (const char* weights : {"bf16", "fp8_block", "nvfp4", "mxfp4"}) {
    const Layer layer = open_layer(std::string("E=4,k=2,H=64,I=64,tokens=1,weights=") + weights);
    Batch batch(layer, 0);
    EXPECT_NO_THROW(layer.run(batch.args())) << weights;
    EXPECT_NO_THROW(layer.run(batch.routed())) << weights;
  }
}

TEST(LayerTest, NoExpertGivesExactZeros) {
  const Layer layer = open_layer(kSpec);
  Batch batch(layer, 3);
  batch.ids = {-1, -1, 2, -1, -1, -1};
  layer.run(batch.routed());
  for (int64_t i = 0; i < batch.hidden; ++i) {
    EXPECT_EQ(batch.output[i], 0.0f);
    EXPECT_EQ(batch.output[2 * batch.hidden + i], 0.0f);
    EXPECT_TRUE(std::isfinite(batch.output[batch.hidden + i]));
  }
}

TEST(LayerTest, DuplicateIdsCountEachWithItsOwnWeight) {
  const Layer layer = open_layer(kSpec);
  Batch twice(layer, 1), once(layer, 1);
  twice.ids = {5, 5};
  twice.weights = {0.25f, 0.5f};
  once.ids = {5, -1};
  once.weights = {0.75f, 1.0f};
  layer.run(twice.routed());
  layer.run(once.routed());
  EXPECT_LE(worst_row(twice.output, once.output, twice.hidden), 1e-6);
}

TEST(LayerTest, IdsOutOfRangeAreNamedOrDropped) {
  const Layer checked = open_layer(kSpec);
  Batch batch(checked, 3);
  batch.ids = {1000000, 2, 3, 1, 2147483647, 0};
  std::string text;
  EXPECT_EQ(code_of([&] { checked.run(batch.routed()); }, &text), ErrorCode::invalid_argument);
  EXPECT_NE(text.find("1000000"), std::string::npos) << text;

  PlanOptions options = options_for("cpu");
  options.max_tokens = 4;
  options.checked = false;
  const Layer fast = Layer::from_canonical(make_layer(kSpec).canonical, options);
  LayerArgs args = batch.routed();
  int64_t dropped = 0;
  args.out_dropped = &dropped;
  fast.run(args);
  EXPECT_EQ(dropped, 2);
  for (float y : batch.output) EXPECT_TRUE(std::isfinite(y));
}

TEST(LayerTest, WideIdsAreReadAndChecked) {
  const Layer layer = open_layer(kSpec);
  Batch batch(layer, 1);
  std::vector<int64_t> ids = {3, int64_t{1} << 40};
  LayerArgs args = batch.routed();
  args.topk_ids = TensorView::contiguous(ids.data(), DType::i64, {1, 2});
  EXPECT_EQ(code_of([&] { layer.run(args); }), ErrorCode::invalid_argument);
  ids[1] = 4;
  layer.run(args);
  Batch narrow(layer, 1);
  narrow.ids = {3, 4};
  layer.run(narrow.routed());
  EXPECT_EQ(batch.output, narrow.output);
}

TEST(LayerTest, BadTensorsAreRefusedWithTheFigures) {
  const Layer layer = open_layer(kSpec);
  Batch batch(layer, 4);
  const LayerArgs good = batch.args();
  const auto refused = [&](const char* what, auto&& spoil) {
    LayerArgs args = good;
    spoil(args);
    EXPECT_EQ(code_of([&] { layer.run(args); }), ErrorCode::invalid_argument) << what;
  };
  refused("width", [&](LayerArgs& a) {
    a.hidden = TensorView::contiguous(batch.rows.data(), DType::f32, {4, 95});
  });
  refused("rank", [&](LayerArgs& a) {
    a.hidden = TensorView::contiguous(batch.rows.data(), DType::f32, {96});
  });
  refused("dtype", [&](LayerArgs& a) { a.hidden.dtype = DType::i32; });
  refused("device", [&](LayerArgs& a) { a.hidden.device.type = DeviceType::cuda; });
  refused("output rows", [&](LayerArgs& a) { a.output.shape[0] = 3; });
  refused("overlap", [&](LayerArgs& a) { a.output = a.hidden; });
  refused("partial overlap", [&](LayerArgs& a) { a.output.data = batch.rows.data() + 96; });
  refused("ids without weights", [&](LayerArgs& a) { a.topk_ids = batch.routed().topk_ids; });
  refused("no data", [&](LayerArgs& a) { a.hidden.data = nullptr; });
  Batch large(layer, 17);
  EXPECT_EQ(code_of([&] { layer.run(large.args()); }), ErrorCode::invalid_argument)
      << "above the capacity";
}

TEST(LayerTest, EarlierResultsDoNotChange) {
  const Layer layer = open_layer(kSpec);
  Batch first(layer, 5), second(layer, 7);
  for (float& x : second.rows) x *= -2.0f;
  layer.run(first.args());
  const std::vector<float> kept = first.output;
  layer.run(second.args());
  EXPECT_EQ(first.output, kept);
}

TEST(LayerTest, StridedRowsAndOtherFloatTypesGiveTheSameValues) {
  const Layer layer = open_layer(kSpec);
  Batch batch(layer, 4);
  layer.run(batch.args());
  std::vector<float> wide(4 * 200, NAN);
  std::vector<uint16_t> half(4 * 96);
  for (int64_t t = 0; t < 4; ++t) {
    std::memcpy(&wide[t * 200], &batch.rows[t * 96], 96 * sizeof(float));
    for (int64_t i = 0; i < 96; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &batch.rows[t * 96 + i], 4);
      half[t * 96 + i] = static_cast<uint16_t>(bits >> 16);  // make_hidden gives bf16 values
    }
  }
  Batch strided(layer, 4), narrow(layer, 4);
  LayerArgs args = strided.args();
  args.hidden = TensorView::contiguous(wide.data(), DType::f32, {4, 96});
  args.hidden.strides[0] = 200;
  layer.run(args);
  EXPECT_EQ(strided.output, batch.output);
  args = narrow.args();
  args.hidden = TensorView::contiguous(half.data(), DType::bf16, {4, 96});
  layer.run(args);
  EXPECT_EQ(narrow.output, batch.output);
}

TEST(LayerTest, HiddenMayArriveQuantized) {
  for (const char* format : {"fp8_token", "fp8_block", "mxfp8", "mxfp4", "nvfp4"}) {
    const Layer layer =
        open_layer(std::string("E=8,k=2,H=160,I=64,weights=bf16,tokens=4,activations=") + format);
    Batch whole(layer, 4), parts(layer, 4);
    layer.run(whole.routed());
    const ActivationScheme scheme = layer.config().gate_up_input;
    const RowFormat rows = RowFormat::of(scheme.format, 160);
    std::vector<std::byte> record(rows.record_bytes), codes, scales;
    std::vector<float> globals;
    const bool nvfp4 = scheme.format == ActivationFormat::nvfp4;
    const int64_t scale_bytes = nvfp4 ? 10 : rows.scale_bytes;
    for (int64_t t = 0; t < 4; ++t) {
      quant::encode_row(scheme, 1.0f, &parts.rows[t * 160], 160, record.data());
      codes.insert(codes.end(), record.begin(), record.begin() + rows.code_bytes);
      const auto first = record.begin() + rows.scale_offset;
      scales.insert(scales.end(), first, first + scale_bytes);
      float global;
      std::memcpy(&global, &record[rows.scale_offset + rows.scale_bytes - 4], 4);
      globals.push_back(global);
    }
    const bool fp4 = nvfp4 || scheme.format == ActivationFormat::mxfp4;
    const bool wide_scales = scheme.format == ActivationFormat::fp8_token ||
                             scheme.format == ActivationFormat::fp8_block;
    const DType scale_type = wide_scales ? DType::f32 : nvfp4 ? DType::f8_e4m3 : DType::f8_e8m0;
    LayerArgs args = parts.routed();
    args.hidden =
        TensorView::contiguous(codes.data(), fp4 ? DType::f4_e2m1 : DType::f8_e4m3, {4, 160});
    args.hidden_scales =
        TensorView::contiguous(scales.data(), scale_type, {4, scale_bytes / bytes_of(scale_type)});
    if (nvfp4) args.hidden_global = TensorView::contiguous(globals.data(), DType::f32, {4});
    layer.run(args);
    EXPECT_EQ(parts.output, whole.output) << format;
    args.hidden_scales = {};
    EXPECT_EQ(code_of([&] { layer.run(args); }), ErrorCode::invalid_argument)
        << format << " without scales";
  }
}

TEST(LayerTest, StepsMayRunApartAndInTwoWorkspaces) {
  const Layer layer = open_layer(kSpec);
  Batch a(layer, 4), b(layer, 6), a2(layer, 4), b2(layer, 6);
  layer.run(a.args());
  layer.run(b.args());
  auto first = layer.make_workspace(), second = layer.make_workspace();
  EXPECT_GT(first->bytes(), 0);
  PendingCall x = layer.dispatch(a2.args(), nullptr, first.get());
  PendingCall y = layer.dispatch(b2.args(), nullptr, second.get());
  EXPECT_TRUE(x.ready());
  y.experts();
  x.experts();
  x.combine();
  y.wait();
  EXPECT_EQ(a2.output, a.output);
  EXPECT_EQ(b2.output, b.output);
  EXPECT_EQ(code_of([&] { x.experts(); }), ErrorCode::invalid_argument) << "a step out of order";
}

TEST(LayerTest, ThreadsMayCallOneLayerAtOnce) {
  const Layer layer = open_layer(kSpec);
  Batch expected(layer, 8);
  layer.run(expected.args());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 5; ++call) {
        Batch mine(layer, 8);
        layer.run(mine.args());
        EXPECT_EQ(mine.output, expected.output);
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST(LayerTest, NotANumberStaysInItsRow) {
  const Layer layer = open_layer(kSpec);
  Batch clean(layer, 5), dirty(layer, 5);
  layer.run(clean.args());
  dirty.rows[2 * 96 + 7] = NAN;
  dirty.rows[3 * 96 + 1] = INFINITY;
  layer.run(dirty.args());
  for (int64_t t : {0, 1, 4}) {
    EXPECT_TRUE(
        std::equal(&clean.output[t * 96], &clean.output[t * 96] + 96, &dirty.output[t * 96]))
        << t;
  }
  EXPECT_TRUE(std::isnan(dirty.output[2 * 96]));
}

TEST(LayerTest, WeightOnInputNeedsOneExpertAToken) {
  LayerSource layer = make_layer(kSpec);
  auto canonical = std::make_shared<CanonicalLayer>(*layer.canonical);
  canonical->config.weight_on_input = true;
  PlanOptions options = options_for("");
  options.max_tokens = 4;
  EXPECT_EQ(code_of([&] { Layer::from_canonical(canonical, options); }),
            ErrorCode::invalid_argument);
}

TEST(LayerTest, AnExplicitBackEndIsHonouredOrRefusedWithReasons) {
  std::string text;
  EXPECT_EQ(code_of([&] { open_layer(kSpec, 4, "no_such_member"); }, &text),
            ErrorCode::invalid_argument);
  EXPECT_NE(text.find("no_such_member"), std::string::npos) << text;
  EXPECT_NE(text.find("cpu"), std::string::npos) << "lists what there is: " << text;
  for (const char* name : {"cpu", "ref", "ref64", "cpu_batched"}) {
    EXPECT_EQ(open_layer(kSpec, 4, name).explanation().plan.backend, name);
  }
}

TEST(LayerTest, StaticFp8WithoutAScaleIsRefused) {
  PlanOptions options = options_for("");
  options.max_tokens = 4;
  options.activations = ActivationFormat::fp8_tensor;
  EXPECT_EQ(code_of([&] { Layer::from_canonical(make_layer(kSpec).canonical, options); }),
            ErrorCode::unsupported);
}

}  // namespace
}  // namespace moekit::test
