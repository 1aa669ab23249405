// moekit inspect: what a checkpoint holds, from its config and headers alone.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "json_writers.h"
#include "moekit/checkpoint.h"
#include "moekit/describe.h"
#include "moekit/tools.h"
#include "report.h"
#include "session.h"

namespace moekit::cli {
namespace {

void print_info(const CheckpointInfo& info, bool with_tensors) {
  std::vector<std::pair<std::string, std::string>> facts = {
      {"family", info.family},
      {"quantization",
       info.quant_method.empty() ? "none" : info.quant_method + " " + info.quant_format}};
  for (const auto& [name, value] : info.conventions) facts.emplace_back(name, value);
  facts.emplace_back("ignored", list_text(info.ignored));
  print_facts(facts);
  fmt::print("\n");
  Table table({"layer", "kind", "experts", "top-k", "hidden", "inter", "activation", "shared",
               "weights", "activations", "bytes"});
  for (const LayerInfo& layer : info.layers) {
    const MoeConfig& c = layer.config;
    if (!layer.moe) {
      table.add({std::to_string(layer.index), layer.kind, "-", "-", "-", "-", "-", "-", "-", "-",
                 bytes_text(layer.bytes)});
      continue;
    }
    table.add({std::to_string(layer.index), layer.kind, std::to_string(c.num_experts),
               std::to_string(c.top_k), std::to_string(c.hidden), std::to_string(c.inter),
               activation_name(c.activation), std::to_string(c.shared.inter), weights_name(c),
               activations_name(c), bytes_text(layer.bytes)});
  }
  table.print();
  if (!with_tensors) return;
  fmt::print("\n");
  Table tensors({"tensor", "dtype", "shape", "bytes", "file"});
  for (const TensorInfo& tensor : info.tensors) {
    tensors.add({tensor.name, tensor.dtype, fmt::format("[{}]", fmt::join(tensor.shape, ", ")),
                 bytes_text(tensor.bytes), tensor.file});
  }
  tensors.print();
}

}  // namespace

void add_inspect(CLI::App& app, Session& session) {
  CLI::App* verb = app.add_subcommand("inspect", "What a checkpoint holds, without loading it");
  struct Flags {
    std::string dir;
    bool tensors = false;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("DIR", flags->dir, "Directory with config.json and safetensors")->required();
  verb->add_flag("--tensors", flags->tensors, "List every tensor as well");
  session.add_flags(*verb);
  verb->footer("Example:\n  moekit inspect /models/Qwen3-30B-A3B-FP8 --json");
  verb->callback([&session, flags] {
    session.configure_log();
    const CheckpointInfo info = inspect_checkpoint(flags->dir, flags->tensors);
    if (session.json) {
      session.print_json(OrderedJson::parse(checkpoint_json(info)));
    } else {
      print_info(info, flags->tensors);
    }
  });
}

}  // namespace moekit::cli
