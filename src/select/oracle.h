// The oracle: walks the ordered registries, collects every member's Support, negotiates who
// quantizes, weighs and sums, and takes the first pair that agrees. An explicit name is honoured or
// refused with all reasons, never replaced.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "experts/experts.h"
#include "prepare/prepare_finalize.h"
#include "problem/problem.h"
#include "problem/support.h"
#include "reduce/weight_and_reduce.h"

namespace moekit::select {

/// Names as the user gave them; empty = automatic.
struct Preference {
  std::string prepare;
  std::string experts;
};

/// One registered member and its answer to the problem (for experts: with the chosen or the first
/// possible prepare).
struct Verdict {
  std::string name;
  std::string kind;  ///< "prepare" or "experts"
  Support support;
};

/// One prepare member with one experts member, whatever was asked for by name.
struct PairVerdict {
  std::string prepare;
  std::string experts;
  Support support;  ///< of both members and of their joint
};

/// Two members that agree, and what they agreed on.
struct Choice {
  const prepare::PrepareFinalize* prepare = nullptr;
  const experts::Experts* experts = nullptr;
  const reduce::WeightAndReduce* reduce = nullptr;  ///< null when duty.summer is not `reduce`
  ReduceDuty reduce_duty;
  QuantDuty quant_duty = QuantDuty::none;
  std::string quant_reason;  ///< why this duty
  RowFormat wire;            ///< rows as they leave prepare
};

struct Selection {
  std::vector<Verdict> verdicts;   ///< every registered member, in registry order
  std::vector<PairVerdict> pairs;  ///< every pair, best experts first, then best prepare
  std::optional<Choice> choice;
};

/// Never throws for lack of a back-end: the selection then has no choice, and the verdicts say why.
/// Throws invalid_argument for a name that no member has.
Selection select(const Problem& problem, const Preference& preference);

/// The joint of one pair: what they agree on, or every reason why they cannot.
struct Agreement {
  Support support;
  Choice choice;
};
Agreement negotiate(const Problem& problem, const prepare::PrepareFinalize& prepare,
                    const experts::Experts& experts);

/// What the members that refuse say, as join_refusals writes it. For error messages.
std::string describe(const Selection& selection);

/// A member that refuses, and its reasons with "; " between them.
struct Refusal {
  std::string name;
  std::string kind;  ///< "prepare" or "experts"
  std::string reasons;
};
/// "cpu, cpu_batched (experts): reason; reason | ref (experts): reason": members of one kind with
/// the same reasons stand together, where the first of them stood.
std::string join_refusals(const std::vector<Refusal>& refusals);

}  // namespace moekit::select
