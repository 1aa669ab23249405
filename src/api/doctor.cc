#include "api/doctor.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "api/probe.h"
#include "api/x86_features.h"
#include "base/cpu_features.h"
#include "base/env.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "moekit/error.h"

namespace moekit {
namespace api {
namespace {

namespace fs = std::filesystem;

/// First line of a file without trailing blanks; empty when it can't be read.
std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && (line.back() == ' ' || line.back() == '\n')) line.pop_back();
  return line;
}

/// A number with the kernel's K, M or G suffix; 0 when there is none.
int64_t size_in_bytes(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return 0;
  switch (end == text.data() + text.size() ? '\0' : *end) {
    case 'K': return number << 10;
    case 'M': return number << 20;
    case 'G': return number << 30;
    default: return number;
  }
}

/// Value of "key:   123 kB" in /proc/meminfo style files, in bytes.
int64_t meminfo(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t at = line.find(key + ":");
    if (at == std::string::npos) continue;
    std::istringstream rest(line.substr(at + key.size() + 1));
    int64_t number = 0;
    std::string unit;
    rest >> number >> unit;
    return unit == "kB" ? number * 1024 : number;
  }
  return 0;
}

/// CPUs of a kernel list such as "0-3,8".
std::set<int> cpus_of_list(const std::string& list) {
  std::set<int> cpus;
  std::istringstream in(list);
  for (std::string part; std::getline(in, part, ',');) {
    int first = 0, last = 0;
    const int fields = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (fields == 1) last = first;
    for (int cpu = first; fields >= 1 && cpu <= last && cpu - first < 65536; ++cpu) {
      cpus.insert(cpu);
    }
  }
  return cpus;
}

std::set<int> allowed_cpus() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::set<int> cpus;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) cpus.insert(cpu);
  }
  return cpus;
}

/// CPUs that the cgroup grants in an interval; 0 when it sets no limit.
double cgroup_cpus() {
  std::istringstream v2(first_line("/sys/fs/cgroup/cpu.max"));
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period && quota != "max" && period > 0) return std::stod(quota) / period;
  const std::string v1 = first_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  const std::string v1_period = first_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (!v1.empty() && !v1_period.empty() && std::stod(v1) > 0 && std::stod(v1_period) > 0) {
    return std::stod(v1) / std::stod(v1_period);
  }
  return 0;
}

int64_t cgroup_memory_limit() {
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const int64_t limit = size_in_bytes(first_line(path));
    // Version 1 spells "no limit" as a number near 2^63.
    if (limit > 0 && limit < (int64_t{1} << 60)) return limit;
  }
  return 0;
}

/// Caches of all allowed CPUs, each instance once, and the size of the last level.
void look_at_caches(CpuReport& cpu, const std::set<int>& allowed) {
  std::set<std::string> seen;
  int last_level = 0;
  for (int number : allowed) {
    const fs::path folder = "/sys/devices/system/cpu/cpu" + std::to_string(number) + "/cache";
    for (int index = 0; index < 16; ++index) {
      const fs::path entry = folder / ("index" + std::to_string(index));
      const std::string level = first_line(entry / "level");
      if (level.empty()) break;
      CpuCache cache;
      cache.level = std::atoi(level.c_str());
      cache.type = first_line(entry / "type");
      std::transform(cache.type.begin(), cache.type.end(), cache.type.begin(),
                     [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      cache.bytes = size_in_bytes(first_line(entry / "size"));
      cache.shared_cpus = first_line(entry / "shared_cpu_list");
      if (!seen.insert(level + cache.type + cache.shared_cpus).second) continue;
      if (cache.type != "instruction") {
        if (cache.level > last_level) {
          last_level = cache.level;
          cpu.last_level_cache_bytes = 0;
        }
        if (cache.level == last_level) cpu.last_level_cache_bytes += cache.bytes;
      }
      cpu.caches.push_back(std::move(cache));
    }
  }
}

/// Levels that CPU kernels exist for, and the one in use; a bad MOEKIT_CPU_ISA shows as its reason.
void look_at_isas(CpuReport& cpu) {
  for (int i = kNumCpuIsas - 1; i >= 0; --i) {
    const auto isa = static_cast<CpuIsa>(i);
    const bool usable = has_cpu_isa(isa);
    cpu.isa_levels.push_back(
        {to_string(isa), usable, usable ? "" : "this CPU or its kernel lacks the instructions"});
  }
  try {
    cpu.isa = to_string(chosen_cpu_isa());
  } catch (const Error& e) {
    cpu.isa = e.what();
  }
}

std::string cpu_model() {
  if (!x86_features().model.empty()) return x86_features().model;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name") || line.starts_with("Model")) {
      const size_t colon = line.find(':');
      if (colon != std::string::npos && colon + 2 < line.size()) return line.substr(colon + 2);
    }
  }
  return "unknown";
}

}  // namespace

CpuReport look_at_cpu() {
  CpuReport cpu;
  utsname name{};
  if (uname(&name) == 0) cpu.architecture = name.machine;
  cpu.model = cpu_model();
  cpu.features = x86_features().names();
  look_at_isas(cpu);
  const std::set<int> allowed = allowed_cpus();
  cpu.cpus_online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu.cpus_allowed = static_cast<int>(allowed.size());
  cpu.cpus_usable = usable_cpus();
  cpu.cgroup_cpus = cgroup_cpus();
  look_at_caches(cpu, allowed);
  return cpu;
}

MemoryReport look_at_memory() {
  MemoryReport memory;
  memory.total_bytes = meminfo("/proc/meminfo", "MemTotal");
  memory.available_bytes = meminfo("/proc/meminfo", "MemAvailable");
  memory.cgroup_limit_bytes = cgroup_memory_limit();
  memory.hugepages_free = meminfo("/proc/meminfo", "HugePages_Free");
  memory.hugepage_bytes = meminfo("/proc/meminfo", "Hugepagesize");
  // The file lists all modes, the current one in brackets.
  const std::string modes = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  const size_t open = modes.find('['), close = modes.find(']');
  if (open != std::string::npos && close != std::string::npos && close > open) {
    memory.transparent_hugepages = modes.substr(open + 1, close - open - 1);
  }
  for (int index : cpus_of_list(first_line("/sys/devices/system/node/online"))) {
    const fs::path folder = "/sys/devices/system/node/node" + std::to_string(index);
    NumaNode node;
    node.index = index;
    node.cpus = first_line(folder / "cpulist");
    node.memory_bytes = meminfo(folder / "meminfo", "MemTotal");
    memory.numa_nodes.push_back(std::move(node));
  }
  return memory;
}

void judge(MachineReport& report) {
  auto miss = [&](std::string what, std::string effect) {
    report.missing.push_back({std::move(what), std::move(effect)});
  };
  if (report.gpus.empty()) {
    miss("no NVIDIA GPU that the driver shows", "layers run on the CPU; --device cuda is refused");
  }
  for (const ComponentReport& part : report.components) {
    if (part.found) continue;
    if (part.name == "cuda toolkit") {
      miss("no CUDA toolkit", "GPU kernels can't be built here");
    } else if (part.name == "nccl") {
      miss("no NCCL library", "no GPU ranks across hosts (--transport nccl)");
    } else if (part.name == "mpi") {
      miss("no MPI library", "CPU ranks are threads of one process (--transport threads)");
    } else if (part.name == "cuda plug-in") {
      miss("no CUDA plug-in (libmoekit_cuda.so)",
           "--device cuda is refused; configure with -DMOEKIT_CUDA=ON, which needs nvcc 13");
    } else if (part.name == "mpi plug-in") {
      miss("no MPI plug-in (libmoekit_mpi.so)",
           "--transport mpi is refused; build with an MPI's headers installed");
    }
  }
  if (report.memory.transparent_hugepages == "never") {
    miss("transparent huge pages are off",
         "packed weights lie in small pages: more TLB misses in decode");
  }
  if (report.cpu.cpus_usable < report.cpu.cpus_online) {
    miss("this process may use " + std::to_string(report.cpu.cpus_usable) + " of " +
             std::to_string(report.cpu.cpus_online) + " CPUs",
         "--threads defaults to the usable ones");
  }
  for (const IsaLevel& level : report.cpu.isa_levels) {
    if (!level.usable) {
      miss("CPU kernels of level " + level.name + ": " + level.reason,
           "the level " + report.cpu.isa + " runs instead");
    }
  }
}

}  // namespace api

ProbeResult probe_machine(int num_threads, int rounds) {
  api::Probe probe(num_threads, api::look_at_cpu().last_level_cache_bytes);
  for (int i = 0; i < rounds; ++i) probe.round();
  return probe.best();
}

MachineReport examine_machine(int num_threads, bool with_probe) {
  MachineReport report;
  auto guarded = [&](const char* what, auto&& look) {
    try {
      look();
    } catch (const std::exception& e) {
      log::warning("doctor could not look at {}: {}", what, e.what());
      report.missing.push_back({std::string("a look at ") + what + " failed", e.what()});
    }
  };
  report.version = MOEKIT_VERSION;
  guarded("the CPU", [&] { report.cpu = api::look_at_cpu(); });
  guarded("the memory", [&] { report.memory = api::look_at_memory(); });
  guarded("GPUs", [&] { api::look_at_gpus(report); });
  guarded("optional parts", [&] { api::look_at_components(report); });
  guarded("the environment", [&] { report.environment = env_with_prefix("MOEKIT_"); });
  if (with_probe) {
    guarded("its speed", [&] { report.probe = probe_machine(num_threads); });
  }
  api::judge(report);
  return report;
}

}  // namespace moekit
