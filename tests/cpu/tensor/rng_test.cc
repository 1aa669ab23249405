#include "tensor/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace moekit {
namespace {

// Published known answers of Philox4x32-10 (Random123's test vectors).
TEST(Rng, KnownAnswers) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, Moments) {
  const Rng rng(7, 3);
  const int n = 200000;
  double mean = 0;
  double square = 0;
  double uniform = 0;
  double largest = 0;
  for (int i = 0; i < n; ++i) {
    const double z = rng.normal(static_cast<uint64_t>(i));
    mean += z / n;
    square += z * z / n;
    largest = std::max(largest, std::fabs(z));
    const double u = rng.uniform(static_cast<uint64_t>(i));
    ASSERT_TRUE(u >= 0 && u < 1);
    uniform += u / n;
  }
  EXPECT_NEAR(mean, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(square, 1, 0.02);
  EXPECT_NEAR(uniform, 0.5, 5 / std::sqrt(12.0 * n));
  EXPECT_GT(largest, 3.5);
  EXPECT_LT(largest, 4.91);
}

TEST(Rng, SeedsStreamsAndIndicesDiffer) {
  std::set<uint64_t> seen;
  for (uint64_t seed : {0u, 1u}) {
    for (uint64_t stream : {0u, 1u, 2u}) {
      for (uint64_t index = 0; index < 50; ++index) seen.insert(Rng(seed, stream).bits(index));
    }
  }
  seen.insert(Rng(uint64_t{1} << 32, 0).bits(0));
  seen.insert(Rng(0, uint64_t{1} << 32).bits(0));
  seen.insert(Rng(0, 0).bits(uint64_t{1} << 32));
  EXPECT_EQ(seen.size(), 303u);
}

TEST(Rng, BelowCoversItsRange) {
  std::set<uint64_t> seen;
  for (uint64_t i = 0; i < 500; ++i) {
    const uint64_t value = Rng(5, 0).below(i, 7);
    ASSERT_LT(value, 7u);
    seen.insert(value);
  }
  EXPECT_EQ(seen.size(), 7u);
}

}  // namespace
}  // namespace moekit
