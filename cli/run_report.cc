#include "run_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "moekit/describe.h"
#include "report.h"

namespace moekit::cli {
namespace {

struct TimeSummary {
  double median = 0, min = 0, max = 0;
};

TimeSummary summarize(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const size_t n = times.size();
  return {(times[(n - 1) / 2] + times[n / 2]) / 2, times.front(), times.back()};
}

/// The activation formats that the GEMMs read: the flag's, or the checkpoint's.
std::string activations_of(const RunReport& report) {
  return report.flags.activations == "checkpoint" ? activations_name(report.source.config)
                                                  : report.flags.activations;
}

std::string load_text(const RunReport& report) {
  std::string text = fmt::format("heaviest rank {:.3f} of the mean", report.load.imbalance());
  if (!report.rebalanced.policy.empty()) {
    text +=
        fmt::format(", {:.3f} before {} rebalancing ({} experts packed, {} kept)",
                    report.rebalanced.imbalance_before, report.rebalanced.policy,
                    report.rebalanced.change.experts_packed, report.rebalanced.change.experts_kept);
  }
  return text;
}

}  // namespace

void RunFlags::add_to(CLI::App& verb) {
  verb.add_option("--model", model, "Checkpoint directory")->required()->type_name("DIR");
  add_layer_flag(verb, layer);
  verb.add_option("--output", output,
                  "Write [T, H] as .npy, or as .safetensors with the routing beside it")
      ->type_name("FILE");
  verb.add_option("--repeat", repeat, "Calls to time")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000'000).description(""))
      ->type_name("N");
  input.add_to(verb);
  plan.add_to(verb);
}

void RunFlags::add_placement_flags(CLI::App& verb) {
  verb.add_option("--rebalance", rebalance,
                  "Run once more before, and place the experts by the load measured: greedy, or "
                  "hierarchical (routing groups stay on a node). Needs --slots-per-rank")
      ->type_name("POLICY");
  verb.add_option("--save-placement", save_placement,
                  "Write the placement in force at the end, for --placement")
      ->type_name("FILE");
}

void print_report(const RunReport& report) {
  const PlanSummary& plan = report.explanation.plan;
  const TimeSummary time = summarize(report.outputs.time_us);
  const OutputStats stats = stats_of(report.outputs.output);
  print_facts(
      {{"model", report.source.model},
       {"layer", fmt::format("{} ({})", report.source.layer, report.source.family)},
       {"scheme", fmt::format("{} weights, {} activations", weights_name(report.source.config),
                              activations_of(report))},
       {"tokens", fmt::format("{} on {} rank(s)", report.num_tokens, report.flags.ranks)},
       {"back-end", fmt::format("{} with prepare {}, transport {}", plan.backend, plan.prepare,
                                plan.transport)},
       {"memory",
        fmt::format("{} weights, {} workspace, {} wire a rank", bytes_text(plan.weights_bytes),
                    bytes_text(plan.workspace_bytes), bytes_text(plan.wire_bytes))},
       {"time",
        fmt::format("{} median of {} ({} to {})", time_text(time.median),
                    report.outputs.time_us.size(), time_text(time.min), time_text(time.max))},
       {"output", fmt::format("rms {:.6g}, max {:.6g}, {} NaN, {} inf", stats.rms, stats.max_abs,
                              stats.nan_count, stats.inf_count)},
       {"dropped", fmt::format("{} slots", report.outputs.dropped)},
       {"load", load_text(report)}});
}

OrderedJson to_json(const RunReport& report) {
  const PlanSummary& plan = report.explanation.plan;
  const TimeSummary time = summarize(report.outputs.time_us);
  const OutputStats stats = stats_of(report.outputs.output);
  OrderedJson plan_object = OrderedJson::parse(plan_json(plan));
  const int64_t shares = report.flags.ranks / report.flags.tp;
  const int64_t share = (report.num_tokens + shares - 1) / shares;
  const PlanBucket* bucket = bucket_of(plan, share);
  plan_object["knobs"] = bucket != nullptr ? bucket->knobs : "";
  OrderedJson json = {{"model", report.source.model},
                      {"family", report.source.family},
                      {"layer", report.source.layer},
                      {"scheme", weights_name(report.source.config)},
                      {"activations", activations_of(report)},
                      {"tokens", report.num_tokens},
                      {"ranks", report.flags.ranks},
                      {"backend", plan.backend},
                      {"prepare", plan.prepare},
                      {"transport", plan.transport},
                      {"plan", plan_object},
                      {"time_us",
                       {{"median", time.median},
                        {"min", time.min},
                        {"max", time.max},
                        {"repeat", report.outputs.time_us.size()}}},
                      {"output",
                       {{"rms", stats.rms},
                        {"max_abs", stats.max_abs},
                        {"nan_count", stats.nan_count},
                        {"inf_count", stats.inf_count}}},
                      {"dropped", report.outputs.dropped},
                      {"load",
                       {{"per_expert", report.load.per_expert},
                        {"per_rank", report.load.per_rank},
                        {"imbalance", report.load.imbalance()},
                        {"calls", report.load.calls}}}};
  if (!report.rebalanced.policy.empty()) {
    json["rebalanced"] = {{"policy", report.rebalanced.policy},
                          {"imbalance_before", report.rebalanced.imbalance_before},
                          {"experts_packed", report.rebalanced.change.experts_packed},
                          {"experts_kept", report.rebalanced.change.experts_kept},
                          {"bytes_packed", report.rebalanced.change.bytes_packed}};
  }
  return json;
}

}  // namespace moekit::cli
