// moekit run: one layer of a checkpoint on some rows, over one rank or many.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "moekit/error.h"
#include "moekit/tools.h"
#include "rank_process.h"
#include "run_report.h"
#include "session.h"

namespace moekit::cli {
namespace {

/// Runs once to learn the load, and puts the placement that suits it in force.
Rebalanced rebalance_layer(RankedLayer& layer, const RunFlags& flags, const LayerSource& source,
                           const RankedInputs& inputs, RankedOutputs& outputs) {
  Rebalanced result;
  if (flags.rebalance.empty()) return result;
  result.policy = flags.rebalance;
  layer.run(inputs, outputs);
  const LoadStatistics load = layer.load_statistics();
  result.imbalance_before = load.imbalance();
  RebalanceOptions options;
  options.num_ranks = flags.plan.ranks / flags.plan.tp;
  options.num_nodes = std::max(1, flags.plan.nodes);
  options.slots_per_rank = flags.plan.slots_per_rank;
  options.policy =
      flags.rebalance == "greedy" ? RebalancePolicy::greedy : RebalancePolicy::hierarchical;
  options.num_groups = source.config.router.num_groups;
  result.change = layer.set_placement(rebalance(load.per_expert, options));
  return result;
}

void check_flags(const RunFlags& flags) {
  const std::string& policy = flags.rebalance;
  if (!policy.empty() && policy != "greedy" && policy != "hierarchical") {
    throw moekit::Error(
        ErrorCode::invalid_argument,
        fmt::format("--rebalance: expected greedy or hierarchical, got \"{}\"", policy));
  }
  if (!policy.empty() && flags.plan.slots_per_rank == 0) {
    throw moekit::Error(
        ErrorCode::invalid_argument,
        "--rebalance moves experts and needs room for them: give --slots-per-rank, at "
        "least experts / ranks, more for replicas");
  }
}

void run(Session& session, const RunFlags& flags) {
  session.configure_log();
  PlanOptions options = flags.plan.options();
  check_flags(flags);
  const bool writes = own_rank() == 0;
  if (writes && !flags.output.empty()) check_output_path(flags.output);
  if (writes && !flags.save_placement.empty())
    check_writable_path("--save-placement", flags.save_placement);
  const LayerSource source = open_source(flags.model, flags.layer);
  const Inputs inputs = flags.input.load(source, flags.plan.seed);
  options.hidden_dtype = inputs.hidden.view.dtype;
  Progress progress(session);
  progress.step("packing weights");
  options.packing_progress = progress.of_packing();
  RankedLayer layer(source, options, flags.plan.ranks, inputs.num_tokens());
  progress.step("running");
  RankedOutputs outputs;
  const Rebalanced rebalanced = rebalance_layer(layer, flags, source, inputs.views(), outputs);
  layer.run(inputs.views(), outputs, flags.repeat);
  if (writes && !flags.output.empty()) {
    save_outputs(flags.output, outputs, inputs.num_tokens(), source.config);
  }
  if (writes && !flags.save_placement.empty())
    save_placement(flags.save_placement, layer.placement());
  if (outputs.dropped > 0) {
    session.warn(fmt::format("{} slots were dropped by the capacity policy", outputs.dropped));
  }
  progress.clear();
  const RunReport report{source,    flags.plan,          layer.explanation(),
                         outputs,   inputs.num_tokens(), layer.load_statistics(),
                         rebalanced};
  if (session.json) {
    session.print_json(to_json(report));
  } else {
    print_report(report);
  }
}

}  // namespace

void add_run(CLI::App& app, Session& session) {
  CLI::App* verb = app.add_subcommand("run", "Run one MoE layer of a checkpoint");
  auto flags = std::make_shared<RunFlags>();
  flags->add_to(*verb);
  flags->add_placement_flags(*verb);
  session.add_flags(*verb);
  verb->footer(
      "Example:\n  moekit run --model /models/Qwen3-30B-A3B --layer 0 --random 16 --ranks 4 "
      "--output out.safetensors");
  verb->callback([&session, flags] { run(session, *flags); });
}

}  // namespace moekit::cli
