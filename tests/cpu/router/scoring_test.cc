// The router's own exp, log1p and scoring functions against double precision, and the vector
// kernels against the scalar functions, bit for bit.
#include "router/scoring.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "router/cpu/row_kernels.h"

namespace moekit::router {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::nanf("");

// Distance from the exact value in units of the last place of the nearest float.
double ulps(float got, double exact) {
  const float nearest = static_cast<float>(exact);
  const float up = std::nextafter(std::fabs(nearest), kInf);
  const double ulp = static_cast<double>(up) - std::fabs(nearest);
  return std::fabs(got - exact) / ulp;
}

std::vector<float> sweep() {
  std::vector<float> xs{0.0f, -0.0f, 1e-30f, -1e-30f, 1e-8f, 17.0f, -17.0f, 88.0f, -88.0f};
  for (int i = -12000; i <= 12000; ++i) xs.push_back(static_cast<float>(i) * 0.00917f);
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> small(-1.0f, 1.0f);
  for (int i = 0; i < 20000; ++i) xs.push_back(small(rng));
  return xs;
}

TEST(Scoring, ExpWithinTwoUlp) {
  for (float x : sweep()) {
    const float y = -std::fabs(x);
    EXPECT_LE(ulps(exp_nonpositive(y), std::exp(static_cast<double>(y))), 2.0) << y;
  }
  EXPECT_EQ(exp_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(exp_nonpositive(-kInf), 0.0f);
  EXPECT_EQ(exp_nonpositive(-1e30f), 0.0f);
  EXPECT_GT(exp_nonpositive(-100.0f), 0.0f) << "underflow is gradual";
  EXPECT_TRUE(std::isnan(exp_nonpositive(kNaN)));
  EXPECT_TRUE(std::isnan(exp_nonpositive(-kNaN)));
}

TEST(Scoring, SigmoidAndSqrtSoftplus) {
  for (float x : sweep()) {
    const double d = x;
    EXPECT_LE(ulps(sigmoid(x), 1.0 / (1.0 + std::exp(-d))), 4.0) << x;
    const double softplus = std::max(d, 0.0) + std::log1p(std::exp(-std::fabs(d)));
    if (x >= -87.0f) {
      EXPECT_LE(ulps(sqrt_softplus(x), std::sqrt(softplus)), 4.0) << x;
    } else {  // e^x is subnormal: only its absolute error is bounded, by 4 ulp of the least normal
      const double root = sqrt_softplus(x);
      EXPECT_NEAR(root * root, softplus, 0x1p-147) << x;
    }
  }
  EXPECT_EQ(sigmoid(kInf), 1.0f);
  EXPECT_EQ(sigmoid(-kInf), 0.0f);
  EXPECT_EQ(sigmoid(0.0f), 0.5f);
  EXPECT_TRUE(std::isnan(sigmoid(kNaN)));
  EXPECT_EQ(sqrt_softplus(kInf), kInf);
  EXPECT_EQ(sqrt_softplus(-kInf), 0.0f);
  EXPECT_TRUE(std::isnan(sqrt_softplus(kNaN)));
}

TEST(Scoring, SoftmaxRulesForInfinityAndNaN) {
  struct Case {
    std::vector<float> logits, expected;
  };
  const std::vector<Case> cases{
      {{kInf, 1.0f, kInf, -kInf}, {0.5f, 0.0f, 0.5f, 0.0f}},
      {{-kInf, -kInf, -kInf, -kInf}, {0.25f, 0.25f, 0.25f, 0.25f}},
      {{kNaN, 3.0f, 3.0f}, {kNaN, 0.5f, 0.5f}},
      {{kNaN, kNaN}, {kNaN, kNaN}},
      {{1e38f, -1e38f, 1e38f}, {0.5f, 0.0f, 0.5f}},
      {{-kInf, 7.0f}, {0.0f, 1.0f}},
      {{-5.0f}, {1.0f}},
  };
  for (const Case& c : cases) {
    std::vector<float> out(c.logits.size());
    softmax(c.logits.data(), static_cast<int64_t>(out.size()), out.data());
    for (size_t i = 0; i < out.size(); ++i) {
      if (std::isnan(c.expected[i])) {
        EXPECT_TRUE(std::isnan(out[i]));
      } else {
        EXPECT_EQ(out[i], c.expected[i]);
      }
    }
  }
}

// Values of all kinds, in every position of a vector.
std::vector<float> awkward_row(int64_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 10.0f);
  const float special[] = {kInf, -kInf, kNaN, 0.0f, -0.0f, 1e-42f, -120.0f, 300.0f, 3e38f};
  std::vector<float> row(count);
  for (float& x : row) x = rng() % 4 == 0 ? special[rng() % 9] : normal(rng);
  return row;
}

TEST(RowKernels, GiveTheBitsOfTheScalarFunctions) {
  for (int k = 0; k < num_row_kernels(); ++k) {
    const RowKernels& kernels = row_kernels(k);
    for (int64_t count : {1, 2, 7, 8, 15, 16, 17, 31, 33, 60, 128, 257}) {
      for (uint32_t seed = 0; seed < 20; ++seed) {
        std::vector<float> row = awkward_row(count, seed);
        if (seed % 2 == 0) {  // a row without NaN and +inf as well: those hide all other scores
          for (float& x : row) x = std::isnan(x) || x == kInf ? 1.5f : x;
        }
        std::vector<float> expected(count), got(count);
        for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrt_softplus}) {
          for (int64_t i = 0; i < count; ++i) {
            expected[i] = s == Scoring::sigmoid ? sigmoid(row[i]) : sqrt_softplus(row[i]);
          }
          if (s == Scoring::softmax) softmax(row.data(), count, expected.data());
          kernels.score(s, row.data(), count, got.data());
          for (int64_t i = 0; i < count; ++i) {
            if (std::isnan(expected[i])) {
              ASSERT_TRUE(std::isnan(got[i]));
              continue;
            }
            ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(expected[i]))
                << "kernels " << k << " count " << count << " element " << i << ": " << row[i];
          }
        }
      }
    }
  }
}

TEST(RowKernels, KeysFollowTheTotalOrder) {
  const std::vector<float> ascending{-kInf,  -3e38f, -1.0f, -1e-38f, -1e-42f, 0.0f,
                                     1e-42f, 1e-38f, 1.0f,  3e38f,   kInf};
  std::vector<int32_t> keys(ascending.size());
  const float odd[] = {0.0f, -0.0f, kNaN, -kNaN};
  int32_t odd_keys[4];
  for (int k = 0; k < num_row_kernels(); ++k) {
    row_kernels(k).order(ascending.data(), nullptr, static_cast<int64_t>(keys.size()), keys.data());
    for (size_t i = 1; i < keys.size(); ++i) EXPECT_LT(keys[i - 1], keys[i]);
    row_kernels(k).order(odd, nullptr, 4, odd_keys);
    EXPECT_EQ(odd_keys[0], odd_keys[1]);
    EXPECT_EQ(odd_keys[2], kNanKey);
    EXPECT_EQ(odd_keys[3], kNanKey);
    EXPECT_GT(keys[0], kNanKey);
  }
}

}  // namespace
}  // namespace moekit::router
