// moekit::Trace over trace::Recorder.
#include "moekit/trace.h"

#include <algorithm>

#include "base/check.h"
#include "base/file.h"
#include "trace/recorder.h"

namespace moekit {
namespace {

using trace::Event;
using trace::Recorder;
using trace::Ring;
using trace::StageKind;

const Recorder& checked(const std::shared_ptr<Recorder>& recorder) {
  MOEKIT_CHECK(recorder != nullptr, "an empty trace has nothing recorded; make it with a size");
  return *recorder;
}

void add(int64_t fact, int64_t& sum) {
  if (fact >= 0) sum = std::max<int64_t>(0, sum) + fact;
}

/// Spans of the ranks' calling threads and GPUs only: threads of a pool work inside a stage of
/// theirs.
StageTime time_of(const Recorder& recorder, trace::Stage stage) {
  const trace::StageInfo& info = trace::info_of(stage);
  StageTime time;
  time.stage = info.name;
  time.nested = info.kind == StageKind::nested;
  time.window = info.kind == StageKind::window;
  for (const auto& rank : recorder.ranks()) {
    double of_rank = 0;
    const auto take = [&](const Ring& ring) {
      for (const Event& event : ring.events()) {
        if (event.stage != stage) continue;
        ++time.spans;
        of_rank += static_cast<double>(event.end_ns - event.begin_ns) / 1e3;
        add(event.facts.bytes, time.bytes);
        add(event.facts.own_bytes, time.own_bytes);
        add(event.facts.rows, time.rows);
      }
    };
    take(*rank->threads.front());
    if (rank->device != nullptr) {
      const int64_t before = time.spans;
      take(*rank->device);
      time.on_gpu = time.on_gpu || time.spans > before;
    }
    time.total_us += of_rank;
    time.max_us = std::max(time.max_us, of_rank);
  }
  const auto ranks = static_cast<double>(std::max<size_t>(1, recorder.ranks().size()));
  time.mean_us = time.total_us / ranks;
  return time;
}

}  // namespace

Trace::Trace(int64_t spans_per_thread) : recorder_(std::make_shared<Recorder>(spans_per_thread)) {}

void Trace::start() {
  checked(recorder_);
  recorder_->start();
}

void Trace::stop() {
  checked(recorder_);
  recorder_->stop();
}

std::vector<StageTime> Trace::summary() const {
  const Recorder& recorder = checked(recorder_);
  std::vector<StageTime> times;
  double whole = 0;
  for (size_t s = 0; s < trace::kNumStages; ++s) {
    StageTime time = time_of(recorder, static_cast<trace::Stage>(s));
    if (time.spans == 0) continue;
    if (!time.nested && !time.window) whole += time.total_us;
    times.push_back(std::move(time));
  }
  for (StageTime& time : times) time.share = whole > 0 ? time.total_us / whole : 0;
  return times;
}

int64_t Trace::lost() const { return checked(recorder_).lost(); }

std::string Trace::to_json() const { return trace::to_chrome_json(checked(recorder_)); }

void Trace::write(const std::string& path) const { write_file_atomically(path, to_json()); }

}  // namespace moekit
