// Covering arrays and the cases that run_combos makes of them.
#include "moekit/combos.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "api/covering.h"
#include "moekit/error.h"

namespace moekit::test {
namespace {

using api::Levels;

using ValuePair = std::tuple<size_t, int, size_t, int>;

std::set<ValuePair> pairs_of(const std::vector<Levels>& cases) {
  std::set<ValuePair> pairs;
  for (const Levels& levels : cases) {
    for (size_t d = 0; d < levels.size(); ++d) {
      for (size_t e = d + 1; e < levels.size(); ++e) pairs.insert({d, levels[d], e, levels[e]});
    }
  }
  return pairs;
}

size_t count_pairs(const std::vector<int>& sizes) {
  size_t count = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    for (size_t e = d + 1; e < sizes.size(); ++e) count += static_cast<size_t>(sizes[d] * sizes[e]);
  }
  return count;
}

TEST(Covering, EveryTwoValuesMeet) {
  for (const std::vector<int>& sizes :
       {std::vector<int>{3, 3}, {2, 2, 2, 2}, {5, 4, 3, 2, 1}, {12, 9, 7, 7, 3, 2}, {1, 1}}) {
    const auto cases = api::cover_pairs(sizes, 1, [](const Levels&) { return true; });
    EXPECT_EQ(pairs_of(cases).size(), count_pairs(sizes));
    for (const Levels& levels : cases) {
      for (size_t d = 0; d < sizes.size(); ++d) {
        EXPECT_GE(levels[d], 0);
        EXPECT_LT(levels[d], sizes[d]);
      }
    }
  }
}

TEST(Covering, TakesFarFewerCasesThanTheProduct) {
  const std::vector<int> sizes = {12, 10, 9, 7, 7, 3, 2, 2};
  const auto cases = api::cover_pairs(sizes, 0, [](const Levels&) { return true; });
  EXPECT_GE(cases.size(), 120u);  // the two largest dimensions alone need as many
  EXPECT_LE(cases.size(), 200u);
}

TEST(Covering, IsDeterministicAndSeeded) {
  const std::vector<int> sizes = {5, 4, 3, 3};
  const auto all = [](const Levels&) { return true; };
  EXPECT_EQ(api::cover_pairs(sizes, 4, all), api::cover_pairs(sizes, 4, all));
  EXPECT_NE(api::cover_pairs(sizes, 4, all), api::cover_pairs(sizes, 5, all));
}

TEST(Covering, LooksForCasesThatCanRun) {
  // Value 0 of the first dimension goes with value 0 of the second only.
  const auto accepts = [](const Levels& l) { return l[0] != 0 || l[1] == 0; };
  const std::vector<int> sizes = {4, 5, 6, 3};
  const auto cases = api::cover_pairs(sizes, 2, accepts);
  std::vector<Levels> good;
  size_t refused = 0;
  for (const Levels& levels : cases) accepts(levels) ? good.push_back(levels) : void(++refused);
  EXPECT_EQ(refused, 4u) << "each impossible pair once";
  EXPECT_EQ(pairs_of(good).size(), count_pairs(sizes) - 4);
}

TEST(Covering, OneDimensionAndNone) {
  const auto all = [](const Levels&) { return true; };
  EXPECT_EQ(api::cover_pairs({3}, 0, all), (std::vector<Levels>{{0}, {1}, {2}}));
  EXPECT_TRUE(api::cover_pairs({}, 0, all).empty());
  EXPECT_THROW(api::cover_pairs({2, 0}, 0, all), Error);
}

std::vector<ComboResult> results_of(const ComboRequest& request) {
  std::vector<ComboResult> results;
  run_combos(request, [&](const ComboResult& result) { results.push_back(result); });
  return results;
}

ComboRequest one_case(const std::string& prepare, const std::string& experts, int ranks) {
  ComboRequest request;
  request.prepare = prepare;
  request.experts = experts;
  request.problem = parse_problem("E=6,k=2,H=64,I=32,weights=nvfp4,tokens=5,routing=holes");
  request.ranks = ranks;
  request.wire = Wire::automatic;
  request.combine = Combine::slots;
  request.combine_dtype = DType::f32;
  return request;
}

TEST(Combos, ANamedPairRunsAlone) {
  const auto results = results_of(one_case("all2all", "cpu", 3));
  ASSERT_EQ(results.size(), 1u);
  const ComboResult& result = results[0];
  EXPECT_EQ(result.verdict, ComboVerdict::passed) << testing::PrintToString(result.reasons);
  EXPECT_TRUE(result.same_bits);
  EXPECT_GT(result.bound, 0);
  EXPECT_LE(result.worst_row_rms, result.bound);
  EXPECT_EQ(result.combo.tokens_total, 15);
  EXPECT_EQ(spec_of(parse_problem(result.combo.problem)), result.combo.problem);
}

TEST(Combos, APairThatCannotIsRefusedWithReasons) {
  const auto results = results_of(one_case("local", "cpu", 2));
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].verdict, ComboVerdict::refused);
  EXPECT_FALSE(results[0].reasons.empty());
}

TEST(Combos, TokensOfAllRanksTogether) {
  ComboRequest request = one_case("all2all", "cpu", 4);
  request.tokens_total = 2;  // ranks 2 and 3 have none
  const auto results = results_of(request);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].verdict, ComboVerdict::passed) << testing::PrintToString(results[0].reasons);
  EXPECT_EQ(results[0].combo.tokens_total, 2);
  EXPECT_NE(results[0].combo.flags.find("--tokens-total 2"), std::string::npos);
}

TEST(Combos, TheProductHasEveryCombination) {
  ComboRequest request = one_case("", "cpu", 2);
  request.wire.reset();
  request.combine.reset();
  request.combine_dtype.reset();
  request.prepare = "all2all";
  request.full = true;
  const auto results = results_of(request);
  EXPECT_EQ(results.size(), 7u * 2 * 2);
  std::set<std::string> flags;
  for (const ComboResult& result : results) {
    flags.insert(result.combo.flags);
    EXPECT_NE(result.verdict, ComboVerdict::failed)
        << result.combo.flags << testing::PrintToString(result.reasons);
  }
  EXPECT_EQ(flags.size(), results.size());
}

// Rows that travel in a format of the wire's own are values to the experts, whatever these read.
TEST(Combos, ALossyWireIsReadAsTheReferenceReadsIt) {
  for (const char* activations : {"bf16", "f32", "fp8_tensor", "mxfp4", "fp8_block"}) {
    for (const Wire wire : {Wire::fp8_token, Wire::fp8_block, Wire::mxfp8, Wire::nvfp4}) {
      ComboRequest request = one_case("all2all", "cpu", 2);
      request.problem = parse_problem(
          std::string(
              "E=6,k=1,H=300,I=64,router=sigmoid_input,weights=bf16,tokens=5,activations=") +
          activations);
      request.wire = wire;
      for (const ComboResult& result : results_of(request)) {
        EXPECT_EQ(result.verdict, ComboVerdict::passed)
            << result.combo.flags << " " << testing::PrintToString(result.reasons);
        EXPECT_TRUE(result.same_bits);
      }
    }
  }
}

TEST(Combos, WrongNamesAndCapacitiesAreArguments) {
  EXPECT_THROW(results_of(one_case("no such", "cpu", 1)), Error);
  EXPECT_THROW(results_of(one_case("local", "no such", 1)), Error);
  ComboRequest request = one_case("local", "cpu", 1);
  request.options.capacity = CapacityMode::drop;
  request.options.capacity_rows = 4;
  EXPECT_THROW(results_of(request), Error);
}

}  // namespace
}  // namespace moekit::test
