// moekit combos: every prepare member with every experts member against the single-rank reference,
// over formats, placements, loads and ranks.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>

#include "json_writers.h"
#include "moekit/combos.h"
#include "moekit/error.h"
#include "plan_flags.h"
#include "report.h"
#include "session.h"

namespace moekit::cli {
namespace {

struct ComboFlags {
  std::string experts, problem;
  bool full = false, stop_on_failure = false;
  int64_t tokens_total = 0;
  PlanFlags plan;
};

/// What was given on the command line is fixed, everything else varies.
ComboRequest request_of(const CLI::App& verb, const ComboFlags& flags) {
  const auto given = [&](const char* flag) { return verb.count(flag) > 0; };
  ComboRequest request;
  request.options = flags.plan.options();
  if (!flags.experts.empty() && !flags.plan.backend.empty() &&
      flags.experts != flags.plan.backend) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--experts {} and --backend {}: expected one name, they mean the same",
                            flags.experts, flags.plan.backend));
  }
  request.prepare = flags.plan.prepare;
  request.experts = flags.experts.empty() ? flags.plan.backend : flags.experts;
  if (!flags.problem.empty()) request.problem = parse_problem(flags.problem);
  if (given("--ranks") || request.options.comm.impl != nullptr) request.ranks = flags.plan.ranks;
  if (given("--wire")) request.wire = request.options.wire;
  if (given("--combine")) request.combine = request.options.combine;
  if (given("--combine-dtype")) request.combine_dtype = request.options.combine_dtype;
  if (given("--placement")) request.placement = request.options.placement;
  if (given("--tokens-total")) request.tokens_total = flags.tokens_total;
  request.full = flags.full;
  request.stop_on_failure = flags.stop_on_failure;
  request.seed = flags.plan.seed;
  return request;
}

OrderedJson to_json(const ComboResult& result) {
  const bool ran = result.verdict != ComboVerdict::refused;
  const auto number = [&](double value) { return ran ? OrderedJson(value) : OrderedJson(); };
  return {{"prepare", result.combo.prepare},
          {"experts", result.combo.experts},
          {"problem", result.combo.problem},
          {"ranks", result.combo.ranks},
          {"verdict", to_string(result.verdict)},
          {"reasons", result.reasons},
          {"rel_rms", number(result.rel_rms)},
          {"worst_row_rms", number(result.worst_row_rms)},
          {"bound", number(result.bound)},
          {"same_bits", ran ? OrderedJson(result.same_bits) : OrderedJson()},
          {"tokens_total", result.combo.tokens_total},
          {"flags", result.combo.flags}};
}

/// "[#####.....] 120 of 431, 0 failed, 12 s left".
std::string progress_text(int64_t done, int64_t total, int64_t failed, double seconds) {
  std::string text =
      fmt::format("{} {} of {}, {} failed", bar_text(done, total), done, total, failed);
  if (done > 0) {
    const double left = seconds / static_cast<double>(done) * static_cast<double>(total - done);
    text += fmt::format(", {:.0f} s left", left);
  }
  return text;
}

/// What became of the cases, for a reader.
class Outcome {
 public:
  void add(const ComboResult& result) {
    Counts& counts = pairs_[{result.combo.prepare, result.combo.experts}];
    ++counts.of[static_cast<size_t>(result.verdict)];
    if (result.verdict == ComboVerdict::passed) {
      counts.worst = std::max(counts.worst, result.worst_row_rms / std::max(result.bound, 1e-300));
    } else {
      auto& bucket = result.verdict == ComboVerdict::refused ? refused_ : failed_;
      const std::string why = fmt::format("{}", fmt::join(result.reasons, "; "));
      auto [at, fresh] = bucket.try_emplace(why, Example{result.combo, 0});
      ++at->second.count;
    }
  }

  void print(const ComboTotals& totals, double seconds) const {
    Table table({"prepare", "experts", "passed", "refused", "failed", "worst of bound"});
    for (const auto& [pair, counts] : pairs_) {
      table.add({pair.first, pair.second, std::to_string(counts.of[0]),
                 std::to_string(counts.of[1]), std::to_string(counts.of[2]),
                 counts.of[0] > 0 ? fmt::format("{:.2f}", counts.worst) : "-"});
    }
    table.print();
    print_reasons("refused", refused_);
    print_reasons("failed", failed_);
    fmt::print("\n{} passed, {} refused, {} failed in {:.1f} s\n", totals.passed, totals.refused,
               totals.failed, seconds);
  }

 private:
  struct Counts {
    int64_t of[3] = {};
    double worst = 0;
  };
  struct Example {
    ComboCase combo;
    int64_t count = 0;
  };

  static void print_reasons(const char* what, const std::map<std::string, Example>& reasons) {
    if (reasons.empty()) return;
    fmt::print("\n{}, and one case of each:\n", what);
    for (const auto& [why, example] : reasons) {
      fmt::print("{:5} x {}\n        --problem {} {}\n", example.count, why, example.combo.problem,
                 example.combo.flags);
    }
  }

  std::map<std::pair<std::string, std::string>, Counts> pairs_;
  std::map<std::string, Example> refused_, failed_;
};

void run(Session& session, const CLI::App& verb, const ComboFlags& flags) {
  using Clock = std::chrono::steady_clock;
  session.configure_log();
  const ComboRequest request = request_of(verb, flags);
  Progress progress(session);
  Outcome outcome;
  int64_t failed = 0;
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const ComboTotals totals = run_combos(
      request,
      [&](const ComboResult& result) {
        if (result.verdict == ComboVerdict::failed) ++failed;
        if (session.json) {
          progress.clear();
          return session.print_json(to_json(result));
        }
        outcome.add(result);
      },
      [&](int64_t done, int64_t total) {
        progress.step(progress_text(done, total, failed, seconds()));
      });
  progress.clear();
  if (!session.json) outcome.print(totals, seconds());
  if (totals.failed > 0) session.exit_code = 1;
}

}  // namespace

void add_combos(CLI::App& app, Session& session) {
  CLI::App* verb = app.add_subcommand(
      "combos", "Hold every prepare x experts pair to the single-rank reference");
  auto flags = std::make_shared<ComboFlags>();
  verb->add_option("--experts", flags->experts,
                   "Experts member by name (as --backend); with --prepare that pair alone runs")
      ->type_name("NAME");
  verb->add_option("--problem", flags->problem,
                   "Layer, formats, load and placement of every case, instead of many of each")
      ->type_name("SPEC");
  verb->add_option("--tokens-total", flags->tokens_total,
                   "Tokens of all ranks together, instead of the SPEC's tokens of each")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30).description(""))
      ->type_name("T");
  verb->add_flag("--full", flags->full,
                 "Every combination of all values (days without further flags), not a pairwise "
                 "cover");
  verb->add_flag("--stop-on-failure", flags->stop_on_failure, "End at the first case that fails");
  flags->plan.add_to(*verb);
  session.add_flags(*verb);
  verb->footer(
      "A plan flag that is given is fixed; the others vary.\n"
      "Example:\n  moekit combos --prepare all2all --experts cpu --ranks 4");
  verb->callback([&session, verb, flags] { run(session, *verb, *flags); });
}

}  // namespace moekit::cli
