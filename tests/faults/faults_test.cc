// One rank goes wrong, in every way, at every operation of every step of a call, for every member
// that exchanges rows: all other ranks must end with an error that names it, within the deadline,
// and no token may get another token's row.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "faults/fault_world.h"

namespace moekit::faults {
namespace {

constexpr int kSteps = 3;

class Faults : public testing::TestWithParam<std::tuple<std::string, int, Transport>> {
 protected:
  World world() const {
    World w;
    w.prepare = std::get<0>(GetParam());
    w.ranks = std::get<1>(GetParam());
    w.transport = std::get<2>(GetParam());
    w.fault.rank = w.ranks == 3 ? 2 : 1;
    return w;
  }

  bool processes() const { return std::get<2>(GetParam()) == Transport::processes; }

  /// Signals flags of a heap; other members exchange counts and rows through all_to_all_v.
  bool signals_flags() const {
    for (const auto& step : operations()) {
      if (std::count(step.begin(), step.end(), "signal") > 0) return true;
    }
    return false;
  }

  /// Operations of a rank in each step of a call without faults.
  std::vector<std::vector<std::string>> operations() const {
    std::vector<std::vector<std::string>> all;
    for (int step = 0; step < kSteps; ++step) {
      World w = world();
      w.calls = 2;
      w.deadline = std::chrono::seconds(60);
      w.fault.step = step;
      const Outcome outcome = run_world(w);
      for (const RankOutcome& r : outcome.ranks) EXPECT_EQ(r.finished, 2) << r.error;
      all.push_back(outcome.operations);
    }
    return all;
  }

  /// body(world with the fault at one operation, the operation's name), for each.
  template <typename Body>
  void at_every_operation(Kind kind, Body&& body) const {
    const auto all = operations();
    int operations = 0;
    for (int step = 0; step < kSteps; ++step) {
      for (size_t i = 0; i < all[step].size(); ++i) {
        World w = world();
        w.fault = {kind, w.fault.rank, 1, step, static_cast<int>(i) + 1};
        SCOPED_TRACE("step " + std::to_string(step) + ", " + all[step][i]);
        body(w, all[step][i]);
        ++operations;
      }
    }
    EXPECT_GT(operations, 3);
  }

  /// A group that is made after a fault serves as if nothing had been.
  void expect_a_new_group_works() const {
    World w = world();
    w.deadline = std::chrono::seconds(60);
    for (const RankOutcome& r : run_world(w).ranks) EXPECT_EQ(r.finished, w.calls) << r.error;
  }
};

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "no '" << word << "' in: " << text;
  }
}

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

/// Every rank but one that is gone has an error of its own name, in the faulty call or the next
/// one; those that waited have one reason.
void expect_noticed(const World& w, const Outcome& outcome) {
  std::string reason;
  for (int r = 0; r < w.ranks; ++r) {
    const RankOutcome& rank = outcome.ranks[static_cast<size_t>(r)];
    if (rank.gone) continue;
    ASSERT_NE(rank.code, ErrorCode::ok) << name_of(r) << " noticed nothing";
    const std::string prefix = name_of(r) + ": ";
    ASSERT_EQ(rank.error.rfind(prefix, 0), 0u) << rank.error;
    EXPECT_GE(rank.finished, w.fault.call) << rank.error;
    EXPECT_LE(rank.finished, w.fault.call + 1) << rank.error;
    expect_words(rank.error, {name_of(w.fault.rank), "phase ", "layer 0, call 1"});
    if (rank.code != ErrorCode::timeout) continue;
    if (reason.empty()) reason = rank.error.substr(prefix.size());
    EXPECT_EQ(rank.error.substr(prefix.size()), reason);
    expect_words(rank.error, {" waited ", "expected ", "seen "});
  }
}

TEST_P(Faults, ARankThatLeaves) {
  at_every_operation(Kind::leaves, [&](const World& w, const std::string&) {
    const Outcome outcome = run_world(w);
    ASSERT_TRUE(outcome.fired);
    EXPECT_TRUE(outcome.ranks[w.fault.rank].gone);
    expect_noticed(w, outcome);
    for (const RankOutcome& r : outcome.ranks) {
      if (r.gone) continue;
      EXPECT_TRUE(r.code == ErrorCode::timeout || r.code == ErrorCode::comm) << r.error;
      const bool timeout = r.code == ErrorCode::timeout;
      expect_words(r.error, {timeout ? "has left the group" : "left with an exchange in flight"});
    }
  });
  expect_a_new_group_works();
}

/// Found long before the deadline.
void expect_death_is_noticed(const World& w, const Outcome& outcome) {
  ASSERT_TRUE(outcome.fired);
  EXPECT_TRUE(outcome.ranks[w.fault.rank].gone);
  for (const RankOutcome& r : outcome.ranks) {
    if (r.gone) continue;
    EXPECT_EQ(r.code, ErrorCode::comm) << r.error;
    expect_words(r.error, {" found in phase ", "that " + name_of(w.fault.rank) + " (",
                           " is gone: its process ", "ended without a word"});
  }
}

TEST_P(Faults, ARankThatDies) {
  if (!processes()) GTEST_SKIP() << "a thread can't die alone";
  at_every_operation(Kind::dies, [&](World w, const std::string&) {
    w.deadline = std::chrono::seconds(60);
    const Outcome outcome = run_world(w);
    expect_death_is_noticed(w, outcome);
    expect_noticed(w, outcome);
  });
  expect_a_new_group_works();
}

TEST_P(Faults, ARankThatStallsBeyondTheDeadline) {
  at_every_operation(Kind::stalls, [&](const World& w, const std::string&) {
    const Outcome outcome = run_world(w);
    ASSERT_TRUE(outcome.fired);
    expect_noticed(w, outcome);
    for (const RankOutcome& r : outcome.ranks) {
      EXPECT_EQ(r.code, ErrorCode::timeout) << r.error;
      expect_words(r.error, {name_of(w.fault.rank) + " (last seen in phase "});
    }
  });
  expect_a_new_group_works();
}

TEST_P(Faults, ARankThatLeavesOrStallsWhileTheLayerIsMade) {
  for (const Kind kind : {Kind::leaves, Kind::stalls}) {
    for (const int operation : {1, 2}) {  // capacities, hashes of plans
      World w = world();
      w.fault = {kind, w.fault.rank, -1, 0, operation};
      const Outcome outcome = run_world(w);
      ASSERT_TRUE(outcome.fired);
      for (const RankOutcome& r : outcome.ranks) {
        EXPECT_EQ(r.finished, 0);
        if (r.gone) continue;
        EXPECT_EQ(r.code, ErrorCode::timeout) << r.error;
        expect_words(r.error, {"for " + name_of(w.fault.rank), "in phase plan: ", "layer 0, call 0",
                               "expected ", "seen "});
      }
    }
  }
  expect_a_new_group_works();
}

TEST_P(Faults, ARankThatDiesWhileTheLayerIsMade) {
  if (!processes()) GTEST_SKIP() << "a thread can't die alone";
  for (const int operation : {1, 2}) {
    World w = world();
    w.deadline = std::chrono::seconds(60);
    w.fault = {Kind::dies, w.fault.rank, -1, 0, operation};
    const Outcome outcome = run_world(w);
    expect_death_is_noticed(w, outcome);
    for (const RankOutcome& r : outcome.ranks) {
      EXPECT_EQ(r.finished, 0);
      if (!r.gone) expect_words(r.error, {"in phase plan: ", "layer 0, call 0"});
    }
  }
  expect_a_new_group_works();
}

TEST_P(Faults, ARankThatIsLate) {
  at_every_operation(Kind::late, [&](World w, const std::string&) {
    w.deadline = std::chrono::seconds(60);
    const Outcome outcome = run_world(w);
    ASSERT_TRUE(outcome.fired);
    for (const RankOutcome& r : outcome.ranks) EXPECT_EQ(r.finished, w.calls) << r.error;
  });
}

TEST_P(Faults, CountsThatDisagree) {  // F06
  if (signals_flags()) GTEST_SKIP() << "this member exchanges no counts";
  for (const Kind kind :
       {Kind::sends_more, Kind::sends_less, Kind::expects_more, Kind::expects_less}) {
    int exchanges = 0;
    at_every_operation(kind, [&](World w, const std::string& operation) {
      w.deadline = std::chrono::seconds(60);
      const Outcome outcome = run_world(w);
      if (!outcome.fired) return;
      ++exchanges;
      expect_noticed(w, outcome);
      for (const RankOutcome& r : outcome.ranks) {
        EXPECT_EQ(r.code, ErrorCode::comm) << r.error;
        expect_words(r.error, {"counts disagree in phase " + operation + ", layer 0, call 1",
                               name_of(w.fault.rank), " bytes to rank", "which expects",
                               "nothing was moved"});
      }
    });
    EXPECT_GE(exchanges, 3);  // counts, rows out, rows back
  }
  expect_a_new_group_works();
}

TEST_P(Faults, PromisesThatAreNotKept) {  // F06
  if (signals_flags()) GTEST_SKIP() << "this member exchanges no counts";
  for (const Kind kind : {Kind::promises_more, Kind::promises_less, Kind::promises_absurd}) {
    World w = world();
    w.deadline = std::chrono::seconds(60);
    w.fault = {kind, w.fault.rank, 1, 0, 1};
    const Outcome outcome = run_world(w);
    ASSERT_TRUE(outcome.fired);
    for (const RankOutcome& r : outcome.ranks) {
      EXPECT_EQ(r.code, ErrorCode::comm) << r.error;
      EXPECT_EQ(r.finished, 1);
      expect_words(r.error, {name_of(w.fault.rank), "layer 0, call 1"});
    }
  }
  expect_a_new_group_works();
}

TEST_P(Faults, FlagsOfAnotherCall) {
  if (!signals_flags()) GTEST_SKIP() << "this member signals no flags";
  for (const Kind kind : {Kind::flag_behind, Kind::flag_ahead}) {
    int signals = 0;
    at_every_operation(kind, [&](const World& w, const std::string&) {
      const Outcome outcome = run_world(w);
      if (!outcome.fired) return;
      ++signals;
      expect_noticed(w, outcome);
      for (const RankOutcome& r : outcome.ranks) {
        if (kind == Kind::flag_behind) {
          EXPECT_EQ(r.code, ErrorCode::timeout) << r.error;
          expect_words(r.error, {"heap flag "});
        } else {
          EXPECT_EQ(r.code, ErrorCode::comm) << r.error;
          expect_words(r.error, {"ranks disagree about the step",
                                 "the flag of " + name_of(w.fault.rank), "is ahead: expected "});
        }
      }
    });
    EXPECT_GE(signals, world().ranks);
  }
  expect_a_new_group_works();
}

/// Two calls of each rank meet; then the faulty one, which leaves one out, has gone.
void expect_two_calls(const World& w, const std::vector<std::string>& words) {
  const Outcome outcome = run_world(w);
  for (int r = 0; r < w.ranks; ++r) {
    const RankOutcome& rank = outcome.ranks[static_cast<size_t>(r)];
    EXPECT_EQ(rank.finished, 2);
    if (r == w.fault.rank) continue;
    EXPECT_EQ(rank.code, ErrorCode::timeout) << rank.error;
    expect_words(rank.error, words);
  }
}

TEST_P(Faults, ARankThatMakesFewerCalls) {  // F04
  World w = world();
  w.deadline = 3 * kDeadline;
  w.left_out = {2};
  expect_two_calls(w, {name_of(w.fault.rank) + " (last seen in phase ",
                       "layer 0, call 1, has left the group)", "layer 0, call 2"});
  expect_a_new_group_works();
}

TEST_P(Faults, ARankThatSkipsACall) {  // F04
  World w = world();
  w.deadline = 3 * kDeadline;
  w.left_out = {1};
  // The calls of ranks are counted: the others' call 1 meets its call 2, and every row of both
  // comes back to where it belongs. What is missing shows at the end.
  expect_two_calls(w, {"for " + name_of(w.fault.rank), "has left the group", "layer 0, call 2"});
  expect_a_new_group_works();
}

TEST_P(Faults, ARankThatPassesAnotherPlan) {
  World w = world();
  w.deadline = std::chrono::seconds(60);
  w.another_plan = true;
  const std::string odd = name_of(w.fault.rank);
  for (const RankOutcome& r : run_world(w).ranks) {
    EXPECT_EQ(r.finished, 0);
    EXPECT_EQ(r.code, ErrorCode::invalid_argument) << r.error;
    expect_words(r.error, {"the plans of ranks 0 and " + std::to_string(w.fault.rank),
                           "differ in combine_dtype: rank 0 has f32, " + odd + " has bf16"});
  }
  expect_a_new_group_works();
}

std::string name_of_world(const testing::TestParamInfo<Faults::ParamType>& info) {
  return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Members, Faults,
                         testing::Combine(testing::ValuesIn(members()), testing::Values(2, 3, 4),
                                          testing::Values(Transport::threads)),
                         name_of_world);
INSTANTIATE_TEST_SUITE_P(Processes, Faults,
                         testing::Combine(testing::ValuesIn(members()), testing::Values(3),
                                          testing::Values(Transport::processes)),
                         name_of_world);

}  // namespace
}  // namespace moekit::faults
