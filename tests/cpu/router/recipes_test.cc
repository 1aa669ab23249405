// Every recipe against a model in double precision, refusals, hash routing.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "cpu/router/run_router.h"
#include "moekit/error.h"

namespace moekit::router {
namespace {

struct Recipe {
  const char* name;
  std::function<void(RouterSpec&)> set;
  int64_t num_experts = 32;
  int64_t top_k = 4;
};

void grouped(RouterSpec& s, int32_t groups, int32_t kept, GroupScore score) {
  s.num_groups = groups;
  s.topk_groups = kept;
  s.group_score = score;
}

std::function<void(RouterSpec&)> p_norm(float p) {
  return [p](RouterSpec& s) {
    s.renormalize = Renormalize::p_norm;
    s.p = p;
  };
}

std::vector<Recipe> recipes() {
  return {
      {"softmax", [](RouterSpec&) {}},
      {"softmax_sum", [](RouterSpec& s) { s.renormalize = Renormalize::sum; }, 128, 8},
      {"softmax_p1", p_norm(1.0f), 16},
      {"softmax_p2", p_norm(2.0f), 16},
      {"softmax_p3", p_norm(3.0f)},
      {"softmax_pinf", p_norm(HUGE_VALF)},
      {"selected_logits",
       [](RouterSpec& s) {
         s.scoring = Scoring::logits;
         s.select_on = SelectOn::logits;
         s.weight = RouterWeight::softmax_selected;
       },
       128},
      {"sigmoid_of_logit",
       [](RouterSpec& s) {
         s.select_on = SelectOn::logits;
         s.weight = RouterWeight::sigmoid_logit;
       },
       16, 1},
      {"logits", [](RouterSpec& s) { s.scoring = Scoring::logits; }},
      {"sigmoid_bias",
       [](RouterSpec& s) {
         s.scoring = Scoring::sigmoid;
         s.renormalize = Renormalize::sum;
         s.has_selection_bias = true;
       },
       256, 8},
      {"sigmoid_groups",
       [](RouterSpec& s) {
         s.scoring = Scoring::sigmoid;
         s.renormalize = Renormalize::sum;
         s.epsilon = 1e-20f;
         s.scaling_factor = 2.5f;
         s.has_selection_bias = true;
         grouped(s, 8, 4, GroupScore::top2_sum);
       },
       256, 8},
      {"softmax_groups",
       [](RouterSpec& s) {
         s.scaling_factor = 16.0f;
         grouped(s, 8, 3, GroupScore::max);
       },
       160, 6},
      {"sqrt_softplus_bias",
       [](RouterSpec& s) {
         s.scoring = Scoring::sqrt_softplus;
         s.renormalize = Renormalize::max_sum;
         s.epsilon = 1e-20f;
         s.scaling_factor = 1.5f;
         s.has_selection_bias = true;
       },
       384, 6},
      {"odd_groups",
       [](RouterSpec& s) {
         s.scoring = Scoring::sigmoid;
         grouped(s, 5, 2, GroupScore::top2_sum);
       },
       55, 21},
      {"all_of_many",
       [](RouterSpec& s) {
         s.scoring = Scoring::sqrt_softplus;
         s.renormalize = Renormalize::sum;
       },
       300, 300},
  };
}

Input random_input(const Recipe& recipe, int64_t tokens, uint32_t seed) {
  Input in;
  recipe.set(in.spec);
  in.num_experts = recipe.num_experts;
  in.top_k = recipe.top_k;
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 2.0f);
  in.logits.resize(tokens * in.num_experts);
  for (float& l : in.logits) l = normal(rng);
  if (in.spec.has_selection_bias) {
    in.bias.resize(in.num_experts);
    for (float& b : in.bias) b = 0.1f * normal(rng);
  }
  return in;
}

// The recipe in double precision, one row.
struct Model {
  const Input& in;
  const float* logits;
  std::vector<double> scores, selection;

  Model(const Input& input, int64_t row)
      : in(input), logits(input.logits.data() + row * input.num_experts) {
    double sum = 0;
    for (int64_t e = 0; e < in.num_experts; ++e) {
      const double l = logits[e];
      const double soft = std::log1p(std::exp(l));
      scores.push_back(in.spec.scoring == Scoring::softmax   ? std::exp(l)
                       : in.spec.scoring == Scoring::sigmoid ? 1 / (1 + std::exp(-l))
                       : in.spec.scoring == Scoring::logits  ? l
                                                             : std::sqrt(soft));
      sum += scores.back();
    }
    for (int64_t e = 0; e < in.num_experts; ++e) {
      if (in.spec.scoring == Scoring::softmax) scores[e] /= sum;
      const double base = in.spec.select_on == SelectOn::scores ? scores[e] : logits[e];
      selection.push_back(base + (in.bias.empty() ? 0.0 : in.bias[e]));
    }
  }

  std::vector<bool> allowed() const {
    std::vector<bool> ok(in.num_experts, true);
    if (in.spec.num_groups <= 1) return ok;
    const int64_t size = in.num_experts / in.spec.num_groups;
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < in.spec.num_groups; ++g) {
      std::vector<double> sorted(selection.begin() + g * size, selection.begin() + (g + 1) * size);
      std::sort(sorted.rbegin(), sorted.rend());
      const bool two = in.spec.group_score == GroupScore::top2_sum && size > 1;
      groups.emplace_back(-(sorted[0] + (two ? sorted[1] : 0.0)), g);
    }
    std::sort(groups.begin(), groups.end());
    for (int64_t i = in.spec.topk_groups; i < in.spec.num_groups; ++i) {
      std::fill_n(ok.begin() + groups[i].second * size, size, false);
    }
    return ok;
  }

  // (weight, id) in output order.
  std::vector<std::pair<double, int32_t>> route() const {
    const std::vector<bool> ok = allowed();
    std::vector<std::pair<double, int32_t>> order;
    for (int32_t e = 0; e < in.num_experts; ++e) {
      if (ok[e]) order.emplace_back(-selection[e], e);
    }
    std::sort(order.begin(), order.end());
    order.resize(in.top_k);
    double soft_sum = 0, sum = 0, power_sum = 0, largest = 0;
    for (auto& [w, e] : order) soft_sum += std::exp(static_cast<double>(logits[e]));
    for (auto& [w, e] : order) {
      const double l = logits[e];
      w = in.spec.weight == RouterWeight::scores             ? scores[e]
          : in.spec.weight == RouterWeight::softmax_selected ? std::exp(l) / soft_sum
                                                             : 1 / (1 + std::exp(-l));
      sum += w;
      power_sum += std::pow(std::fabs(w), in.spec.p);
      largest = std::max(largest, std::fabs(w));
    }
    const double norm = std::isinf(in.spec.p) ? largest : std::pow(power_sum, 1.0 / in.spec.p);
    const double divisor = in.spec.renormalize == Renormalize::none     ? 1.0
                           : in.spec.renormalize == Renormalize::p_norm ? norm
                                                                        : sum + in.spec.epsilon;
    for (auto& [w, e] : order) w *= in.spec.scaling_factor / divisor;
    std::sort(order.begin(), order.end(), [](auto a, auto b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    return order;
  }
};

class Recipes : public ::testing::TestWithParam<Recipe> {};

TEST_P(Recipes, FollowTheModel) {
  constexpr int64_t kTokens = 40;
  const Input in = random_input(GetParam(), kTokens, 11);
  for (const Router* router : registry()) {
    const Output out = run(*router, in, 2);
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto expected = Model(in, t).route();
      for (int64_t j = 0; j < in.top_k; ++j) {
        const int64_t i = t * in.top_k + j;
        // Near ties may fall either way in fp32: then the weights are equal to rounding, which the
        // next line sees. Each of k scores carries a few ulp, a sum of k k/2 more.
        const double tolerance = 1e-6 + 3e-8 * static_cast<double>(in.top_k);
        EXPECT_NEAR(out.weights[i], expected[j].first, tolerance * std::fabs(expected[j].first))
            << router->name() << " row " << t << " column " << j;
        if (out.ids[i] != expected[j].second) {
          const auto twin = std::find_if(expected.begin(), expected.end(),
                                         [&](auto& p) { return p.second == out.ids[i]; });
          ASSERT_NE(twin, expected.end()) << router->name() << " row " << t << " column " << j;
          EXPECT_NEAR(twin->first, expected[j].first, tolerance * std::fabs(twin->first));
        }
      }
    }
  }
}

// Quantizes to bf16 (by truncation) so that equal logits are common.
void coarsen(std::vector<float>& values) {
  for (float& v : values) v = std::bit_cast<float>(std::bit_cast<uint32_t>(v) & 0xffff0000u);
}

std::vector<Input> adversarial_inputs(const Recipe& recipe) {
  std::vector<Input> inputs;
  for (uint32_t seed = 0; seed < 4; ++seed) inputs.push_back(random_input(recipe, 37, seed));
  inputs.push_back(random_input(recipe, 1, 9));
  Input coarse = random_input(recipe, 37, 5);
  coarsen(coarse.logits);
  coarsen(coarse.bias);
  inputs.push_back(coarse);
  Input equal = random_input(recipe, 5, 6);
  std::fill(equal.logits.begin(), equal.logits.end(), 0.75f);
  inputs.push_back(equal);
  Input few = random_input(recipe, 37, 7);  // three values only
  for (float& l : few.logits) l = l > 1.0f ? 1.0f : l < -1.0f ? -1.0f : 0.0f;
  for (float& b : few.bias) b = 0.0f;
  inputs.push_back(few);
  Input wild = random_input(recipe, 37, 8);
  const float special[] = {HUGE_VALF, -HUGE_VALF, std::nanf(""), 0.0f, -0.0f, -150.0f, 3e38f};
  std::mt19937 rng(1);
  for (float& l : wild.logits) l = rng() % 3 == 0 ? special[rng() % 7] : l;
  for (float& b : wild.bias) b = rng() % 5 == 0 ? special[rng() % 7] : b;
  inputs.push_back(wild);
  for (float& l : wild.logits) l = special[rng() % 3];
  inputs.push_back(wild);
  Input near = random_input(recipe, 37, 10);  // neighbours in the last place
  for (float& l : near.logits)
    l = std::bit_cast<float>(0x3f800000u + static_cast<uint32_t>(rng() % 4));
  for (float& b : near.bias) b = 0.0f;
  inputs.push_back(near);
  return inputs;
}

TEST_P(Recipes, CpuHasTheBitsOfTheReference) {
  for (const Input& in : adversarial_inputs(GetParam())) {
    const Output expected = run(member("ref"), in);
    for (int threads : {0, 1, 2, 3}) {
      EXPECT_TRUE(run(member("cpu"), in, threads) == expected) << threads << " threads";
    }
  }
}

TEST_P(Recipes, RowsAreIndependent) {
  const Input in = random_input(GetParam(), 400, 12);
  const Output all = run(member("cpu"), in, 3);
  for (int64_t t : {0, 1, 31, 32, 255, 399}) {
    Input row = in;
    row.logits.assign(in.logits.begin() + t * in.num_experts,
                      in.logits.begin() + (t + 1) * in.num_experts);
    const Output alone = run(member("cpu"), row, 1);
    EXPECT_TRUE(std::equal(alone.ids.begin(), alone.ids.end(), all.ids.begin() + t * in.top_k));
    EXPECT_EQ(std::memcmp(alone.weights.data(), all.weights.data() + t * in.top_k,
                          in.top_k * sizeof(float)),
              0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Recipes, ::testing::ValuesIn(recipes()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(HashRouting, TakesIdsFromTheTable) {
  Input in;
  in.spec.hash_routing = true;
  in.spec.scoring = Scoring::sqrt_softplus;
  in.spec.renormalize = Renormalize::sum;
  in.spec.epsilon = 1e-20f;
  in.spec.scaling_factor = 1.5f;
  in.num_experts = 4;
  in.top_k = 2;
  in.logits = {9, 9, 0, 1, 0, 0, 0, 0, 9, 0, 0, 9};
  in.hash_table = {2, 3, 3, 1, 0, 2};
  in.token_ids = {0, 1, 2};
  const double a = std::sqrt(std::log1p(std::exp(1.0))), b = std::sqrt(std::log(2.0));
  for (const Router* router : registry()) {
    const Output out = run(*router, in, 2);
    // Row 0: experts 2 and 3, the heavier first. Row 1: equal weights, the lower id first.
    EXPECT_EQ(out.ids, (std::vector<int32_t>{3, 2, 1, 3, 0, 2}));
    EXPECT_NEAR(out.weights[0], 1.5 * a / (a + b), 1e-6);
    EXPECT_NEAR(out.weights[1], 1.5 * b / (a + b), 1e-6);
    EXPECT_EQ(out.weights[2], 0.75f);
    EXPECT_EQ(out.weights[3], 0.75f);
  }
}

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    return e.what();
  }
  return "accepted";
}

TEST(HashRouting, RefusesWhatIsOutsideTheTable) {
  Input in;
  in.spec.hash_routing = true;
  in.num_experts = 4;
  in.top_k = 2;
  in.logits.assign(8, 0.0f);
  in.hash_table = {2, 3, 3, 1};
  for (const Router* router : registry()) {
    in.token_ids = {0, 2};
    EXPECT_EQ(refusal([&] { run(*router, in); }),
              "row 1: token id 2 is outside the hash table's [0, 2)");
    in.token_ids = {-1, 0};
    EXPECT_NE(refusal([&] { run(*router, in); }).find("token id -1"), std::string::npos);
    in.token_ids = {0, 0};
    Input bad = in;
    bad.hash_table[1] = 4;
    EXPECT_EQ(refusal([&] { run(*router, bad); }),
              "hash table row 0 slot 1: expert 4 is outside [0, 4)");
    in.token_ids.clear();
    EXPECT_NE(refusal([&] { run(*router, in); }).find("needs token ids"), std::string::npos);
  }
}

TEST(Run, RefusesAMissingOrUnexpectedBias) {
  Input in = random_input({"", [](RouterSpec& s) { s.has_selection_bias = true; }, 8, 2}, 1, 1);
  for (const Router* router : registry()) {
    Input without = in;
    without.bias.clear();
    EXPECT_NE(refusal([&] { run(*router, without); }).find("brings none"), std::string::npos);
    Input unexpected = in;
    unexpected.spec.has_selection_bias = false;
    EXPECT_NE(refusal([&] { run(*router, unexpected); }).find("brings one"), std::string::npos);
  }
}

struct Refused {
  const char* text;  ///< part of the message
  int64_t num_experts, top_k;
  std::function<void(RouterSpec&)> set = [](RouterSpec&) {};
};

TEST(Validate, RefusesWithTheFigures) {
  auto groups = [](int32_t all, int32_t kept) {
    return [=](RouterSpec& s) { grouped(s, all, kept, GroupScore::max); };
  };
  const std::vector<Refused> cases{
      {"[1, 3] (the number of experts), got 4", 3, 4},
      {"[1, 3] (the number of experts), got 0", 3, 0},
      {"experts, got 0", 0, 1},
      {"experts, got 4294967296", int64_t{1} << 32, 1},
      {"10 experts can't be split into 4 equal groups", 10, 2, groups(4, 2)},
      {"[1, 4] (the number of groups), got 5", 8, 2, groups(4, 5)},
      {"[1, 4] (the number of groups), got 0", 8, 2, groups(4, 0)},
      {"top_k 5 is above the 4 experts of the 2 kept groups", 8, 5, groups(4, 2)},
      {"4 equal groups", 2, 1, groups(4, 1)},
      {"can't be negative, got -1", 8, 2, groups(-1, 0)},
      {"2 groups are to be kept", 8, 2, groups(0, 2)},
      {"can't be limited to groups", 8, 2,
       [](RouterSpec& s) {
         s.hash_routing = true;
         grouped(s, 4, 2, GroupScore::max);
       }},
      {"scaling factor must be finite", 8, 2,
       [](RouterSpec& s) { s.scaling_factor = std::nanf(""); }},
      {"not negative, got -1", 8, 2, [](RouterSpec& s) { s.epsilon = -1.0f; }},
      {"above 0, got 0", 8, 2,
       [](RouterSpec& s) {
         s.renormalize = Renormalize::p_norm;
         s.p = 0.0f;
       }},
  };
  for (const Refused& c : cases) {
    RouterSpec spec;
    c.set(spec);
    const std::string text = refusal([&] { validate(spec, c.num_experts, c.top_k); });
    EXPECT_NE(text.find(c.text), std::string::npos) << text << " for " << c.text;
  }
  RouterSpec ungrouped;
  grouped(ungrouped, 1, 1, GroupScore::max);
  EXPECT_NO_THROW(validate(ungrouped, 8, 8));
  EXPECT_NO_THROW(validate(RouterSpec{}, 2048, 2048));
}

}  // namespace
}  // namespace moekit::router
