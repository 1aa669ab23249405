// Events as Chrome's trace format ("Trace Event Format"), which Perfetto reads too. Stages are
// complete events (ph X); time in flight is a pair of asynchronous events (ph b and e), which
// viewers draw on tracks of their own.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "trace/recorder.h"

namespace moekit::trace {
namespace {

double us(int64_t ns) { return static_cast<double>(ns) / 1e3; }

void append_args(std::string& out, const Event& event) {
  const auto to = std::back_inserter(out);
  fmt::format_to(to, R"("args":{{"call":{},"microbatch":{})", event.call, event.workspace);
  const Facts& facts = event.facts;
  if (facts.bytes >= 0) fmt::format_to(to, R"(,"bytes":{})", facts.bytes);
  if (facts.own_bytes >= 0) fmt::format_to(to, R"(,"own_bytes":{})", facts.own_bytes);
  if (facts.rows >= 0) fmt::format_to(to, R"(,"rows":{})", facts.rows);
  if (facts.tokens >= 0) fmt::format_to(to, R"(,"tokens":{})", facts.tokens);
  if (facts.experts >= 0) fmt::format_to(to, R"(,"experts":{})", facts.experts);
  out += '}';
}

void append_half(std::string& out, const Event& event, int rank, char phase, int64_t at_ns) {
  const StageInfo& info = info_of(event.stage);
  // One window of a kind can be open in a workspace of a rank at a time.
  fmt::format_to(std::back_inserter(out),
                 ",\n"
                 R"({{"ph":"{}","name":"{}","cat":"{}","id":"{}.{}.{}.{}","pid":{},"tid":0,)"
                 R"("ts":{:.3f},)",
                 phase, info.name, info.category, rank, event.workspace, event.call,
                 static_cast<int>(event.stage), rank, us(at_ns));
  append_args(out, event);
  out += '}';
}

void append_event(std::string& out, const Event& event, int rank, size_t thread) {
  const StageInfo& info = info_of(event.stage);
  if (info.kind == StageKind::window) {
    append_half(out, event, rank, 'b', event.begin_ns);
    append_half(out, event, rank, 'e', event.end_ns);
    return;
  }
  fmt::format_to(std::back_inserter(out),
                 ",\n"
                 R"({{"ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{:.3f},)"
                 R"("dur":{:.3f},)",
                 info.name, info.category, rank, thread, us(event.begin_ns),
                 us(event.end_ns - event.begin_ns));
  append_args(out, event);
  out += '}';
}

/// Rings of a rank by track: its threads, then its GPU.
std::vector<const Ring*> tracks_of(const RankRings& rank) {
  std::vector<const Ring*> tracks;
  for (const auto& ring : rank.threads) tracks.push_back(ring.get());
  if (rank.device != nullptr) tracks.push_back(rank.device.get());
  return tracks;
}

void append_names(std::string& out, const RankRings& rank, bool& first) {
  const auto to = std::back_inserter(out);
  fmt::format_to(to,
                 "{}\n"
                 R"({{"ph":"M","name":"process_name","pid":{},"tid":0,)"
                 R"("args":{{"name":"rank {}"}}}})",
                 first ? "" : ",", rank.rank, rank.rank);
  first = false;
  const size_t num_threads = rank.threads.size();
  for (size_t t = 0; t < tracks_of(rank).size(); ++t) {
    fmt::format_to(to,
                   ",\n"
                   R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},)"
                   R"("args":{{"name":"{}"}}}})",
                   rank.rank, t, t < num_threads ? fmt::format("thread {}", t) : "GPU");
  }
}

}  // namespace

std::string to_chrome_json(const Recorder& recorder) {
  std::string out = R"({"displayTimeUnit":"ns","otherData":{"spans_lost":)";
  fmt::format_to(std::back_inserter(out), "{}}},\"traceEvents\":[", recorder.lost());
  bool first = true;
  for (const auto& rank : recorder.ranks()) append_names(out, *rank, first);
  for (const auto& rank : recorder.ranks()) {
    const std::vector<const Ring*> tracks = tracks_of(*rank);
    for (size_t t = 0; t < tracks.size(); ++t) {
      std::vector<Event> events = tracks[t]->events();
      std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
        return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
      });
      for (const Event& event : events) append_event(out, event, rank->rank, t);
    }
  }
  out += "\n]}\n";
  return out;
}

}  // namespace moekit::trace
