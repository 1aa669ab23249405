#include "experts/cuda/stage_clock.h"

namespace moekit::experts::cuda {

void StageClock::record() {
  if (used_ == events_.size()) events_.emplace_back();
  events_[used_++].record(stream_);
}

void StageClock::start(cudaStream_t stream) {
  stream_ = stream;
  used_ = 0;
  stages_.clear();
  record();
}

void StageClock::mark(trace::Stage stage) {
  stages_.push_back(stage);
  record();
}

void StageClock::read(std::vector<device::DeviceSpan>& spans) const {
  spans.clear();
  double begin_us = 0;
  for (size_t i = 0; i < stages_.size(); ++i) {
    const double end_us = events_[i + 1].us_since(events_[0]);
    spans.push_back({stages_[i], begin_us, end_us});
    begin_us = end_us;
  }
}

}  // namespace moekit::experts::cuda
