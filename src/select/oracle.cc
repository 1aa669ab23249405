#include "select/oracle.h"

#include <algorithm>

#include "base/check.h"

namespace moekit::select {
namespace {

bool wanted(const std::string& preference, std::string_view name) {
  return preference.empty() || preference == name;
}

/// A name that no member has is the caller's mistake; a member that refuses is another matter.
template <typename Members>
void check_name(const std::string& name, const Members& members, const char* what) {
  std::string known;
  for (const auto* member : members) {
    if (name.empty() || member->name() == name) return;
    known += (known.empty() ? "" : ", ") + std::string(member->name());
  }
  fail(ErrorCode::invalid_argument, "no {} is called '{}' in this build; choose one of {}", what,
       name, known);
}

/// The member's own answer, and whether the user asked for another one.
template <typename Member>
Verdict judge(const Member& member, const Problem& problem, const std::string& preference,
              const char* kind) {
  Verdict verdict{std::string(member.name()), kind, member.supports(problem)};
  verdict.support.require(wanted(preference, member.name()), ReasonCode::not_requested,
                          "'{}' was asked for by name", preference);
  return verdict;
}

/// Answers of a member before names are looked at.
template <typename Members>
std::vector<Support> own_answers(const Problem& problem, const Members& members) {
  std::vector<Support> answers;
  for (const auto* member : members) answers.push_back(member->supports(problem));
  return answers;
}

/// Adds the reasons that are not there yet: one that holds for every prepare member is said once.
void add_new(Support& to, const Support& from) {
  for (const Reason& reason : from.reasons()) {
    const bool known = std::ranges::any_of(
        to.reasons(), [&](const Reason& other) { return other.text == reason.text; });
    to.require(known, reason.code, "{}", reason.text);
  }
}

std::vector<PairVerdict> judge_pairs(const Problem& problem) {
  const auto prepares = prepare::registry();
  const auto all_experts = experts::registry();
  const std::vector<Support> prepare_answers = own_answers(problem, prepares);
  const std::vector<Support> experts_answers = own_answers(problem, all_experts);
  std::vector<PairVerdict> pairs;
  for (size_t x = 0; x < all_experts.size(); ++x) {
    for (size_t p = 0; p < prepares.size(); ++p) {
      PairVerdict pair{std::string(prepares[p]->name()), std::string(all_experts[x]->name()), {}};
      add_new(pair.support, prepare_answers[p]);
      add_new(pair.support, experts_answers[x]);
      // The joint of members that take the problem; others have no traits to speak of.
      if (pair.support.ok()) {
        pair.support.add(negotiate(problem, *prepares[p], *all_experts[x]).support);
      }
      pairs.push_back(std::move(pair));
    }
  }
  return pairs;
}

}  // namespace

Selection select(const Problem& problem, const Preference& preference) {
  Selection selection;
  auto& verdicts = selection.verdicts;
  const auto prepares = prepare::registry();
  const auto all_experts = experts::registry();
  check_name(preference.experts, all_experts, "back-end");
  check_name(preference.prepare, prepares, "prepare member");

  for (const auto* p : prepares)
    verdicts.push_back(judge(*p, problem, preference.prepare, "prepare"));
  for (const auto* x : all_experts)
    verdicts.push_back(judge(*x, problem, preference.experts, "experts"));

  selection.pairs = judge_pairs(problem);

  // Experts decide: the best experts that any willing prepare can feed.
  for (size_t x = 0; x < all_experts.size(); ++x) {
    Verdict& experts_verdict = verdicts[prepares.size() + x];
    Support joints;
    bool agreed = false;
    for (size_t p = 0; experts_verdict.support.ok() && p < prepares.size() && !agreed; ++p) {
      if (!verdicts[p].support.ok()) continue;
      Agreement agreement = negotiate(problem, *prepares[p], *all_experts[x]);
      agreed = agreement.support.ok();
      if (agreed && !selection.choice) selection.choice = agreement.choice;
      add_new(joints, agreement.support);
    }
    if (experts_verdict.support.ok() && !agreed) {
      joints.require(!joints.ok(), ReasonCode::not_requested,
                     "no prepare member accepts the problem");
      experts_verdict.support.add(joints);
    }
  }
  return selection;
}

std::string describe(const Selection& selection) {
  std::vector<Refusal> refusals;
  for (const Verdict& verdict : selection.verdicts) {
    if (verdict.support.ok()) continue;
    std::string reasons;
    for (const Reason& reason : verdict.support.reasons()) {
      if (reason.code == ReasonCode::not_requested) continue;
      reasons += (reasons.empty() ? "" : "; ") + reason.text;
    }
    if (reasons.empty()) continue;
    refusals.push_back({verdict.name, verdict.kind, reasons});
  }
  return join_refusals(refusals);
}

std::string join_refusals(const std::vector<Refusal>& refusals) {
  std::string text;
  for (size_t i = 0; i < refusals.size(); ++i) {
    const auto alike = [&](const Refusal& other) {
      return other.kind == refusals[i].kind && other.reasons == refusals[i].reasons;
    };
    const auto here = refusals.begin() + static_cast<std::ptrdiff_t>(i);
    if (std::find_if(refusals.begin(), here, alike) != here) continue;  // said with that one
    std::string names;
    for (auto it = here; it != refusals.end(); ++it) {
      if (alike(*it)) names += (names.empty() ? "" : ", ") + it->name;
    }
    text += fmt::format("{}{} ({}): {}", text.empty() ? "" : " | ", names, refusals[i].kind,
                        refusals[i].reasons);
  }
  return text;
}

}  // namespace moekit::select
