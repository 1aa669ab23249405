// moekit doctor: what this machine is, what moekit can use of it, what is missing and what that
// costs.
#include <fmt/format.h>

#include <memory>

#include "json_writers.h"
#include "moekit/machine.h"
#include "report.h"
#include "session.h"

namespace moekit::cli {
namespace {

void print_cpu(const CpuReport& cpu) {
  std::vector<std::string> levels, caches;
  for (const IsaLevel& level : cpu.isa_levels) {
    levels.push_back(level.usable ? level.name
                                  : fmt::format("{} (no: {})", level.name, level.reason));
  }
  for (const CpuCache& cache : cpu.caches) {
    caches.push_back(fmt::format("L{} {} {} (cpus {})", cache.level, cache.type,
                                 bytes_text(cache.bytes), cache.shared_cpus));
  }
  print_facts({{"CPU", fmt::format("{} ({})", cpu.model, cpu.architecture)},
               {"features", list_text(cpu.features)},
               {"kernel levels", list_text(levels)},
               {"level in use", cpu.isa},
               {"CPUs", fmt::format("{} online, {} allowed, {} usable{}", cpu.cpus_online,
                                    cpu.cpus_allowed, cpu.cpus_usable,
                                    cpu.cgroup_cpus > 0
                                        ? fmt::format(", cgroup grants {:.2f}", cpu.cgroup_cpus)
                                        : std::string())},
               {"caches", list_text(caches)}});
}

void print_memory(const MemoryReport& memory) {
  std::vector<std::string> nodes;
  for (const NumaNode& node : memory.numa_nodes) {
    nodes.push_back(
        fmt::format("node {}: cpus {}, {}", node.index, node.cpus, bytes_text(node.memory_bytes)));
  }
  print_facts(
      {{"memory", fmt::format("{}, {} available{}", bytes_text(memory.total_bytes),
                              bytes_text(memory.available_bytes),
                              memory.cgroup_limit_bytes > 0
                                  ? ", cgroup limit " + bytes_text(memory.cgroup_limit_bytes)
                                  : std::string())},
       {"NUMA", list_text(nodes)},
       {"huge pages",
        fmt::format("transparent: {}; {} of {} reserved and free",
                    memory.transparent_hugepages.empty() ? "unknown" : memory.transparent_hugepages,
                    memory.hugepages_free, bytes_text(memory.hugepage_bytes))}});
}

void print_parts(const MachineReport& report) {
  std::vector<std::pair<std::string, std::string>> facts;
  for (const GpuReport& gpu : report.gpus) {
    facts.emplace_back(fmt::format("GPU {}", gpu.index),
                       fmt::format("{}, compute {}, {} multiprocessors, {}", gpu.name, gpu.arch,
                                   gpu.multiprocessors, bytes_text(gpu.memory_bytes)));
  }
  if (!report.driver.empty()) facts.emplace_back("kernel driver", report.driver);
  for (const ComponentReport& part : report.components) {
    facts.emplace_back(
        part.name,
        part.found
            ? fmt::format("{} ({})", part.version.empty() ? "found" : part.version, part.detail)
            : "not found: " + part.detail);
  }
  for (const auto& [what, where] : report.cache_paths) facts.emplace_back(what, where);
  for (const auto& [name, value] : report.environment) facts.emplace_back(name, value);
  print_facts(facts);
}

void print_report(const MachineReport& report) {
  fmt::print("moekit {}\n\n", report.version);
  print_cpu(report.cpu);
  fmt::print("\n");
  print_memory(report.memory);
  fmt::print("\n");
  print_facts({{"read bandwidth", fmt::format("{:.1f} GB/s with {} thread(s)",
                                              report.probe.bandwidth_gbs, report.probe.threads)},
               {"matrix peak", fmt::format("{:.3f} TFLOP/s, {}", report.probe.matrix_tflops,
                                           report.probe.matrix_instruction)}});
  fmt::print("\n");
  print_parts(report);
  fmt::print("\n{}\n",
             report.missing.empty() ? "nothing is missing" : "missing, and what that means:");
  for (const MissingPart& part : report.missing)
    fmt::print("  {}\n    {}\n", part.what, part.effect);
}

}  // namespace

void add_doctor(CLI::App& app, Session& session) {
  CLI::App* verb =
      app.add_subcommand("doctor", "What this machine is and what moekit can use of it");
  auto threads = std::make_shared<int>(0);
  verb->add_option("--threads", *threads, "Threads of the probes (default: usable CPUs)")
      ->check(CLI::Range(0, 4096).description(""))
      ->type_name("N");
  session.add_flags(*verb);
  verb->footer("Example:\n  moekit doctor --json | python3 -m json.tool");
  verb->callback([&session, threads] {
    session.configure_log();
    const MachineReport report = examine_machine(*threads);
    if (session.json) {
      session.print_json(to_json(report));
    } else {
      print_report(report);
    }
  });
}

}  // namespace moekit::cli
