#include "engine/synthetic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "moekit/error.h"
#include "quant/stored_codec.h"
#include "support/problems.h"
#include "tensor/float_formats.h"

namespace moekit::engine {
namespace {

std::shared_ptr<const CanonicalLayer> make(const std::string& text, uint64_t seed = 1,
                                           int num_threads = 1, SyntheticOptions options = {}) {
  ThreadPool threads(num_threads);
  return make_synthetic_layer(parse_spec(text), seed, threads, options);
}

struct Moments {
  double mean = 0;
  double rms = 0;
};

Moments moments(const StoredMatrix& m) {
  std::vector<float> w(static_cast<size_t>(m.cols));
  Moments result;
  for (int64_t r = 0; r < m.rows; ++r) {
    quant::decode_weights(m, r, 0, m.cols, w.data());
    for (float x : w) {
      EXPECT_TRUE(std::isfinite(x));
      result.mean += x;
      result.rms += double{x} * x;
    }
  }
  const auto count = static_cast<double>(m.rows * m.cols);
  result.mean /= count;
  result.rms = std::sqrt(result.rms / count);
  return result;
}

constexpr const char* kWeights[] = {"bf16",        "f16",          "f32",         "fp8_tensor",
                                    "fp8_channel", "fp8_block",    "mxfp8",       "mxfp8_e5m2",
                                    "mxfp4",       "nvfp4",        "int4_g32",    "int4_g128_zp",
                                    "int8_g64_zp", "int8_channel", "int4_channel"};

TEST(Synthetic, EveryFormatHasUnitGain) {
  for (const std::string weights : kWeights) {
    const auto layer = make("E=2,k=1,H=272,I=180,weights=" + weights);
    for (const StoredExpert& e : layer->experts) {
      for (const StoredMatrix* m : {&e.gate, &e.up, &e.down}) {
        const Moments got = moments(*m);
        const double gain = (m == &e.down ? 1.7 : 1.0) / std::sqrt(static_cast<double>(m->cols));
        // One random scale for the whole matrix varies between 0.38 and 1.5 of the middle.
        const double low = weights == "fp8_tensor" ? 0.3 : 0.7;
        const double high = weights == "fp8_tensor" ? 1.7 : 1.4;
        EXPECT_GT(got.rms, low * gain) << weights;
        EXPECT_LT(got.rms, high * gain) << weights;
        EXPECT_LT(std::fabs(got.mean), 0.1 * gain) << weights;
      }
    }
  }
}

TEST(Synthetic, NeighbouringScalesDiffer) {
  for (const std::string weights :
       {"fp8_channel", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "int4_g32"}) {
    const auto layer = make("E=1,k=1,H=512,I=512,weights=" + weights);
    std::set<float> scales;
    for (int64_t r = 0; r < 512; r += 16) {
      for (int64_t c = 0; c < 512; c += 16)
        scales.insert(quant::scale_at(layer->experts[0].up, r, c));
    }
    EXPECT_GE(scales.size(), 3u) << weights;
  }
}

bool same(const StoredMatrix& a, const StoredMatrix& b) {
  if (a.rows != b.rows || a.cols != b.cols || a.global != b.global) return false;
  std::vector<float> wa(static_cast<size_t>(a.cols));
  std::vector<float> wb(wa.size());
  for (int64_t r = 0; r < a.rows; ++r) {
    quant::decode_weights(a, r, 0, a.cols, wa.data());
    quant::decode_weights(b, r, 0, b.cols, wb.data());
    if (std::memcmp(wa.data(), wb.data(), wa.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

TEST(Synthetic, SameForEveryThreadCountAndUnlikeForEverySeed) {
  for (const std::string weights : kWeights) {
    const std::string text = "E=3,k=1,H=160,I=96,bias=both,weights=" + weights;
    const auto a = make(text, 1, 1);
    const auto b = make(text, 1, 3);
    const auto c = make(text, 2, 1);
    for (size_t e = 0; e < 3; ++e) {
      EXPECT_TRUE(same(a->experts[e].gate, b->experts[e].gate)) << weights;
      EXPECT_TRUE(same(a->experts[e].down, b->experts[e].down)) << weights;
      EXPECT_FALSE(same(a->experts[e].up, c->experts[e].up)) << weights;
      EXPECT_FALSE(same(a->experts[e].up, a->experts[e].gate)) << weights;
      EXPECT_FALSE(same(a->experts[e].up, a->experts[(e + 1) % 3].up)) << weights;
      EXPECT_EQ(quant::element(a->experts[e].down_bias, 7),
                quant::element(b->experts[e].down_bias, 7));
    }
  }
}

TEST(Synthetic, HoldsEveryPartOfTheLayer) {
  const auto layer = make(
      "E=4,k=2,H=64,I=48,shared_I=40@gate,latent=32,act=swiglu_oai,bias=both,"
      "router=topk_softmax_bias,weights=nvfp4,activations=nvfp4_static");
  EXPECT_EQ(layer->experts[3].gate.rows, 48);
  EXPECT_EQ(layer->experts[3].gate.cols, 32);
  EXPECT_EQ(layer->experts[3].down.rows, 32);
  EXPECT_EQ(layer->experts[0].gate_bias.size, 48);
  EXPECT_EQ(layer->experts[0].down_bias.size, 32);
  EXPECT_EQ(layer->shared.down.rows, 64);
  EXPECT_EQ(layer->shared.down.cols, 40);
  EXPECT_EQ(layer->shared_gate.cols, 64);
  EXPECT_EQ(layer->latent_in.rows, 32);
  EXPECT_EQ(layer->latent_out.rows, 64);
  EXPECT_EQ(layer->router.weight.rows, 4);
  EXPECT_EQ(layer->router.logit_bias.size, 4);
  EXPECT_TRUE(layer->router.selection_bias.empty());
  EXPECT_EQ(layer->experts[0].up.input_scale, 6.0f / 2688.0f);
  EXPECT_NE(layer->experts[0].gate.global, 1.0f);

  const auto plain = make("E=4,k=2,H=64,I=48,act=relu2,router=sigmoid_bias", 1, 1, {false, false});
  EXPECT_TRUE(plain->experts[0].gate.empty());
  EXPECT_TRUE(plain->experts[0].up_bias.empty());
  EXPECT_TRUE(plain->shared.up.empty());
  EXPECT_TRUE(plain->router.weight.empty());

  const auto divisor = make("E=1,k=1,H=64,I=48,weights=nvfp4,activations=nvfp4_static_divisor");
  EXPECT_EQ(divisor->experts[0].up.global_sense, ScaleSense::divisor);
  EXPECT_GT(divisor->experts[0].up.global, 1.0f);
  EXPECT_EQ(divisor->experts[0].up.input_scale, 2688.0f / 6.0f);
}

TEST(Synthetic, EverySmallProblemCanBeMade) {
  for (const std::string& text : test::small_problems()) {
    const ProblemSpec spec = parse_spec(text);
    const auto layer = make(text);
    ASSERT_EQ(layer->experts.size(), static_cast<size_t>(spec.config.num_experts)) << text;
    EXPECT_EQ(layer->experts.back().down.cols, spec.config.inter) << text;
    EXPECT_TRUE(std::isfinite(moments(layer->experts.back().down).rms)) << text;
    EXPECT_EQ(to_string(parse_spec(to_string(spec))), to_string(spec));
  }
}

TEST(Synthetic, UnlikeExpertsDifferInMagnitude) {
  const auto layer = make("E=5,k=1,H=64,I=64,weights=fp8_block", 1, 1, {true, true});
  std::set<int> magnitudes;
  for (const StoredExpert& e : layer->experts) magnitudes.insert(std::ilogb(moments(e.down).rms));
  EXPECT_GE(magnitudes.size(), 4u);
}

TEST(Synthetic, MemoryIsTheStoredBytes) {
  const MoeConfig c = parse_spec("E=4,k=1,H=256,I=128,weights=nvfp4").config;
  // 0.5 + 1 / 16 bytes an element, three matrices of 128 x 256.
  EXPECT_EQ(synthetic_expert_bytes(c), 4 * 3 * (128 * 256 / 2 + 128 * 256 / 16));
}

TEST(Synthetic, HiddenRowsAreBf16AndSplitOverRanks) {
  const std::vector<float> all = make_hidden(10, 33, 5);
  double square = 0;
  for (float x : all) {
    EXPECT_EQ(x, bf16_to_f32(f32_to_bf16(x)));
    square += double{x} * x / static_cast<double>(all.size());
  }
  EXPECT_NEAR(square, 1, 0.25);
  const std::vector<float> part = make_hidden(4, 33, 5, 6);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + 6 * 33));
  EXPECT_TRUE(make_hidden(0, 33, 5).empty());
}

void expect_well_formed(const SyntheticRouting& r, int64_t num_experts, int64_t top_k) {
  for (size_t t = 0; t * static_cast<size_t>(top_k) < r.ids.size(); ++t) {
    const auto* ids = r.ids.data() + t * static_cast<size_t>(top_k);
    const auto* w = r.weights.data() + t * static_cast<size_t>(top_k);
    EXPECT_EQ(std::set<int32_t>(ids, ids + top_k).size(), static_cast<size_t>(top_k));
    EXPECT_TRUE(
        std::all_of(ids, ids + top_k, [&](int32_t e) { return e >= 0 && e < num_experts; }));
    EXPECT_TRUE(std::is_sorted(w, w + top_k, std::greater<>()));
    float sum = 0;
    for (int64_t s = 0; s < top_k; ++s) sum += w[s];
    EXPECT_NEAR(sum, 1, 1e-5);
  }
}

TEST(Synthetic, RoutingPatterns) {
  const std::vector<int32_t> first_rank = {3, 7, 11};
  for (const std::string text : {"uniform", "zipf:1", "zipf:8", "hot", "one_rank"}) {
    const RoutingPattern pattern = parse_routing(text);
    for (const auto& [num_experts, top_k] :
         {std::pair<int64_t, int64_t>{16, 4}, {16, 16}, {12, 1}}) {
      const SyntheticRouting r = make_routing(pattern, 200, num_experts, top_k, 3, first_rank);
      ASSERT_EQ(r.ids.size(), static_cast<size_t>(200 * top_k));
      expect_well_formed(r, num_experts, top_k);
      const SyntheticRouting part =
          make_routing(pattern, 50, num_experts, top_k, 3, first_rank, 120);
      EXPECT_TRUE(std::equal(part.ids.begin(), part.ids.end(), r.ids.begin() + 120 * top_k));
      EXPECT_TRUE(
          std::equal(part.weights.begin(), part.weights.end(), r.weights.begin() + 120 * top_k));
    }
  }
  const auto count = [](const SyntheticRouting& r, int32_t expert) {
    return std::count(r.ids.begin(), r.ids.end(), expert);
  };
  EXPECT_EQ(count(make_routing(parse_routing("hot"), 100, 16, 4, 0), 0), 100);
  const SyntheticRouting one_rank =
      make_routing(parse_routing("one_rank"), 100, 16, 2, 0, first_rank);
  EXPECT_EQ(count(one_rank, 3) + count(one_rank, 7) + count(one_rank, 11), 200);
  const SyntheticRouting skewed = make_routing(parse_routing("zipf:1.5"), 1000, 16, 1, 0);
  std::vector<int64_t> load(16);
  for (int32_t id : skewed.ids) ++load[static_cast<size_t>(id)];
  std::sort(load.rbegin(), load.rend());
  // The first share is 1 / sum(r^-1.5, r = 1..16) = 0.46, the second 0.16.
  EXPECT_NEAR(static_cast<double>(load[0]), 460, 60);
  EXPECT_NEAR(static_cast<double>(load[1]), 163, 50);
  EXPECT_THROW(make_routing(parse_routing("uniform"), 1, 4, 5, 0), Error);
}

}  // namespace
}  // namespace moekit::engine
