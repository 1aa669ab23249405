// Inputs on which routers have failed elsewhere, with values worked out by hand. Every registered
// member has to pass.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "cpu/router/run_router.h"
#include "moekit/error.h"

namespace moekit::router {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::nanf("");

using Ids = std::vector<int32_t>;

float logit(double probability) {
  return static_cast<float>(std::log(probability / (1.0 - probability)));
}

RouterSpec sigmoid_spec(bool bias, Renormalize renormalize, float epsilon = 0.0f) {
  RouterSpec s;
  s.scoring = Scoring::sigmoid;
  s.has_selection_bias = bias;
  s.renormalize = renormalize;
  s.epsilon = epsilon;
  return s;
}

Input input(const RouterSpec& spec, int64_t num_experts, int64_t top_k, std::vector<float> logits,
            std::vector<float> bias = {}) {
  return {spec, num_experts, top_k, std::move(logits), std::move(bias), {}, {}};
}

void expect_distinct_in_range(const Output& out, int64_t num_experts, int64_t top_k) {
  for (size_t row = 0; row < out.ids.size() / top_k; ++row) {
    std::set<int32_t> seen(out.ids.begin() + row * top_k, out.ids.begin() + (row + 1) * top_k);
    EXPECT_EQ(static_cast<int64_t>(seen.size()), top_k) << "row " << row;
    EXPECT_GE(*seen.begin(), 0);
    EXPECT_LT(*seen.rbegin(), num_experts);
  }
}

// NaN ranks below -infinity, so among equal NaNs the lower ids come first.
TEST(FieldCases, RowsOfNaNAndInfinity) {
  RouterSpec spec;
  spec.renormalize = Renormalize::sum;
  const std::vector<float> normal{0.1f, 2.0f, -1.0f, 3.0f, 0.5f, 1.0f, -2.0f, 0.0f};
  std::vector<float> logits(4 * 8);
  std::fill_n(logits.begin(), 8, kNaN);
  std::fill_n(logits.begin() + 8, 8, kInf);
  std::copy(normal.begin(), normal.end(), logits.begin() + 16);
  logits[16 + 3] = kNaN;
  std::copy(normal.begin(), normal.end(), logits.begin() + 24);
  for (const Router* r : registry()) {
    const Output out = run(*r, input(spec, 8, 3, logits));
    expect_distinct_in_range(out, 8, 3);
    EXPECT_EQ(Ids(out.ids.begin(), out.ids.begin() + 3), (Ids{0, 1, 2}));
    EXPECT_TRUE(std::isnan(out.weights[0]));
    EXPECT_EQ(Ids(out.ids.begin() + 3, out.ids.begin() + 6), (Ids{0, 1, 2}));
    for (int i = 3; i < 6; ++i) EXPECT_NEAR(out.weights[i], 1.0 / 3.0, 1e-7);
    EXPECT_EQ(Ids(out.ids.begin() + 6, out.ids.begin() + 9), (Ids{1, 5, 4}));
    for (int i = 6; i < 9; ++i) EXPECT_TRUE(std::isfinite(out.weights[i]));
    const Output alone = run(*r, input(spec, 8, 3, normal));
    EXPECT_EQ(alone.ids, (Ids{3, 1, 5}));
    EXPECT_EQ(Ids(out.ids.begin() + 9, out.ids.end()), alone.ids);
    EXPECT_TRUE(std::equal(alone.weights.begin(), alone.weights.end(), out.weights.begin() + 9));
    EXPECT_EQ(out.nan_rows, 2);
    EXPECT_EQ(alone.nan_rows, 0);
  }
}

TEST(FieldCases, TopKAtAndAboveTheExpertCount) {
  RouterSpec spec;
  spec.renormalize = Renormalize::sum;
  for (const Router* r : registry()) {
    const Output two = run(*r, input(spec, 2, 2, {1.0f, 2.0f}));
    EXPECT_EQ(two.ids, (Ids{1, 0}));
    EXPECT_NEAR(two.weights[0] + two.weights[1], 1.0f, 1e-6);
    const Output one = run(*r, input(spec, 1, 1, {-300.0f}));
    EXPECT_EQ(one.ids, Ids{0});
    EXPECT_EQ(one.weights[0], 1.0f);
  }
}

TEST(FieldCases, HighExpertNumbersAreReached) {
  RouterSpec spec;
  for (const Router* r : registry()) {
    std::vector<float> logits(512, -1.0f);
    Ids expected(10);
    for (int i = 0; i < 10; ++i) {
      logits[300 + i] = 10.0f + 0.1f * static_cast<float>(i);
      expected[i] = 309 - i;
    }
    EXPECT_EQ(run(*r, input(spec, 512, 10, logits)).ids, expected);
    for (int64_t num_experts : {1024, 1025, 2048, 5000}) {
      std::vector<float> row(num_experts, 0.0f);
      row[0] = 1.0f;
      row[1023] = 2.0f;
      std::vector<float> next(num_experts, 0.0f);
      next[num_experts - 1] = 4.0f;
      next[512] = 3.0f;
      row.insert(row.end(), next.begin(), next.end());
      const Output out = run(*r, input(spec, num_experts, 2, row));
      EXPECT_EQ(out.ids, (Ids{1023, 0, static_cast<int32_t>(num_experts - 1), 512}));
    }
  }
}

TEST(FieldCases, EveryExpertOfAWideRow) {
  std::vector<float> logits(2048);
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>((i * 1103) % 2048) * 0.01f;
  }
  RouterSpec spec;
  spec.scoring = Scoring::logits;
  for (const Router* r : registry()) {
    const Output out = run(*r, input(spec, 2048, 2048, logits));
    expect_distinct_in_range(out, 2048, 2048);
    EXPECT_TRUE(std::is_sorted(out.weights.rbegin(), out.weights.rend()));
    for (size_t i = 0; i < out.ids.size(); ++i) EXPECT_EQ(out.weights[i], logits[out.ids[i]]);
  }
}

TEST(FieldCases, ManyTokensOfOddExpertCounts) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  for (int64_t num_experts : {3, 60, 384}) {
    for (int64_t tokens : {1, 300, 7000}) {
      std::vector<float> logits(num_experts * tokens);
      for (float& l : logits) l = normal(rng);
      const Input in = input(RouterSpec{}, num_experts, 3, std::move(logits));
      const Output out = run(member("cpu"), in, 2);
      EXPECT_TRUE(out == run(member("ref"), in)) << num_experts << " " << tokens;
    }
  }
}

TEST(FieldCases, SelectionBiasNeverWeighs) {
  const Input in = input(sigmoid_spec(true, Renormalize::none), 4, 1,
                         {logit(0.9), logit(0.1), logit(0.1), logit(0.1)}, {0, 0, 5, 0});
  for (const Router* r : registry()) {
    const Output out = run(*r, in);
    EXPECT_EQ(out.ids, Ids{2});
    EXPECT_NEAR(out.weights[0], 0.1f, 1e-7);
  }
}

TEST(FieldCases, OneExpertAGroup) {
  for (GroupScore kind : {GroupScore::max, GroupScore::top2_sum}) {
    RouterSpec spec = sigmoid_spec(true, Renormalize::sum, 1e-20f);
    spec.num_groups = 8;
    spec.topk_groups = 3;
    spec.group_score = kind;
    const Input in = input(spec, 8, 2, {0, 1, 2, 3, 4, 5, 6, 7}, std::vector<float>(8, 0.0f));
    for (const Router* r : registry()) EXPECT_EQ(run(*r, in).ids, (Ids{7, 6}));
  }
}

TEST(FieldCases, GroupsLimitTheChoice) {
  // Groups of two: {9, -9} has the best expert, {4, 4} the best sum of two.
  RouterSpec spec;
  spec.scoring = Scoring::logits;
  spec.num_groups = 3;
  spec.topk_groups = 1;
  const std::vector<float> logits{9.0f, -9.0f, 4.0f, 4.0f, 5.0f, 2.5f};
  for (const Router* r : registry()) {
    spec.group_score = GroupScore::max;
    EXPECT_EQ(run(*r, input(spec, 6, 2, logits)).ids, (Ids{0, 1}));
    spec.group_score = GroupScore::top2_sum;
    EXPECT_EQ(run(*r, input(spec, 6, 2, logits)).ids, (Ids{2, 3}));
    // Equal groups: the lower one. A NaN is left out of its group's sum, a group of NaNs is last.
    EXPECT_EQ(run(*r, input(spec, 6, 1, {1, 2, 2, 1, 1, 2})).ids, (Ids{1}));
    EXPECT_EQ(run(*r, input(spec, 6, 2, {kNaN, kNaN, kNaN, -kInf, -5, -5})).ids, (Ids{4, 5}));
    EXPECT_EQ(run(*r, input(spec, 6, 1, {kNaN, kNaN, -9, kNaN, -5, -5})).ids, (Ids{2}));
  }
}

TEST(FieldCases, UnderflownSigmoidsStayFinite) {
  for (Renormalize kind : {Renormalize::sum, Renormalize::max_sum}) {
    const Input in =
        input(sigmoid_spec(true, kind, 1e-20f), 4, 2,
              {-120, -120, -120, -120, 0.5f, 2.0f, -1.0f, 1.0f}, {0.1f, 0.3f, 0.2f, 0.0f});
    for (const Router* r : registry()) {
      const Output out = run(*r, in);
      EXPECT_EQ(Ids(out.ids.begin(), out.ids.begin() + 2), (Ids{1, 2}));
      EXPECT_EQ(out.weights[0], 0.0f);
      EXPECT_EQ(out.weights[1], 0.0f);
      EXPECT_EQ(Ids(out.ids.begin() + 2, out.ids.end()), (Ids{1, 3}));
      EXPECT_NEAR(out.weights[2] + out.weights[3], 1.0f, 1e-6);
    }
  }
}

TEST(FieldCases, SoftmaxWithAndWithoutRenormalisation) {
  RouterSpec spec;
  for (const Router* r : registry()) {
    spec.renormalize = Renormalize::none;
    Output out = run(*r, input(spec, 4, 2, {2, 1, 0, -1}));
    EXPECT_EQ(out.ids, (Ids{0, 1}));
    EXPECT_NEAR(out.weights[0], 0.64391426, 1e-7);
    EXPECT_NEAR(out.weights[1], 0.23688282, 1e-7);
    spec.renormalize = Renormalize::sum;
    out = run(*r, input(spec, 4, 2, {2, 1, 0, -1}));
    EXPECT_NEAR(out.weights[0], 0.73105858, 1e-7);
    EXPECT_NEAR(out.weights[1], 0.26894142, 1e-7);
  }
}

TEST(FieldCases, NearTiesNeedFullPrecision) {
  std::vector<float> bias(8, 0.0f);
  bias[0] = 4.0f;
  bias[5] = 4.0078125f;  // 4.0 in bf16
  const Input biased =
      input(sigmoid_spec(true, Renormalize::none), 8, 1, std::vector<float>(8, 0.25f), bias);
  const Input close = input(RouterSpec{}, 4, 1, {10.01f, 10.02f, 0.0f, 1.0f});
  for (const Router* r : registry()) {
    EXPECT_EQ(run(*r, biased).ids, Ids{5});
    EXPECT_EQ(run(*r, close).ids, Ids{1});
  }
}

TEST(FieldCases, BadBiases) {
  std::vector<float> logits{0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<float> nan_bias(8, 0.0f), infinite_bias(8, -kInf);
  nan_bias[3] = kNaN;
  infinite_bias[2] = 0.0f;
  for (const Router* r : registry()) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      const RouterSpec spec = sigmoid_spec(true, Renormalize::sum, 1e-20f);
      const Output out = run(*r, input(spec, 8, 7, logits, nan_bias), 2);
      EXPECT_EQ(std::count(out.ids.begin(), out.ids.end(), 3), 0);
      EXPECT_EQ(out.nan_rows, 0) << "only logits are counted";
      expect_distinct_in_range(out, 8, 7);
      // 2 is the only good one; of the others, all -infinity, the lower ids. Sorted by weight.
      EXPECT_EQ(run(*r, input(spec, 8, 3, logits, infinite_bias), 2).ids, (Ids{2, 1, 0}));
    }
  }
}

TEST(FieldCases, TiesGoToTheLowerId) {
  RouterSpec spec;
  for (const Router* r : registry()) {
    EXPECT_EQ(run(*r, input(spec, 6, 3, {1, 1, 1, 1, 1, 1})).ids, (Ids{0, 1, 2}));
    EXPECT_EQ(run(*r, input(spec, 6, 3, {0, 1, 0, 1, 0, 1})).ids, (Ids{1, 3, 5}));
    EXPECT_EQ(run(*r, input(spec, 4, 2, {-0.0f, 0.0f, -0.0f, 0.0f})).ids, (Ids{0, 1}));
    // Two sigmoids that both round to 1: equal scores, whatever the logits.
    EXPECT_EQ(run(*r, input(sigmoid_spec(false, Renormalize::none), 3, 1, {0, 30, 40})).ids,
              Ids{1});
  }
}

TEST(FieldCases, ColumnsAreSortedByFinalWeight) {
  // The bias turns the selection order round; columns still go by weight.
  const Input in = input(sigmoid_spec(true, Renormalize::none), 3, 3, {3, 2, 1}, {0, 5, 10});
  RouterSpec negative = sigmoid_spec(false, Renormalize::none);
  negative.scaling_factor = -1.0f;
  for (const Router* r : registry()) {
    EXPECT_EQ(run(*r, in).ids, (Ids{0, 1, 2}));
    EXPECT_EQ(run(*r, input(negative, 3, 2, {3, 2, 1})).ids, (Ids{1, 0}));
    // A NaN expert is chosen last and makes only its own weight NaN where nothing is renormalised.
    const Output out =
        run(*r, input(sigmoid_spec(false, Renormalize::none), 3, 3, {kNaN, -kInf, 1.0f}));
    EXPECT_EQ(out.ids, (Ids{2, 1, 0}));
    EXPECT_EQ(out.weights[1], 0.0f);
    EXPECT_TRUE(std::isnan(out.weights[2]));
  }
}

TEST(FieldCases, ZeroTokens) {
  for (const Router* r : registry()) {
    const Output out = run(*r, input(RouterSpec{}, 8, 2, {}), 2);
    EXPECT_TRUE(out.ids.empty());
    EXPECT_EQ(out.nan_rows, 0);
  }
}

}  // namespace
}  // namespace moekit::router
