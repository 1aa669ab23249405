// moekit check: every back-end that takes a layer, against the reference and against golden rows.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "json_writers.h"
#include "layer_flags.h"
#include "moekit/checkpoint.h"
#include "moekit/error.h"
#include "moekit/tools.h"
#include "plan_flags.h"
#include "report.h"
#include "session.h"

namespace moekit::cli {
namespace {

struct CheckFlags {
  std::string model, golden;
  int layer = -1;
  bool all_layers = false;
  InputFlags input;
  PlanFlags plan;
};

void put_errors(OrderedJson& json, const std::string& prefix, const Errors& errors) {
  json[prefix + "max_abs"] = errors.max_abs;
  json[prefix + "rel_rms"] = errors.rel_rms;
  json[prefix + "worst_row_rms"] = errors.worst_row_rms;
  json[prefix + "worst_row"] = errors.worst_row;
  json[prefix + "nonfinite_mismatches"] = errors.nonfinite_mismatches;
}

OrderedJson to_json(const CheckResult& result, const LayerSource& source, const PlanFlags& plan,
                    int64_t num_tokens) {
  OrderedJson json = {
      {"backend", result.backend}, {"supported", result.supported}, {"reasons", result.reasons}};
  if (result.supported) {
    put_errors(json, "", result.errors);
    json["bound"] = result.bound;
    if (result.golden_errors) {
      put_errors(json, "golden_", *result.golden_errors);
      json["golden_bound"] = nullptr;
      if (result.golden_bound) json["golden_bound"] = *result.golden_bound;
      json["golden_judged"] = result.golden_bound.has_value();
    }
    json["passed"] = result.passed;
  } else {
    for (const char* key : {"max_abs", "rel_rms", "worst_row_rms", "bound", "passed"}) {
      json[key] = nullptr;
    }
  }
  json["layer"] = source.layer;
  json["activations"] = plan.activations;
  json["tokens"] = num_tokens;
  json["ranks"] = plan.ranks;
  return json;
}

/// A golden next to a run whose static activation scales may saturate: no bound can be derived.
bool is_unjudged(const CheckResult& result) { return result.golden_errors && !result.golden_bound; }

std::string verdict_text(const CheckResult& result) {
  auto nonfinite = [](const Errors& errors) {
    return fmt::format("{} values are finite in one of the two only, the first in row {}",
                       errors.nonfinite_mismatches, errors.nonfinite_row);
  };
  if (result.passed && is_unjudged(result)) return "passed, golden not judged";
  if (result.passed) return "passed";
  if (result.errors.nonfinite_mismatches > 0) return "FAILED: " + nonfinite(result.errors);
  if (result.errors.worst_row_rms > result.bound)
    return fmt::format("FAILED in row {}", result.errors.worst_row);
  if (result.golden_errors->nonfinite_mismatches > 0)
    return "FAILED against the golden: " + nonfinite(*result.golden_errors);
  return fmt::format("FAILED against golden row {}", result.golden_errors->worst_row);
}

/// A golden that was computed without quantizing activations, next to a run that quantizes them:
/// what the comparison can tell, and what to do for a finer one.
bool is_coarse(const CheckResult& result) {
  return result.golden_errors && result.golden_bound && *result.golden_bound > 0.05;
}

std::vector<std::string> to_row(const CheckResult& result, int layer, bool with_golden) {
  std::vector<std::string> row = {std::to_string(layer), result.backend};
  if (!result.supported) {
    row.insert(row.end(), with_golden ? 6 : 4, "-");
    row.push_back("refuses: " + list_text(result.reasons));
    return row;
  }
  row.push_back(fmt::format("{:.3e}", result.errors.max_abs));
  row.push_back(fmt::format("{:.3e}", result.errors.rel_rms));
  row.push_back(fmt::format("{:.3e}", result.errors.worst_row_rms));
  row.push_back(fmt::format("{:.3e}", result.bound));
  if (with_golden) {
    row.push_back(fmt::format("{:.3e}", result.golden_errors->worst_row_rms));
    row.push_back(result.golden_bound ? fmt::format("{:.3e}", *result.golden_bound) : "none");
  }
  row.push_back(verdict_text(result));
  return row;
}

/// The layers to check: one, or every MoE layer of the checkpoint.
std::vector<int> layers_of(const CheckFlags& flags) {
  if (!flags.all_layers) return {flags.layer};
  std::vector<int> layers;
  bool any_hash = false;
  for (const LayerInfo& layer : inspect_checkpoint(flags.model).layers) {
    if (layer.moe) layers.push_back(layer.index);
    any_hash = any_hash || (layer.moe && layer.config.router.hash_routing);
  }
  if (!any_hash && !flags.input.token_ids.empty()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--token-ids: expected a layer that routes by token id, {} has none; "
                            "leave the flag out",
                            flags.model));
  }
  if (layers.empty()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--all-layers: {} has no MoE layer to check", flags.model));
  }
  return layers;
}

void run(Session& session, const CheckFlags& flags) {
  session.configure_log();
  const PlanOptions options = flags.plan.options();
  const bool with_golden = !flags.golden.empty();
  std::vector<std::string> header = {"layer",   "back-end",      "max abs",
                                     "rel rms", "worst row rms", "bound"};
  if (with_golden) {
    header.push_back("golden worst row rms");
    header.push_back("golden bound");
  }
  header.push_back("verdict");
  Table table(std::move(header));
  Progress progress(session);
  bool all_passed = true, coarse = false, unjudged = false;
  std::vector<std::string> unchecked;  // layers that no back-end takes
  for (int layer : layers_of(flags)) {
    const LayerSource source = open_source(flags.model, layer);
    InputFlags input = flags.input;
    // Of all layers, some may route by token id and others not.
    if (flags.all_layers && !source.config.router.hash_routing) input.token_ids.clear();
    const Inputs inputs = input.load(source, flags.plan.seed);
    OwnedTensor golden;
    if (with_golden) golden = load_golden(flags.golden, inputs.num_tokens(), source.config.hidden);
    PlanOptions mine = options;
    mine.hidden_dtype = inputs.hidden.view.dtype;
    mine.packing_progress = progress.of_packing();
    const std::vector<CheckResult> results = check_layer(
        source, mine, flags.plan.ranks, inputs.views(), golden.view, [&](const std::string& what) {
          progress.step(fmt::format("layer {}: {}", source.layer, what));
        });
    progress.clear();
    const auto takes = [](const CheckResult& result) { return result.supported; };
    if (std::none_of(results.begin(), results.end(), takes)) {
      unchecked.push_back(std::to_string(source.layer));
    }
    for (const CheckResult& result : results) {
      all_passed = all_passed && (!result.supported || result.passed);
      coarse = coarse || is_coarse(result);
      unjudged = unjudged || is_unjudged(result);
      if (session.json) {
        session.print_json(to_json(result, source, flags.plan, inputs.num_tokens()));
      } else {
        table.add(to_row(result, source.layer, with_golden));
      }
    }
  }
  if (!session.json) table.print();
  if (!session.json && coarse) {
    fmt::print(
        "\nQuantized activations move a row further than a wrong weight may: with --activations "
        "f32 "
        "a golden that\nwas computed without quantizing them is held to about 1e-5.\n");
  }
  if (!session.json && unjudged) {
    fmt::print(
        "\nThe golden was NOT judged: activations are quantized with static scales, which may "
        "saturate, and no\nbound can be derived. With --activations f32 a golden that was computed "
        "without quantizing them is\nheld to about 1e-5.\n");
  }
  if (!all_passed) {
    session.exit_code = 1;
  } else if (!unchecked.empty()) {
    throw Error(ErrorCode::unsupported,
                fmt::format("nothing was checked of layer {}: every back-end refuses it, for the "
                            "reasons above",
                            list_text(unchecked)));
  }
}

}  // namespace

void add_check(CLI::App& app, Session& session) {
  CLI::App* verb = app.add_subcommand("check", "Compare every back-end with the reference");
  auto flags = std::make_shared<CheckFlags>();
  verb->add_option("--model", flags->model, "Checkpoint directory")->required()->type_name("DIR");
  add_layer_flag(*verb, flags->layer);
  verb->add_flag("--all-layers", flags->all_layers, "Check every MoE layer")
      ->excludes(verb->get_option("--layer"));
  verb->add_option("--golden", flags->golden, "Known output [T, H] of the same tokens")
      ->type_name("FILE[:NAME]");
  flags->input.add_to(*verb);
  flags->plan.add_to(*verb);
  session.add_flags(*verb);
  verb->footer(
      "Exit status 1 when a back-end leaves its bound, 3 when none takes a layer.\n"
      "Example:\n  moekit check --model /models/Mixtral-8x7B --layer 3 --random 64 --ranks 2 "
      "--json");
  verb->callback([&session, flags, verb] {
    if (verb->count("--golden") > 0 && verb->count("--tokens") + verb->count("--random") == 0) {
      throw Error(ErrorCode::invalid_argument,
                  "--golden: expected the rows that it is the output of, got none; give --tokens "
                  "FILE with it (or --random T, if it was computed from these)");
    }
    run(session, *flags);
  });
}

}  // namespace moekit::cli
