// The router on a GPU gives the ids and weight bits of the CPU members.
#include "router/router.h"

#include "router/cuda/topk.h"
#include "tests/cuda/gpu.h"

namespace moekit::testing {
namespace {

struct RouterCase {
  const char* name;
  RouterSpec spec;
  int64_t experts;
  int64_t top_k;
};

RouterSpec spec_of(Scoring scoring, SelectOn on, RouterWeight weight, Renormalize renormalize,
                   float epsilon = 0.0f) {
  RouterSpec s;
  s.scoring = scoring;
  s.select_on = on;
  s.weight = weight;
  s.renormalize = renormalize;
  s.epsilon = epsilon;
  return s;
}

std::vector<RouterCase> cases() {
  using enum Scoring;
  const auto scores = SelectOn::scores;
  const auto weigh = RouterWeight::scores;
  std::vector<RouterCase> c;
  c.push_back({"qwen3", spec_of(softmax, scores, weigh, Renormalize::sum), 128, 8});
  c.push_back({"mixtral", spec_of(softmax, scores, weigh, Renormalize::sum), 8, 2});
  c.push_back({"plain_wide", spec_of(softmax, scores, weigh, Renormalize::none), 2048, 10});
  c.push_back({"gptoss",
               spec_of(Scoring::logits, SelectOn::logits, RouterWeight::softmax_selected,
                       Renormalize::none),
               128, 4});
  c.push_back(
      {"llama4",
       spec_of(Scoring::logits, SelectOn::logits, RouterWeight::sigmoid_logit, Renormalize::none),
       16, 1});
  c.push_back({"dbrx", spec_of(softmax, scores, weigh, Renormalize::p_norm), 16, 4});
  RouterSpec ds = spec_of(sigmoid, scores, weigh, Renormalize::sum, 1e-20f);
  ds.has_selection_bias = true;
  ds.scaling_factor = 2.5f;
  c.push_back({"minimax", ds, 256, 8});
  ds.num_groups = 8;
  ds.topk_groups = 4;
  c.push_back({"deepseek_v3", ds, 256, 8});
  ds.group_score = GroupScore::max;
  ds.num_groups = 16;
  ds.topk_groups = 3;
  c.push_back({"group_max", ds, 160, 6});
  RouterSpec v4 = spec_of(sqrt_softplus, scores, weigh, Renormalize::max_sum, 1e-20f);
  c.push_back({"sqrt_softplus", v4, 384, 384});
  return c;
}

class RouterTest : public ::testing::TestWithParam<RouterCase> {};

TEST_P(RouterTest, EqualsTheReferenceBitForBit) {
  MOEKIT_NEEDS_GPU(80);
  const RouterCase& c = GetParam();
  router::validate(c.spec, c.experts, c.top_k);
  const int64_t tokens = 203;
  Random random(11);
  std::vector<float> logits(tokens * c.experts), bias(c.experts);
  for (auto& l : logits) l = 3.0f * random.normal();
  for (auto& b : bias) b = 0.3f * random.normal();
  auto row = [&](int64_t t) { return logits.begin() + t * c.experts; };
  std::fill_n(row(3), c.experts, 0.25f);                                      // all tied
  for (int64_t e = 0; e < c.experts; ++e) row(4)[e] = std::floor(row(4)[e]);  // many ties
  std::fill_n(row(5), c.experts, std::nanf(""));
  row(6)[c.experts / 2] = std::nanf("");
  std::fill_n(row(7), c.experts, INFINITY);
  std::fill_n(row(8), c.experts, -INFINITY);
  std::fill_n(row(9), c.experts, -120.0f);
  row(10)[0] = INFINITY;
  const float* selection_bias = c.spec.has_selection_bias ? bias.data() : nullptr;

  const router::Router& reference = *router::registry().back();
  std::vector<GlobalExpert> ids(tokens * c.top_k);
  std::vector<float> weights(tokens * c.top_k);
  std::vector<std::byte> scratch(
      static_cast<size_t>(reference.workspace_bytes(c.spec, c.experts, c.top_k, 1)) + 64);
  int64_t nan_rows = 0;
  router::Args host;
  host.spec = &c.spec;
  host.num_tokens = tokens;
  host.num_experts = c.experts;
  host.top_k = c.top_k;
  host.logits = logits.data();
  host.selection_bias = selection_bias;
  host.ids = ids.data();
  host.weights = weights.data();
  host.nan_rows = &nan_rows;
  host.workspace =
      reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  reference.run(host);

  DeviceArray<float> device_logits(logits), device_bias(bias), device_weights(weights.size());
  DeviceArray<int32_t> device_ids(ids.size()), device_nan(std::vector<int32_t>{0});
  router::cuda::Args args;
  args.spec = c.spec;
  args.num_tokens = tokens;
  args.num_experts = static_cast<int32_t>(c.experts);
  args.top_k = static_cast<int32_t>(c.top_k);
  args.logits = device_logits.data();
  args.selection_bias = selection_bias == nullptr ? nullptr : device_bias.data();
  args.ids = device_ids.data();
  args.weights = device_weights.data();
  args.nan_rows = device_nan.data();
  device::check_cuda(router::cuda::run(args, nullptr), "router");
  const auto got_ids = device_ids.get();
  const auto got_weights = device_weights.get();
  EXPECT_EQ(device_nan.get()[0], nan_rows);
  for (size_t i = 0; i < ids.size(); ++i) {
    ASSERT_EQ(got_ids[i], static_cast<int32_t>(ids[i])) << "slot " << i;
    const bool nan = weights[i] != weights[i] && got_weights[i] != got_weights[i];
    ASSERT_TRUE(nan || f32_bits(got_weights[i]) == f32_bits(weights[i]))
        << "slot " << i << ": " << got_weights[i] << " for " << weights[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, RouterTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(RouterHash, ReadsTheTableAndMarksBadRows) {
  MOEKIT_NEEDS_GPU(80);
  router::cuda::Args args;
  args.spec =
      spec_of(Scoring::sqrt_softplus, SelectOn::scores, RouterWeight::scores, Renormalize::none);
  args.spec.hash_routing = true;
  args.num_tokens = 4;
  args.num_experts = 6;
  args.top_k = 2;
  args.hash_rows = 3;
  DeviceArray<float> logits(
      std::vector<float>{0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1});
  DeviceArray<int64_t> tokens(std::vector<int64_t>{2, 0, 7, 1});
  DeviceArray<int64_t> table(std::vector<int64_t>{0, 5, 1, 99, 3, 4});
  DeviceArray<int32_t> ids(8), bad(std::vector<int32_t>{0});
  DeviceArray<float> weights(8);
  args.logits = logits.data();
  args.token_ids = tokens.data();
  args.hash_table = table.data();
  args.ids = ids.data();
  args.weights = weights.data();
  args.bad_ids = bad.data();
  device::check_cuda(router::cuda::run(args, nullptr), "router");
  EXPECT_EQ(ids.get(), (std::vector<int32_t>{4, 3, 0, 5, -1, -1, -1, -1}));
  EXPECT_EQ(bad.get()[0], 2);
}

}  // namespace
}  // namespace moekit::testing
