// Every member of a closed set has a name of its own.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "moekit/quant.h"
#include "problem/support.h"

namespace moekit {
namespace {

template <typename Enum>
void expect_distinct_names(Enum last) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    const std::string name = to_string(static_cast<Enum>(i));
    EXPECT_NE(name, "?") << i;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_STREQ(to_string(static_cast<Enum>(static_cast<int>(last) + 1)), "?");
}

TEST(Names, AreDistinctAndComplete) {
  expect_distinct_names(ReasonCode::self_test);
  expect_distinct_names(WeightFormat::int8_channel);
  expect_distinct_names(ActivationFormat::nvfp4);
  EXPECT_STREQ(to_string(WeightFormat::mxfp8_e5m2), "mxfp8_e5m2");
  EXPECT_STREQ(to_string(ActivationFormat::fp8_token), "fp8_token");
  EXPECT_STREQ(to_string(ReasonCode::quant_duty), "quant_duty");
}

TEST(Support, CollectsEveryReason) {
  Support s;
  EXPECT_TRUE(s.ok());
  s.require(true, ReasonCode::isa, "unused");
  s.require(false, ReasonCode::shape, "hidden {} is no multiple of {}", 100, 64);
  s.require(false, ReasonCode::router, "no hash routing");
  Support other;
  other.add(s);
  ASSERT_EQ(other.reasons().size(), 2u);
  EXPECT_EQ(other.reasons()[0].code, ReasonCode::shape);
  EXPECT_EQ(other.reasons()[0].text, "hidden 100 is no multiple of 64");
  EXPECT_FALSE(other.ok());
}

}  // namespace
}  // namespace moekit
