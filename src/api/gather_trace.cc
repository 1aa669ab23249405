// Spans of ranks that are processes, brought together.
#include <algorithm>
#include <vector>

#include "base/check.h"
#include "comm/communicator.h"
#include "moekit/tools.h"
#include "trace/recorder.h"

namespace moekit {
namespace {

/// An event and where it belongs. Plain bytes.
struct Placed {
  trace::Event event;
  int32_t rank = 0;
  int32_t thread = 0;  ///< kGpu: of the rank's GPU
};
constexpr int32_t kGpu = -1;

std::vector<Placed> events_of(const trace::Recorder& recorder) {
  std::vector<Placed> all;
  for (const auto& rank : recorder.ranks()) {
    for (size_t t = 0; t < rank->threads.size(); ++t) {
      for (const trace::Event& event : rank->threads[t]->events()) {
        all.push_back({event, rank->rank, static_cast<int32_t>(t)});
      }
    }
    if (rank->device == nullptr) continue;
    for (const trace::Event& event : rank->device->events()) {
      all.push_back({event, rank->rank, kGpu});
    }
  }
  return all;
}

struct Header {
  int64_t events;
  int64_t start_ns;
};

}  // namespace

void gather_trace(const Trace& trace, const CommunicatorHandle& ranks) {
  if (ranks.impl == nullptr || ranks.size() == 1) return;
  MOEKIT_CHECK(!trace.empty(), "an empty trace has nothing to gather; make it with a size");
  trace::Recorder& recorder = *trace.recorder();
  comm::Communicator& comm = *ranks.impl;
  const auto size = static_cast<size_t>(comm.size());
  const auto me = static_cast<size_t>(comm.rank());
  const std::vector<Placed> mine = events_of(recorder);
  const Header header{static_cast<int64_t>(mine.size()), recorder.start_ns()};
  std::vector<Header> headers(size);
  comm.allgather(&header, headers.data(), sizeof(Header), {"trace: sizes", 0});

  constexpr auto kBytes = static_cast<int64_t>(sizeof(Placed));
  std::vector<int64_t> send_offset(size, 0), send_bytes(size, header.events * kBytes);
  std::vector<int64_t> recv_offset(size), recv_bytes(size);
  for (size_t r = 0; r < size; ++r) recv_bytes[r] = headers[r].events * kBytes;
  const int64_t total = comm::exclusive_offsets(recv_bytes, recv_offset);
  std::vector<Placed> all(static_cast<size_t>(total / kBytes));
  comm.all_to_all_v({mine.data(), send_offset, send_bytes, all.data(), recv_offset, recv_bytes},
                    {"trace: spans", 0});

  for (size_t r = 0; r < size; ++r) {
    if (r == me) continue;
    const int64_t shift = headers[r].start_ns - header.start_ns;
    const auto first = static_cast<size_t>(recv_offset[r] / kBytes);
    for (size_t i = first; i < first + static_cast<size_t>(headers[r].events); ++i) {
      Placed placed = all[i];
      placed.event.begin_ns = std::max<int64_t>(0, placed.event.begin_ns + shift);
      placed.event.end_ns = std::max<int64_t>(placed.event.begin_ns, placed.event.end_ns + shift);
      const bool on_gpu = placed.thread == kGpu;
      const trace::RankRings* rings =
          recorder.add_rank(placed.rank, std::max(1, placed.thread + 1), on_gpu);
      if (on_gpu) {
        rings->device->push(placed.event);
      } else {
        rings->threads[static_cast<size_t>(placed.thread)]->push(placed.event);
      }
    }
  }
}

}  // namespace moekit
