// What this machine is and can do: the facts behind `moekit doctor` and the roofs behind `moekit
// bench`.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moekit/export.h"

namespace moekit {

struct CpuCache {
  int level = 0;
  std::string type;  ///< "data", "instruction" or "unified"
  int64_t bytes = 0;
  std::string shared_cpus;  ///< list of CPUs that share it, as the kernel spells it
};

/// One level of instructions that CPU kernels exist for.
struct IsaLevel {
  std::string name;
  bool usable = false;
  std::string reason;  ///< what is missing when not usable
};

struct CpuReport {
  std::string model;
  std::string architecture;  ///< "x86_64", "aarch64"
  std::vector<std::string> features;
  std::vector<IsaLevel> isa_levels;  ///< best first
  std::string isa;                   ///< the one that CPU kernels use here
  int cpus_online = 0;
  int cpus_allowed = 0;    ///< affinity mask
  int cpus_usable = 0;     ///< affinity mask and cgroup quota: default of --threads
  double cgroup_cpus = 0;  ///< 0: no quota
  std::vector<CpuCache> caches;
  int64_t last_level_cache_bytes = 0;  ///< all instances that the allowed CPUs share
};

struct NumaNode {
  int index = 0;
  std::string cpus;
  int64_t memory_bytes = 0;
};

struct MemoryReport {
  int64_t total_bytes = 0;
  int64_t available_bytes = 0;
  int64_t cgroup_limit_bytes = 0;  ///< 0: no limit
  std::vector<NumaNode> numa_nodes;
  std::string transparent_hugepages;  ///< "always", "madvise", "never" or ""
  int64_t hugepages_free = 0;
  int64_t hugepage_bytes = 0;
};

struct GpuReport {
  int index = 0;
  std::string name;
  std::string arch;  ///< "9.0"
  int64_t memory_bytes = 0;
  int multiprocessors = 0;
};

/// A library or tool that moekit can use when it is there.
struct ComponentReport {
  std::string name;
  bool found = false;
  std::string version;
  std::string detail;  ///< where it was found, or why not
};

struct MissingPart {
  std::string what;
  std::string effect;
};

/// Measured roofs of this process. Zero: not measured.
struct ProbeResult {
  int threads = 0;
  double bandwidth_gbs = 0;  ///< reading memory that no cache holds, 1e9 bytes a second
  double matrix_tflops = 0;  ///< best multiply-add instruction for matrix products, registers only
  std::string matrix_instruction;
  /// Of a GPU: who measured matrix_tflops, or on what it is assumed; 0 TFLOP/s: neither.
  std::string matrix_source;
};

struct MachineReport {
  std::string version;  ///< of moekit
  CpuReport cpu;
  MemoryReport memory;
  ProbeResult probe;
  std::vector<GpuReport> gpus;
  std::string driver;  ///< version of the NVIDIA kernel driver, empty: none
  std::string cuda_driver_api;
  std::vector<ComponentReport> components;
  std::vector<std::pair<std::string, std::string>>
      cache_paths;  ///< what, where; empty: no caches in this build
  std::vector<std::pair<std::string, std::string>> environment;  ///< MOEKIT_* that are set
  std::vector<MissingPart> missing;
};

/// Looks at the machine; each look is guarded, so one that fails is reported as missing. Probes run
/// with `num_threads` threads (0: the usable CPUs) unless `with_probe` is false.
MOEKIT_API MachineReport examine_machine(int num_threads = 0, bool with_probe = true);

/// Measures the roofs, interleaving `rounds` runs of both probes and keeping the best of each. A
/// quarter of a second or so; reads 256 MiB per round.
MOEKIT_API ProbeResult probe_machine(int num_threads = 0, int rounds = 3);

}  // namespace moekit
