#include "comm/thread_group.h"

#include <cstring>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/rank_text.h"
#include "base/thread_pool.h"
#include "comm/thread_heap.h"
#include "comm/wait_word.h"

namespace moekit::comm {
namespace {

// About 20 µs of pause instructions (40 to 140 cycles each since Skylake, Intel optimization manual
// 2.4.4): longer than ranks in step need to meet, short enough to leave the core soon. Ranks that
// outnumber the CPUs don't spin at all: the peer that they wait for needs the core.
constexpr int kSpins = 600;

}  // namespace

ThreadGroup::ThreadGroup(std::chrono::nanoseconds deadline, std::vector<int> nodes)
    : size_(static_cast<int>(nodes.size())),
      nodes_(std::move(nodes)),
      spins_(size_ <= usable_cpus() ? kSpins : 0),
      deadline_(deadline),
      progress_(new Progress[static_cast<size_t>(size_)]),
      bells_(new Bell[static_cast<size_t>(size_)]) {
  for (Lane& lane : lanes_) lane.posts.reset(new Post[static_cast<size_t>(size_)]);
}

std::shared_ptr<ThreadGroup> ThreadGroup::child(int64_t split, int color,
                                                const std::vector<int>& nodes) {
  const std::lock_guard lock(children_mutex_);
  const auto key = std::pair(split, color);
  Child& child = children_[key];
  if (!child.group) child.group = std::make_shared<ThreadGroup>(deadline_, nodes);
  std::shared_ptr<ThreadGroup> group = child.group;
  if (++child.taken == nodes.size()) children_.erase(key);
  return group;
}

uint32_t ThreadGroup::arrive(int64_t operation, int rank, bool posted) {
  Lane& lane = this->lane(operation);
  lane.posts[rank].meetings.fetch_add(1, std::memory_order_relaxed);
  // Release publishes this rank's post (or the end of its reads), acquire takes those of the ranks
  // that came before.
  const uint32_t before = lane.word.fetch_add(1, std::memory_order_acq_rel);
  if (before & kFailed) throw_reason(rank);
  const uint32_t meeting = meeting_of(before);
  if ((before & kCountMask) + 1 != static_cast<uint32_t>(size_)) return meeting;

  if (posted) {
    std::string difference;
    {
      Reader reader(*this, rank);
      difference = compare_posts(operation);
    }
    if (!difference.empty()) {
      poison(ErrorCode::comm, std::move(difference));
      throw_reason(rank);
    }
  }
  // The next meeting starts with no rank there. A failure that came first stays.
  uint32_t word = lane.word.load(std::memory_order_relaxed);
  uint32_t next;
  do {
    if (word & kFailed) throw_reason(rank);
    next = ((meeting + 1) * kMeeting) & ~kFailed;
    // Release publishes what all ranks posted to those that wait.
  } while (!lane.word.compare_exchange_weak(word, next, std::memory_order_acq_rel));
  if (size_ > 1) wake_all(lane.word);
  return meeting;
}

bool ThreadGroup::met(int64_t operation, uint32_t meeting) const {
  const uint32_t word = lane(operation).word.load(std::memory_order_acquire);
  return (word & kFailed) != 0 || meeting_of(word) != meeting;
}

void ThreadGroup::wait(int64_t operation, int rank, uint32_t meeting) {
  const std::atomic<uint32_t>& word = lane(operation).word;
  note(rank, post(operation, rank).site);
  for (int spin = 0; spin < spins_ && !met(operation, meeting); ++spin) spin_pause();
  const auto until = std::chrono::steady_clock::now() + deadline_;
  for (;;) {
    const uint32_t now = word.load(std::memory_order_acquire);
    // A meeting that is over has held, even where a rank that has left it failed the group since.
    if (meeting_of(now) != meeting) return;
    if (now & kFailed) throw_reason(rank);
    if (std::chrono::steady_clock::now() >= until) {
      expire(operation, rank, meeting);
      continue;
    }
    sleep_on(word, now, until);
  }
}

ThreadGroup::Reader::Reader(ThreadGroup& group, int rank) : group_(group) {
  // Sequentially consistent with failed_: either this count is seen by a rank that leaves because
  // of a failure, or the failure is seen here.
  group_.readers_.fetch_add(1, std::memory_order_seq_cst);
  if (group_.failed_.load(std::memory_order_seq_cst)) {
    group_.readers_.fetch_sub(1, std::memory_order_release);
    group_.throw_reason(rank);
  }
}

ThreadGroup::Reader::~Reader() {
  group_.readers_.fetch_sub(1, std::memory_order_release);  // the reads are over
}

void ThreadGroup::check(int rank) {
  if (failed_.load(std::memory_order_seq_cst)) throw_reason(rank);
}

void ThreadGroup::poison(ErrorCode code, std::string reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (code_ != ErrorCode::ok) return;  // the first reason stays
  code_ = code;
  reason_ = std::move(reason);
  fail_lanes();
}

void ThreadGroup::fail_lanes() {
  failed_.store(true, std::memory_order_seq_cst);
  for (Lane& lane : lanes_) {
    lane.word.fetch_or(kFailed, std::memory_order_acq_rel);
    wake_all(lane.word);
  }
  for (int r = 0; r < size_; ++r) ring(r);
}

void ThreadGroup::ring(int rank) {
  Bell& bell = bells_[rank];
  // Both sides change the word, in some order. If the sleeper came first, acquire shows here that
  // it sleeps; else release shows the flag to the sleeper, which looks again before it sleeps.
  bell.word.fetch_add(1, std::memory_order_acq_rel);
  if (bell.sleeping.load(std::memory_order_relaxed)) wake_all(bell.word);
}

std::shared_ptr<ThreadHeapMemory> ThreadGroup::heap_memory(int64_t number) {
  const std::lock_guard lock(heaps_mutex_);
  PendingHeap& pending = heaps_[number];
  if (pending.memory == nullptr) pending.memory = std::make_shared<ThreadHeapMemory>(size_);
  const std::shared_ptr<ThreadHeapMemory> memory = pending.memory;
  if (++pending.ranks == size_) heaps_.erase(number);
  return memory;
}

void ThreadGroup::throw_reason(int rank) {
  ErrorCode code;
  std::string reason;
  {
    const std::lock_guard lock(mutex_);
    code = code_;
    reason = reason_;
  }
  drain();
  fail(code, "{}", rank_text(rank, reason));
}

void ThreadGroup::drain() const noexcept {
  // Peers may still copy out of this rank's buffers; a copy ends by itself. New ones can't begin:
  // failed_ is set.
  while (readers_.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
}

void ThreadGroup::expire(int64_t operation, int rank, uint32_t meeting) {
  const std::lock_guard lock(mutex_);
  if (code_ != ErrorCode::ok) return;
  Lane& lane = this->lane(operation);
  uint32_t word = lane.word.load(std::memory_order_acquire);
  do {
    if (meeting_of(word) != meeting) return;  // the last rank came after all
  } while (!lane.word.compare_exchange_weak(word, word | kFailed, std::memory_order_acq_rel));
  code_ = ErrorCode::timeout;
  reason_ = describe_missing(operation, rank, word);
  fail_lanes();
}

std::string ThreadGroup::last_seen(int rank) const {
  const Progress& seen = progress_[rank];
  const int64_t call = seen.call.load(std::memory_order_relaxed);
  if (call < 0) return "never seen";
  return "last seen in " + to_string({seen.phase.load(std::memory_order_relaxed), call,
                                      seen.layer.load(std::memory_order_relaxed)});
}

std::string ThreadGroup::describe_rank(int rank) const {
  const bool closed = progress_[rank].closed.load(std::memory_order_relaxed);
  return fmt::format("rank {} ({}{})", rank, last_seen(rank), closed ? ", has left the group" : "");
}

std::string ThreadGroup::describe_chain(int rank) const {
  std::string text = describe_rank(rank);
  for (int length = 1; length < size_; ++length) {
    rank = progress_[rank].waits_for.load(std::memory_order_relaxed);
    if (rank < 0) break;
    text += ", which waits for " + describe_rank(rank);
  }
  return text;
}

std::string ThreadGroup::describe_missing(int64_t operation, int rank, uint32_t word) const {
  const Post& mine = post(operation, rank);
  const int64_t reached = mine.meetings.load(std::memory_order_relaxed);
  std::string missing;
  int num_missing = 0;
  for (int r = 0; r < size_; ++r) {
    if (post(operation, r).meetings.load(std::memory_order_relaxed) >= reached) continue;
    if (++num_missing > 4) continue;
    missing += (missing.empty() ? "" : ", ") + describe_rank(r);
  }
  if (num_missing > 4) missing += fmt::format(" and {} more", num_missing - 4);
  const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(deadline_);
  return fmt::format(
      "rank {} waited {} ms for {} in {} ({}): expected {} ranks, seen {}; every rank must make "
      "the "
      "same calls, one with zero tokens included, or raise the deadline",
      rank, milliseconds.count(), missing, to_string(mine.site), to_string(mine.kind), size_,
      word & kCountMask);
}

std::string ThreadGroup::compare_posts(int64_t operation) const {
  const Post& first = post(operation, 0);
  for (int r = 1; r < size_; ++r) {
    const Post& other = post(operation, r);
    const bool same_site = first.site.call == other.site.call &&
                           first.site.layer == other.site.layer &&
                           std::strcmp(first.site.phase, other.site.phase) == 0;
    const bool same_way = (first.exchange.lent == nullptr) == (other.exchange.lent == nullptr);
    if (first.kind == other.kind && same_site && first.bytes == other.bytes && same_way) continue;
    return fmt::format(
        "ranks disagree about the step: rank 0 is in {} ({}, {} bytes), rank {} in {} ({}, {} "
        "bytes); every rank must make the same calls in the same order",
        to_string(first.site), to_string(first.kind), first.bytes, r, to_string(other.site),
        to_string(other.kind), other.bytes);
  }
  return first.kind == OperationKind::all_to_all_v ? compare_counts(operation) : std::string();
}

std::string ThreadGroup::compare_counts(int64_t operation) const {
  for (int from = 0; from < size_; ++from) {
    const Post& sender = post(operation, from);
    for (int to = 0; to < size_; ++to) {
      const int64_t sent = sender.exchange.send_bytes[to];
      const int64_t expected = post(operation, to).exchange.recv_bytes[from];
      if (sent == expected && sent >= 0) continue;
      return fmt::format(
          "counts disagree in {}: rank {} sends {} bytes to rank {}, which expects {} bytes from "
          "it; "
          "nothing was moved",
          to_string(sender.site), from, sent, to, expected);
    }
  }
  return {};
}

}  // namespace moekit::comm
