// Trace: spans of a layer's stages per rank and thread, recorded into memory set aside at plan
// time, written as a Chrome/Perfetto file or summed up in a table.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moekit/export.h"

namespace moekit {

namespace trace {
class Recorder;
}

/// The time of one stage over all calls that were recorded.
struct StageTime {
  std::string stage;
  bool nested = false;  ///< lies inside another stage, so it adds nothing to the whole
  bool window = false;  ///< time in flight: other stages run meanwhile
  bool on_gpu = false;  ///< its spans are those of a GPU
  int64_t spans = 0;    ///< of each rank's calling thread and GPU, all ranks together
  double total_us = 0;  ///< of all ranks
  double share = 0;     ///< total over the total of all stages that are neither nested nor windows
  double max_us = 0;    ///< of the rank that spent most
  double mean_us = 0;   ///< per rank
  // What the spans moved, over all of them; -1 where none says so.
  int64_t bytes = -1;      ///< to other ranks, or copied
  int64_t own_bytes = -1;  ///< to the rank itself
  int64_t rows = -1;
};

/// A copyable handle. Given to PlanOptions before a layer is planned; one trace may serve the
/// layers of many ranks. A default Trace records nothing.
class MOEKIT_API Trace {
 public:
  Trace() = default;
  /// A ring of so many spans (rounded up to a power of two) for each thread of each rank; when it
  /// is full the oldest are overwritten.
  explicit Trace(int64_t spans_per_thread);

  bool empty() const { return recorder_ == nullptr; }
  const std::shared_ptr<trace::Recorder>& recorder() const { return recorder_; }

  // Nothing is recorded before start() and after stop(); neither may run beside a call.
  void start();  ///< forgets what was recorded
  void stop();

  /// Stages in the order in which a call goes through them; those without spans are left out.
  std::vector<StageTime> summary() const;
  int64_t lost() const;  ///< spans that were overwritten
  /// Chrome's trace format: pid = rank, tid = thread (the rank's GPU comes after its threads),
  /// complete events for stages, asynchronous ones for rows in flight. Written beside `path` and
  /// renamed. Throws invalid_argument when that fails.
  void write(const std::string& path) const;
  /// The same as text.
  std::string to_json() const;

 private:
  std::shared_ptr<trace::Recorder> recorder_;
};

}  // namespace moekit
