// moekit profile: a run whose stages are recorded per rank and thread: a table of where the time
// went, and a Chrome/Perfetto trace.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "moekit/error.h"
#include "moekit/tools.h"
#include "moekit/trace.h"
#include "rank_process.h"
#include "report.h"
#include "run_report.h"
#include "session.h"

namespace moekit::cli {
namespace {

// A call takes about 30 spans of a thread, a microbatch each; older calls give way beyond this.
constexpr int64_t kSpansPerCall = 64;
constexpr int64_t kMostSpans = 1 << 16;
constexpr int kMostMicrobatches = 8;

struct ProfileFlags {
  RunFlags run;
  std::string trace;
  int microbatches = 1;
};

OrderedJson to_json(const StageTime& time) {
  const auto count = [](int64_t n) { return n < 0 ? OrderedJson() : OrderedJson(n); };
  return {{"stage", time.stage},
          {"kind", time.window ? "in flight" : time.nested ? "nested" : "step"},
          {"spans", time.spans},
          {"on_gpu", time.on_gpu},
          {"total_us", time.total_us},
          {"share", time.share},
          {"max_us", time.max_us},
          {"mean_us", time.mean_us},
          {"bytes", count(time.bytes)},
          {"own_bytes", count(time.own_bytes)},
          {"rows", count(time.rows)}};
}

void print_stages(const std::vector<StageTime>& stages) {
  Table table({"stage", "total", "share", "spans", "rank mean", "rank max", "bytes", "rows"});
  for (const StageTime& time : stages) {
    // A window overlaps the steps, so it has no share of them.
    table.add({(time.nested ? "  " : "") + time.stage + (time.on_gpu ? " (GPU)" : ""),
               time_text(time.total_us),
               time.window ? "-" : fmt::format("{:.1f} %", 100 * time.share),
               std::to_string(time.spans), time_text(time.mean_us), time_text(time.max_us),
               time.bytes >= 0 ? bytes_text(time.bytes) : "-",
               time.rows >= 0 ? std::to_string(time.rows) : "-"});
  }
  table.print();
}

void run(Session& session, const ProfileFlags& flags) {
  session.configure_log();
  PlanOptions options = flags.run.plan.options();
  const bool writes = own_rank() == 0;
  if (writes && !flags.run.output.empty()) check_output_path(flags.run.output);
  if (writes && !flags.trace.empty()) check_writable_path("--trace", flags.trace);
  const LayerSource source = open_source(flags.run.model, flags.run.layer);
  const Inputs inputs = flags.run.input.load(source, flags.run.plan.seed);
  options.hidden_dtype = inputs.hidden.view.dtype;
  const int64_t calls = int64_t{flags.run.repeat} * flags.microbatches;
  options.trace = Trace(std::min(kMostSpans, calls * kSpansPerCall));
  Progress progress(session);
  progress.step("packing weights");
  options.packing_progress = progress.of_packing();
  const RankedLayer layer(source, options, flags.run.plan.ranks, inputs.num_tokens());
  progress.step("running");
  RankedOutputs outputs;
  RunOptions call{.repeat = 1, .microbatches = flags.microbatches};
  layer.run(inputs.views(), outputs, call);  // pages and caches as in the calls to come
  call.repeat = flags.run.repeat;
  options.trace.start();
  layer.run(inputs.views(), outputs, call);
  options.trace.stop();
  gather_trace(options.trace, options.comm);
  if (writes && !flags.run.output.empty()) {
    save_outputs(flags.run.output, outputs, inputs.num_tokens(), source.config);
  }
  if (writes && !flags.trace.empty()) options.trace.write(flags.trace);
  progress.clear();
  const std::vector<StageTime> stages = options.trace.summary();
  const int64_t lost = options.trace.lost();
  if (lost > 0)
    session.warn(fmt::format("the trace holds the last calls only: {} spans lost", lost));
  const RunReport report{source,  flags.run.plan,      layer.explanation(),
                         outputs, inputs.num_tokens(), layer.load_statistics(),
                         {}};
  if (!session.json) {
    print_report(report);
    fmt::print("\n");
    return print_stages(stages);
  }
  OrderedJson json = to_json(report);
  json["microbatches"] = flags.microbatches;
  json["trace"] = flags.trace.empty() ? OrderedJson() : OrderedJson(flags.trace);
  json["spans_lost"] = lost;
  json["stages"] = OrderedJson::array();
  for (const StageTime& time : stages) json["stages"].push_back(to_json(time));
  session.print_json(json);
}

}  // namespace

void add_profile(CLI::App& app, Session& session) {
  CLI::App* verb = app.add_subcommand("profile", "Run a layer and show where its time goes");
  auto flags = std::make_shared<ProfileFlags>();
  flags->run.add_to(*verb);
  verb->add_option("--trace", flags->trace,
                   "Write the spans in Chrome's trace format (chrome://tracing, ui.perfetto.dev)")
      ->type_name("FILE.json");
  verb->add_option("--microbatches", flags->microbatches,
                   "Parts of each rank's rows: one part's exchange is in flight while another's "
                   "experts run")
      ->capture_default_str()
      ->check(CLI::Range(1, kMostMicrobatches).description(""))
      ->type_name("N");
  session.add_flags(*verb);
  verb->footer(
      "Example:\n  moekit profile --model /models/Qwen3-30B-A3B --random 512 --ranks 2 "
      "--microbatches 2 --repeat 5 --trace trace.json");
  verb->callback([&session, flags] { run(session, *flags); });
}

}  // namespace moekit::cli
