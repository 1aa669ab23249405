// moekit explain: every registered member with its answer, and the plan that was chosen. Touches no
// weights.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "json_writers.h"
#include "layer_flags.h"
#include "moekit/describe.h"
#include "moekit/error.h"
#include "moekit/problems.h"
#include "moekit/tools.h"
#include "plan_flags.h"
#include "report.h"
#include "session.h"

namespace moekit::cli {
namespace {

struct ExplainFlags {
  std::string model, problem;
  int layer = -1;
  int64_t max_tokens = 0;
  bool list_problems = false;
  PlanFlags plan;
};

/// What is planned: a layer of a checkpoint or a described problem, and its tokens a rank.
struct Subject {
  LayerSource source;
  PlanOptions options;
  int64_t tokens = 0;
  std::string spec;
};

Subject subject_of(const ExplainFlags& flags) {
  Subject subject;
  subject.options = flags.plan.options();
  // As activations of a model usually come; rows may then travel as bf16.
  subject.options.hidden_dtype = DType::bf16;
  LayerProblem problem;
  if (!flags.model.empty()) {
    subject.source = open_source(flags.model, flags.layer);
    problem.config = subject.source.config;
  } else {
    problem = parse_problem(flags.problem);
    subject.source = hollow_source(problem);
    flags.plan.apply_problem(problem, subject.options);
  }
  if (flags.max_tokens > 0) problem.tokens = flags.max_tokens;
  problem.placement = subject.options.placement;
  subject.tokens = problem.tokens;
  subject.spec = spec_of(problem);
  return subject;
}

OrderedJson json_of(const Subject& subject, const Explanation& explanation) {
  OrderedJson json = OrderedJson::parse(explanation_json(subject.source.config, explanation));
  json["problem"] = subject.spec;
  return json;
}

void print_plan(const PlanSummary& plan) {
  print_facts(
      {{"chosen",
        fmt::format("{} with prepare {}, reduce {}", plan.backend, plan.prepare, plan.reduce)},
       {"transport", plan.transport},
       {"hash", plan.hash},
       {"weights", fmt::format("{} a rank, layout {}, rows {}", bytes_text(plan.weights_bytes),
                               plan.weight_layout, plan.row_order)},
       {"room to move", plan.placement_bytes > 0
                            ? fmt::format("{} a rank", bytes_text(plan.placement_bytes))
                            : "none"},
       {"workspace", fmt::format("{} a call", bytes_text(plan.workspace_bytes))},
       {"symmetric heap",
        plan.heap_bytes > 0 ? fmt::format("{} a call", bytes_text(plan.heap_bytes)) : "none"},
       {"wire",
        fmt::format("{} a full call, rows as {}", bytes_text(plan.wire_bytes), plan.wire_format)},
       {"reduce duty",
        fmt::format("weighs: {}; sums: {}; order: {}", plan.weigher, plan.summer, plan.sum_order)},
       {"quant duty", plan.quant_reason.empty()
                          ? plan.quant_duty
                          : fmt::format("{} ({})", plan.quant_duty, plan.quant_reason)}});
  fmt::print("\n");
  Table buckets({"up to tokens", "back-end", "knobs"});
  for (const PlanBucket& bucket : plan.buckets) {
    buckets.add({std::to_string(bucket.max_tokens), bucket.backend,
                 bucket.knobs.empty() ? "none" : bucket.knobs});
  }
  buckets.print();
}

/// A line an experts member, a column a prepare member; with --verbose a line a pair with reasons.
void print_pairs(const Explanation& explanation, bool every_reason) {
  std::vector<std::string> prepares = {"pairs"};
  for (const Candidate& candidate : explanation.candidates) {
    if (candidate.kind == "prepare") prepares.push_back(candidate.name);
  }
  if (every_reason) {
    Table table({"prepare", "experts", "pair", "reasons and notes"});
    for (const PairAnswer& pair : explanation.pairs) {
      const std::string why =
          pair.supported ? pair.note : fmt::format("{}", fmt::join(pair.reasons, "; "));
      table.add({pair.prepare, pair.experts,
                 pair.chosen      ? "chosen"
                 : pair.supported ? "works"
                                  : "no",
                 why});
    }
    return table.print();
  }
  Table table(prepares);
  for (size_t at = 0; at < explanation.pairs.size(); at += prepares.size() - 1) {
    std::vector<std::string> row = {explanation.pairs[at].experts};
    for (size_t p = 0; p + 1 < prepares.size(); ++p) {
      const PairAnswer& pair = explanation.pairs[at + p];
      row.push_back(pair.chosen ? "chosen" : pair.supported ? "works" : "no");
    }
    table.add(row);
  }
  table.print();
}

void print_explanation(const Subject& subject, const Explanation& explanation, bool every_reason) {
  fmt::print("problem  {}\n\n", subject.spec);
  Table table({"kind", "name", "takes it", "reasons and notes"});
  for (const Candidate& candidate : explanation.candidates) {
    std::string text = fmt::format("{}", fmt::join(candidate.reasons, "; "));
    if (!candidate.note.empty()) text += (text.empty() ? "" : "; ") + candidate.note;
    table.add({candidate.kind, candidate.name, candidate.supported ? "yes" : "no", text});
  }
  table.print();
  fmt::print(
      "\nChosen are the first experts and the first prepare in this order that take the "
      "problem and fit each other{}.\n\n",
      every_reason ? "" : " (--verbose: why a pair does not)");
  print_pairs(explanation, every_reason);
  fmt::print("\n");
  if (explanation.chosen) print_plan(explanation.plan);
}

void print_problems(const Session& session) {
  OrderedJson list = OrderedJson::array();
  Table table({"name", "problem"});
  for (const auto& [name, spec] : list_problems()) {
    list.push_back({{"name", name}, {"problem", spec}});
    table.add({name, spec});
  }
  if (session.json) {
    session.print_json({{"problems", list}, {"keys", describe_problem_keys()}});
  } else {
    table.print();
    fmt::print("\n{}", describe_problem_keys());
  }
}

void run(Session& session, const ExplainFlags& flags) {
  session.configure_log();
  if (flags.list_problems) return print_problems(session);
  if (flags.model.empty() == flags.problem.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "explain: expected one of --model DIR and --problem SPEC (moekit explain "
                "--list-problems names some)");
  }
  const Subject subject = subject_of(flags);
  const Explanation explanation = explain_plan(subject.source, subject.options, flags.plan.ranks,
                                               std::max<int64_t>(1, subject.tokens));
  if (session.json) {
    session.print_json(json_of(subject, explanation));
  } else {
    print_explanation(subject, explanation, session.verbose);
  }
  if (!explanation.chosen) {
    throw Error(ErrorCode::unsupported,
                fmt::format("expected a back-end that takes this problem, every one refuses: {}",
                            refusal_of(explanation)));
  }
}

}  // namespace

void add_explain(CLI::App& app, Session& session) {
  CLI::App* verb =
      app.add_subcommand("explain", "Which back-end would run, and why not the others");
  auto flags = std::make_shared<ExplainFlags>();
  auto* model = verb->add_option("--model", flags->model, "Checkpoint directory")->type_name("DIR");
  verb->add_option("--problem", flags->problem, "A problem by name or by its values")
      ->type_name("SPEC")
      ->excludes(model);
  add_layer_flag(*verb, flags->layer);
  verb->add_option("--max-tokens", flags->max_tokens,
                   "Tokens of one rank (default: of the SPEC, else 16)")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40).description(""))
      ->type_name("T");
  verb->add_flag("--list-problems", flags->list_problems,
                 "Print the known problems and their values");
  flags->plan.add_to(*verb);
  session.add_flags(*verb);
  verb->footer(
      "Example:\n  moekit explain --problem qwen3-30b-a3b:weights=fp8_block,tokens=512 --ranks 4");
  verb->callback([&session, flags] { run(session, *flags); });
}

}  // namespace moekit::cli
