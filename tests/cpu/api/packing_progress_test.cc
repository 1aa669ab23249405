// PlanOptions::packing_progress: who is told, and that telling changes no bit.
#include <gtest/gtest.h>

#include <vector>

#include "moekit/problems.h"
#include "moekit/tools.h"

namespace moekit {
namespace {

using Steps = std::vector<std::pair<int64_t, int64_t>>;

std::vector<float> output_of(const LayerSource& source, PlanOptions options, int ranks,
                             Steps* steps) {
  options.num_threads = 1;
  if (steps != nullptr)
    options.packing_progress = [=](int64_t done, int64_t total) {
      steps->emplace_back(done, total);
    };
  const RankedLayer layer(source, options, ranks, 4);
  const OwnedTensor hidden = random_hidden(4, source.config.hidden, 3);
  RankedInputs inputs;
  inputs.hidden = hidden.view;
  RankedOutputs outputs;
  layer.run(inputs, outputs);
  return outputs.output;
}

void expect_steps(const Steps& steps, size_t at_least) {
  ASSERT_GE(steps.size(), at_least);
  EXPECT_EQ(steps.front().first, 0);
  EXPECT_EQ(steps.back().first, steps.back().second);
  for (size_t i = 1; i < steps.size(); ++i) {
    EXPECT_LT(steps[i - 1].first, steps[i].first);
    EXPECT_EQ(steps[i].second, steps[0].second);
  }
}

TEST(PackingProgress, PartsGiveTheBitsOfTheWhole) {
  // About 47 MiB packed: two parts and more.
  const LayerSource source =
      synthetic_source(parse_problem("E=24,k=2,H=512,I=640,act=silu,weights=bf16"), 5, 1);
  Steps steps;
  EXPECT_EQ(output_of(source, {}, 1, nullptr), output_of(source, {}, 1, &steps));
  expect_steps(steps, 3);
  EXPECT_GE(steps.back().second, int64_t{3} * 24 * 512 * 640 * 2);
}

TEST(PackingProgress, OfRanksTheFirstTells) {
  const LayerSource source =
      synthetic_source(parse_problem("E=8,k=2,H=64,I=32,act=silu,weights=nvfp4"), 5, 1);
  Steps one, two;
  EXPECT_EQ(output_of(source, {}, 1, &one), output_of(source, {}, 2, &two));
  expect_steps(one, 2);
  expect_steps(two, 2);
  EXPECT_LT(two.back().second, one.back().second);
}

TEST(PackingProgress, NobodyIsToldWhereNothingIsPacked) {
  const LayerSource source =
      synthetic_source(parse_problem("E=8,k=2,H=64,I=32,act=silu,weights=bf16"), 5, 1);
  Steps steps;
  PlanOptions options;
  options.backend = "ref";
  output_of(source, options, 1, &steps);
  EXPECT_TRUE(steps.empty());
}

}  // namespace
}  // namespace moekit
