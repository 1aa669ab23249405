// moekit quantize: writes a checkpoint whose experts are quantized.
#include <fmt/format.h>

#include <memory>
#include <string>

#include "json_writers.h"
#include "moekit/checkpoint.h"
#include "report.h"
#include "session.h"

namespace moekit::cli {

void add_quantize(CLI::App& app, Session& session) {
  CLI::App* verb =
      app.add_subcommand("quantize", "Write a compressed-tensors checkpoint of an unquantized one");
  struct Flags {
    std::string model, out;
    QuantizeOptions options;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("--model", flags->model, "Directory with config.json and safetensors")
      ->required();
  verb->add_option("--scheme", flags->options.scheme,
                   "fp8_channel, fp8_block, nvfp4, mxfp4, mxfp8 or int4_g128")
      ->required();
  verb->add_option("--out", flags->out, "Directory to write; it may not exist yet")->required();
  verb->add_option("--threads", flags->options.num_threads,
                   "Threads (default: the CPUs this process may use)")
      ->check(CLI::Range(1, 4096));
  session.add_flags(*verb);
  verb->footer(
      "Example:\n  moekit quantize --model /models/Qwen3-30B-A3B --scheme fp8_block --out "
      "/models/Qwen3-30B-A3B-FP8");
  verb->callback([&session, flags] {
    session.configure_log();
    Progress progress(session);
    flags->options.progress = [&](const std::string& text) { progress.step(text); };
    const QuantizeReport report = quantize_checkpoint(flags->model, flags->out, flags->options);
    progress.clear();
    if (session.json) {
      session.print_json({{"model", flags->model},
                          {"out", flags->out},
                          {"scheme", flags->options.scheme},
                          {"matrices", report.matrices},
                          {"tensors_copied", report.tensors_copied},
                          {"bytes_before", report.bytes_before},
                          {"bytes_after", report.bytes_after},
                          {"ignored", report.ignored}});
      return;
    }
    print_facts({{"out", flags->out},
                 {"scheme", flags->options.scheme},
                 {"quantized", fmt::format("{} matrices", report.matrices)},
                 {"copied", fmt::format("{} tensors", report.tensors_copied)},
                 {"size", fmt::format("{} from {}", bytes_text(report.bytes_after),
                                      bytes_text(report.bytes_before))}});
  });
}

}  // namespace moekit::cli
