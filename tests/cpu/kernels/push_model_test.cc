// The protocol of pushed rows, in every order of events for two and three ranks; and broken on
// purpose, to see that the checker would notice. States that a test visits are in its properties
// ("states", --gtest_output=xml) and, for the larger ones, in the comments here.
#include "support/push_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "fmt/format.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define MOEKIT_INSTRUMENTED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define MOEKIT_INSTRUMENTED 1
#endif
#endif

namespace moekit::ep {
namespace {

/// The checker is one thread of plain code: instrumented builds walk through smaller models.
#if defined(MOEKIT_INSTRUMENTED)
constexpr bool kInstrumented = true;
#else
constexpr bool kInstrumented = false;
#endif

/// Calls without end.
constexpr uint64_t kAnyNumber = 0;

std::vector<Counts> every_choice(int ranks, int max_rows) {
  std::vector<Counts> all(1);
  for (int p = 0; p < ranks; ++p) {
    std::vector<Counts> more;
    for (const Counts& rows : all) {
      for (int n = 0; n <= max_rows; ++n) {
        more.push_back(rows);
        more.back()[p] = n;
      }
    }
    all = std::move(more);
  }
  return all;
}

/// Every rank sends every rank, itself too, any number of rows up to max_rows.
Model every_routing(int ranks, int max_rows, uint64_t calls) {
  Model m;
  m.ranks = ranks;
  m.calls = calls;
  m.choices = [=](int, uint64_t) { return every_choice(ranks, max_rows); };
  return m;
}

/// rows[from][to].
using Routing = std::array<Counts, kMaxRanks>;
constexpr Routing kToFirst{{{2, 0, 0}, {1, 0, 0}, {2, 0, 0}}};
constexpr Routing kFromLast{{{0, 0, 0}, {0, 0, 0}, {1, 2, 0}}};
constexpr Routing kRing{{{0, 1, 0}, {0, 0, 1}, {1, 0, 0}}};

/// Three ranks, each call with one routing: small enough to be visited without reductions.
Model three_ranks(std::vector<Routing> calls) {
  Model m;
  m.ranks = 3;
  m.calls = calls.size();
  m.choices = [calls](int rank, uint64_t call) { return std::vector{calls[call - 1][rank]}; };
  return m;
}

Model unreduced(Model m) {
  m.forget = m.eager = false;
  return m;
}

std::string violations(const Verdict& v) {
  std::string all;
  for (const std::string& text : v.facts.violations()) all += text + "; ";
  return all;
}

void record(const Verdict& v) {
  testing::Test::RecordProperty("states", fmt::format("{}", v.states));
  testing::Test::RecordProperty("steps", fmt::format("{}", v.steps));
  testing::Test::RecordProperty("bytes", fmt::format("{}", v.bytes));
}

/// No wrong read, no deadlock; and everything that ought to be read is.
void expect_sound(const Model& m, const Verdict& v, const std::vector<Routing>& sent) {
  EXPECT_EQ(violations(v), "");
  EXPECT_TRUE(v.complete) << v.states << " states and more";
  EXPECT_EQ(v.ends > 0, m.calls != kAnyNumber);
  for (int c = 0; c < m.ranks; ++c) {
    for (int s = 0; s < m.ranks; ++s) {
      if (m.client >= 0 && (m.client != c || m.server != s)) continue;
      bool rows = false;
      for (const Routing& routing : sent) rows |= routing[c][s] > 0;
      EXPECT_TRUE(v.facts.has(Read::header, s, c, Found::right));
      EXPECT_EQ(v.facts.has(Read::row, s, c, Found::right), rows) << c << " to " << s;
      EXPECT_EQ(v.facts.has(Read::result, c, s, Found::right), rows) << c << " to " << s;
    }
  }
  record(v);
}

constexpr Routing kAll{{{1, 1, 1}, {1, 1, 1}, {1, 1, 1}}};

void expect_sound(const Model& m) { expect_sound(m, explore(m), {kAll}); }

TEST(PushModel, TwoRanksWithoutReductions) {
  expect_sound(unreduced(every_routing(2, 1, kInstrumented ? 2 : 3)));  // 99593 states
  if (!kInstrumented) expect_sound(unreduced(every_routing(2, 2, 2)));  // 601537
  for (const uint64_t call : {1, 2}) {
    Model m = unreduced(every_routing(2, 1, kInstrumented ? 2 : 3));
    m.void_call = call;
    expect_sound(m);
  }
}

// 221315 states.
TEST(PushModel, TwoRanksEveryOrderOfAnyNumberOfCalls) {
  Model m = every_routing(2, kInstrumented ? 1 : 3, kAnyNumber);
  m.eager = false;
  expect_sound(m);
}

// 20916 states over four pairs.
TEST(PushModel, TwoRanksThatGiveUpAnyCalls) {
  Model m = every_routing(2, kInstrumented ? 1 : 3, kAnyNumber);
  m.any_void = true;
  expect_sound(m, explore_pairs(m), {kAll});
  m = every_routing(2, 1, 3);
  m.any_void = true;
  m.eager = false;
  expect_sound(m);
}

// Each of the nine pairs has 0 to 3 rows in a call, in every combination; calls have no end, any of
// them is given up. 3638793 states over nine pairs, up to 45 MiB at a time.
TEST(PushModel, ThreeRanksEveryRouting) {
  Model m = every_routing(3, kInstrumented ? 1 : 3, kInstrumented ? 2 : kAnyNumber);
  m.any_void = !kInstrumented;
  expect_sound(m, explore_pairs(m), {kAll});
}

// What the eager steps leave out, for one pair: ranks are alike. 3026387 states, 208 MiB.
TEST(PushModel, ThreeRanksEveryOrderSeenFromAPair) {
  Model m = kInstrumented ? three_ranks({kRing}) : every_routing(3, 1, kAnyNumber);
  m.eager = false;
  m.client = 0;
  m.server = 1;
  expect_sound(m);
}

// What is left out where a pair is watched: all pairs' rows, headers and results at once. 1008957
// states.
TEST(PushModel, ThreeRanksAllPairsAtOnce) {
  if (kInstrumented) {
    const Model m = three_ranks({kRing, kToFirst});
    return expect_sound(m, explore(m), {kRing, kToFirst});
  }
  Model m = every_routing(3, 1, kAnyNumber);
  const auto every = m.choices;
  m.choices = [every](int rank, uint64_t call) {  // nothing to oneself, which nobody else sees
    std::vector<Counts> all = every(rank, call);
    for (Counts& rows : all) rows[rank] = 0;
    return all;
  };
  expect_sound(m, explore(m), {{{{0, 1, 1}, {1, 0, 1}, {1, 1, 0}}}});
}

struct BrokenRule {
  Broken broken;
  uint64_t void_call;
  const char* words;
};

constexpr BrokenRule kBrokenRules[] = {
    {Broken::credit, 1, "rank 1 reads a row of rank 0 of a later call"},
    {Broken::generations, 0, "rank 1 reads a header of rank 0 of a later call"},
    {Broken::arrive, 0, "rank 1 reads a header of rank 0 of an older call"},
    {Broken::collect, 0, "rank 0 reads a result of rank 1 of an older call"},
    {Broken::release, 0, "rank 1 reads a row of rank 0 of an older call"},
    {Broken::void_release, 1, "deadlock"},
    {Broken::void_collect, 1, "rank 0 reads a result of rank 1 of an older call"},
    {Broken::silence, 0, "deadlock"},
};

Model with(Model m, const BrokenRule& rule) {
  m.broken = rule.broken;
  m.void_call = rule.void_call;
  return m;
}

void expect_found(const BrokenRule& rule, const Verdict& v) {
  EXPECT_NE(violations(v).find(rule.words), std::string::npos)
      << "broken rule " << static_cast<int>(rule.broken) << ": " << violations(v);
}

TEST(PushModel, EveryRuleIsNeeded) {
  for (const BrokenRule& rule : kBrokenRules) {
    expect_found(rule, explore(with(every_routing(2, 1, 3), rule)));
    if (kInstrumented) continue;
    Model m = with(every_routing(3, 1, rule.broken == Broken::void_release ? 2 : 3), rule);
    m.client = 0;
    m.server = 1;
    expect_found(rule, explore(m));
  }
}

/// What happens in some run is the same with reductions as with none.
void expect_same_facts(const Model& model, const Verdict& plain, bool watched) {
  SCOPED_TRACE(fmt::format("{} ranks, broken rule {}, forget {}, eager {}, watched {}", model.ranks,
                           static_cast<int>(model.broken), model.forget, model.eager, watched));
  const Verdict v = watched ? explore_pairs(model) : explore(model);
  EXPECT_TRUE(v.complete);
  EXPECT_EQ(violations(v), violations(plain));
  EXPECT_TRUE(v.facts == plain.facts);
  EXPECT_TRUE(watched || v.states <= plain.states);
}

std::vector<BrokenRule> broken_or_not() {
  std::vector<BrokenRule> rules(std::begin(kBrokenRules), std::end(kBrokenRules));
  rules.push_back({Broken::nothing, 0, ""});
  rules.push_back({Broken::nothing, 1, ""});
  return rules;
}

TEST(PushModel, ReductionsChangeNothingForTwoRanks) {
  for (const BrokenRule& rule : broken_or_not()) {
    const Model model = with(every_routing(2, 1, kInstrumented ? 1 : 2), rule);
    const Verdict plain = explore(unreduced(model));
    ASSERT_TRUE(plain.complete);
    for (const int on : {1, 2, 3, 4, 5, 6, 7}) {
      Model m = model;
      m.forget = (on & 1) != 0;
      m.eager = (on & 2) != 0;
      expect_same_facts(m, plain, (on & 4) != 0);
    }
  }
}

TEST(PushModel, ReductionsChangeNothingForThreeRanks) {
  const std::vector<std::vector<Routing>> models{{kRing, kRing}, {kToFirst}, {kFromLast}};
  for (const BrokenRule& rule : broken_or_not()) {
    for (const auto& routings : models) {
      if (kInstrumented && (rule.broken != Broken::nothing || routings.size() > 1)) continue;
      // Ranks that do not wait for each other have millions of orders in two calls.
      if (rule.broken == Broken::arrive && routings.size() > 1) continue;
      Model m = with(three_ranks(routings), rule);
      const Verdict plain = explore(unreduced(m));
      ASSERT_TRUE(plain.complete);
      expect_same_facts(m, plain, false);
      expect_same_facts(m, plain, true);
      m.eager = false;
      expect_same_facts(m, plain, false);
    }
  }
}

}  // namespace
}  // namespace moekit::ep
