#include "json_writers.h"

namespace moekit::cli {
namespace {

OrderedJson to_json(const CpuReport& cpu) {
  OrderedJson levels = OrderedJson::array(), caches = OrderedJson::array();
  for (const IsaLevel& level : cpu.isa_levels) {
    levels.push_back({{"name", level.name}, {"usable", level.usable}, {"reason", level.reason}});
  }
  for (const CpuCache& cache : cpu.caches) {
    caches.push_back({{"level", cache.level},
                      {"type", cache.type},
                      {"bytes", cache.bytes},
                      {"shared_cpus", cache.shared_cpus}});
  }
  return {{"model", cpu.model},
          {"architecture", cpu.architecture},
          {"features", cpu.features},
          {"isa_levels", levels},
          {"isa", cpu.isa},
          {"cpus_online", cpu.cpus_online},
          {"cpus_allowed", cpu.cpus_allowed},
          {"cpus_usable", cpu.cpus_usable},
          {"cgroup_cpus", cpu.cgroup_cpus},
          {"caches", caches},
          {"last_level_cache_bytes", cpu.last_level_cache_bytes}};
}

OrderedJson to_json(const MemoryReport& memory) {
  OrderedJson nodes = OrderedJson::array();
  for (const NumaNode& node : memory.numa_nodes) {
    nodes.push_back(
        {{"index", node.index}, {"cpus", node.cpus}, {"memory_bytes", node.memory_bytes}});
  }
  return {{"total_bytes", memory.total_bytes},
          {"available_bytes", memory.available_bytes},
          {"cgroup_limit_bytes", memory.cgroup_limit_bytes},
          {"numa_nodes", nodes},
          {"transparent_hugepages", memory.transparent_hugepages},
          {"hugepages_free", memory.hugepages_free},
          {"hugepage_bytes", memory.hugepage_bytes}};
}

OrderedJson to_json(const GpuReport& gpu) {
  return {{"index", gpu.index},
          {"name", gpu.name},
          {"arch", gpu.arch},
          {"memory_bytes", gpu.memory_bytes},
          {"multiprocessors", gpu.multiprocessors}};
}

}  // namespace

OrderedJson to_json(const ProbeResult& probe) {
  OrderedJson json = {{"bandwidth_gbs", probe.bandwidth_gbs},
                      {"matrix_tflops", probe.matrix_tflops},
                      {"matrix_instruction", probe.matrix_instruction},
                      {"threads", probe.threads}};
  if (!probe.matrix_source.empty()) json["matrix_source"] = probe.matrix_source;
  return json;
}

OrderedJson to_json(const MachineReport& report) {
  OrderedJson gpus = OrderedJson::array(), components = OrderedJson::array();
  OrderedJson caches = OrderedJson::object(), environment = OrderedJson::object();
  OrderedJson missing = OrderedJson::array();
  for (const GpuReport& gpu : report.gpus) gpus.push_back(to_json(gpu));
  for (const ComponentReport& part : report.components) {
    components.push_back({{"name", part.name},
                          {"found", part.found},
                          {"version", part.version},
                          {"detail", part.detail}});
  }
  for (const auto& [what, where] : report.cache_paths) caches[what] = where;
  for (const auto& [name, value] : report.environment) environment[name] = value;
  for (const MissingPart& part : report.missing) {
    missing.push_back({{"what", part.what}, {"effect", part.effect}});
  }
  return {{"version", report.version},
          {"cpu", to_json(report.cpu)},
          {"memory", to_json(report.memory)},
          {"probe", to_json(report.probe)},
          {"gpus", gpus},
          {"driver", report.driver},
          {"cuda_driver_api", report.cuda_driver_api},
          {"components", components},
          {"cache_paths", caches},
          {"environment", environment},
          {"missing", missing}};
}

const PlanBucket* bucket_of(const PlanSummary& plan, int64_t tokens) {
  for (const PlanBucket& bucket : plan.buckets) {
    if (tokens <= bucket.max_tokens) return &bucket;
  }
  return plan.buckets.empty() ? nullptr : &plan.buckets.back();
}

}  // namespace moekit::cli
