// Probes: read bandwidth and matrix peak of the CPUs of this process, the roofs that timings are
// held against. They run beside the work that they judge, because both figures drift from minute to
// minute on shared hosts.
#pragma once

#include <cstdint>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "moekit/machine.h"

namespace moekit::api {

/// Owns the memory that the bandwidth probe reads and the threads of both probes. One user at a
/// time.
class Probe {
 public:
  /// Reads max(256 MiB, four times `last_level_cache_bytes`) per round. Throws out_of_memory.
  Probe(int num_threads, int64_t last_level_cache_bytes);

  /// Runs both probes once, about 15 ms of arithmetic after one pass over the memory.
  void round();

  /// Copies once from one half of the memory to the other, each thread blocks of its own.
  void copy_round();
  /// Best of all copy rounds so far, 1e9 bytes copied a second (each byte counts once).
  double copy_gbs() const { return copy_gbs_; }

  /// Best figures of all rounds so far: interference only ever lowers them.
  const ProbeResult& best() const { return best_; }

 private:
  double read_once();
  double multiply_once();

  ThreadPool threads_;
  Buffer memory_;
  ProbeResult best_;
  double copy_gbs_ = 0;
};

}  // namespace moekit::api
