#include "trace/recorder.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace moekit::trace {

std::atomic<int> recorders_on{0};

Ring::Ring(int64_t capacity)
    : mask_(std::bit_ceil(static_cast<uint64_t>(capacity)) - 1),
      events_(std::make_unique<Event[]>(mask_ + 1)) {}

int64_t Ring::size() const {
  return std::min(next_.load(std::memory_order_relaxed), static_cast<int64_t>(mask_ + 1));
}

int64_t Ring::lost() const { return next_.load(std::memory_order_relaxed) - size(); }

std::vector<Event> Ring::events() const {
  std::vector<Event> events;
  const int64_t end = next_.load(std::memory_order_relaxed);
  events.reserve(static_cast<size_t>(size()));
  for (int64_t i = end - size(); i < end; ++i) {
    events.push_back(events_[static_cast<size_t>(i) & mask_]);
  }
  return events;
}

Recorder::Recorder(int64_t spans_per_thread) : capacity_(spans_per_thread) {
  MOEKIT_CHECK(spans_per_thread >= 1 && spans_per_thread <= int64_t{1} << 24,
               "a trace holds 1 to 2^24 spans a thread, got {}", spans_per_thread);
}

Recorder::~Recorder() { stop(); }

const RankRings* Recorder::add_rank(int rank, int num_threads, bool with_device) {
  const std::lock_guard lock(mutex_);
  auto at = std::lower_bound(ranks_.begin(), ranks_.end(), rank,
                             [](const auto& rings, int wanted) { return rings->rank < wanted; });
  if (at == ranks_.end() || (*at)->rank != rank) {
    at = ranks_.insert(at, std::make_unique<RankRings>(RankRings{rank, {}, nullptr}));
  }
  std::vector<std::unique_ptr<Ring>>& threads = (*at)->threads;
  while (static_cast<int>(threads.size()) < num_threads) {
    threads.push_back(std::make_unique<Ring>(capacity_));
  }
  std::unique_ptr<Ring>& device = (*at)->device;
  if (with_device && device == nullptr) device = std::make_unique<Ring>(capacity_);
  return at->get();
}

void Recorder::start() {
  for (const auto& rank : ranks_) {
    for (const auto& ring : rank->threads) ring->clear();
    if (rank->device != nullptr) rank->device->clear();
  }
  start_ = Clock::now();
  if (!on_.exchange(true)) recorders_on.fetch_add(1);
}

void Recorder::stop() {
  if (on_.exchange(false)) recorders_on.fetch_sub(1);
}

int64_t Recorder::lost() const {
  int64_t lost = 0;
  for (const auto& rank : ranks_) {
    for (const auto& ring : rank->threads) lost += ring->lost();
    if (rank->device != nullptr) lost += rank->device->lost();
  }
  return lost;
}

}  // namespace moekit::trace
