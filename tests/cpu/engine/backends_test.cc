// Every registered experts member x one table of problems x the reference, within the derived
// bound.
#include <gtest/gtest.h>

#include "experts/experts.h"
#include "problem/error_bound.h"
#include "support/problems.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

std::vector<std::string> all_problems() {
  std::vector<std::string> all = small_problems();
  for (const auto& more :
       {problems_of_every_weight_format(), problems_of_every_activation_format()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

class BackendsTest : public testing::TestWithParam<std::string> {};

TEST_P(BackendsTest, AgreeWithTheReference) {
  const LayerSource layer = make_layer(GetParam());
  const std::vector<float> rows = make_rows(layer, 19);
  const std::vector<float> reference = run_layer(layer, options_for("ref"), 1, rows);
  for (const experts::Experts* member : experts::registry()) {
    const std::string name(member->name());
    PlanOptions options = options_for(name);
    const Explanation explanation = explain_plan(layer, options, 1, 19);
    if (!explanation.chosen) continue;  // a refusal has reasons; oracle_test looks at them
    const std::vector<float> output = run_layer(layer, options, 1, rows);
    EXPECT_LE(worst_row(output, reference, layer.config.hidden), row_error_bound(layer.config))
        << name;
  }
}

TEST_P(BackendsTest, SlotsGiveTheSameBitsForAnyRanksThreadsAndPrepare) {
  const LayerSource layer = make_layer(GetParam());
  const std::vector<float> rows = make_rows(layer, 13);
  for (const char* backend : {"cpu", "ref"}) {
    const std::vector<float> one = run_layer(layer, options_for(backend, 1), 1, rows);
    EXPECT_EQ(run_layer(layer, options_for(backend, 3), 1, rows), one) << backend << ", 3 threads";
    for (int ranks : {2, 3}) {
      for (const char* prepare : {"allgather", "all2all"}) {
        PlanOptions options = options_for(backend, 1);
        options.prepare = prepare;
        options.placement = ranks == 2 ? "linear" : "round_robin";
        EXPECT_EQ(run_layer(layer, options, ranks, rows), one)
            << backend << ", " << prepare << ", " << ranks << " ranks";
      }
    }
  }
  const PlanOptions batched = options_for("cpu_batched", 1);
  if (!explain_plan(layer, batched, 1, 13).chosen) return;  // Batched rows can't weight their input
  EXPECT_EQ(run_layer(layer, batched, 1, rows), run_layer(layer, options_for("cpu", 1), 1, rows))
      << "Batched rows";
}

TEST_P(BackendsTest, ARowAloneHasTheBitsOfTheRowInABatch) {
  const LayerSource layer = make_layer(GetParam());
  const int64_t hidden = layer.config.hidden;
  const std::vector<float> rows = make_rows(layer, 37);
  const std::vector<float> together = run_layer(layer, options_for("cpu"), 1, rows);
  for (int64_t t : {int64_t{0}, int64_t{17}, int64_t{36}}) {
    const std::vector<float> row(rows.begin() + t * hidden, rows.begin() + (t + 1) * hidden);
    const std::vector<float> alone = run_layer(layer, options_for("cpu"), 1, row);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + t * hidden))
        << "row " << t;
  }
}

TEST_P(BackendsTest, RankSumsStayWithinTheBound) {
  const LayerSource layer = make_layer(GetParam());
  const std::vector<float> rows = make_rows(layer, 11);
  const std::vector<float> one = run_layer(layer, options_for("cpu"), 1, rows);
  PlanOptions options = options_for("cpu", 1);
  options.combine = Combine::rank_sums;
  const std::vector<float> summed = run_layer(layer, options, 3, rows);
  // Only the order of at most top_k fp32 additions differs.
  EXPECT_LE(worst_row(summed, one, layer.config.hidden), 1e-6);
  EXPECT_EQ(run_layer(layer, options, 3, rows), summed) << "run after run";
}

INSTANTIATE_TEST_SUITE_P(Problems, BackendsTest, testing::ValuesIn(all_problems()),
                         [](const auto& info) { return "case" + std::to_string(info.index); });

}  // namespace
}  // namespace moekit::test
