// StageClock: events between the steps of one call on a stream, for ExpertsCall::spans.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "device/cuda/device.h"
#include "device/cuda_plugin.h"

namespace moekit::experts::cuda {

class StageClock {
 public:
  /// Before a call's first step.
  void start(cudaStream_t stream);
  /// What was enqueued since the last event is a step of `stage`.
  void mark(trace::Stage stage);
  /// After the stream has come past the last step.
  void read(std::vector<device::DeviceSpan>& spans) const;

 private:
  void record();

  cudaStream_t stream_ = nullptr;
  std::vector<trace::Stage> stages_;
  std::vector<device::Event> events_;  // grows with the steps of the longest call
  size_t used_ = 0;
};

/// Null: nobody asks for times.
inline void mark(StageClock* clock, trace::Stage stage) {
  if (clock != nullptr) clock->mark(stage);
}

}  // namespace moekit::experts::cuda
