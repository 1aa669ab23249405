// ThreadGroup: the shared state of ranks that are threads of one process. Operations run on lanes,
// one after the other; each has two meetings: "posted" (all ranks have stated what they send and
// expect) and "closed" (all ranks have read what they expected; a barrier has none). Receivers
// pull.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/operation_kind.h"
#include "moekit/error.h"

namespace moekit::comm {

/// What one rank states when it arrives. Written by its rank before the "posted" meeting, read by
/// the others between the two meetings.
struct Post {
  OperationKind kind = OperationKind::barrier;
  CallSite site;
  Exchange exchange;
  int64_t bytes = 0;  ///< allgather
  /// Meetings of this lane that the rank has reached; read at any time, for messages only.
  std::atomic<int64_t> meetings{0};
};

struct ThreadHeapMemory;  // thread_heap.h

class ThreadGroup {
 public:
  /// `nodes` by rank.
  ThreadGroup(std::chrono::nanoseconds deadline, std::vector<int> nodes);

  int size() const { return size_; }
  int node_of(int rank) const { return nodes_[static_cast<size_t>(rank)]; }
  std::chrono::nanoseconds deadline() const { return deadline_; }

  /// The rank's post on the lane of `operation`; the rank may write it until arrive().
  Post& post(int64_t operation, int rank) { return lane(operation).posts[rank]; }
  const Post& post(int64_t operation, int rank) const { return lane(operation).posts[rank]; }

  /// Reaches the next meeting of the lane without waiting. The last rank to arrive at "posted"
  /// compares all posts and fails the group where they disagree. Returns the meeting's number.
  uint32_t arrive(int64_t operation, int rank, bool posted);
  bool met(int64_t operation, uint32_t meeting) const;
  /// Waits for the other ranks, throws at the deadline or when the group fails.
  void wait(int64_t operation, int rank, uint32_t meeting);

  /// While a Reader lives, no failing rank leaves its call, so its buffers stay there. Throws when
  /// the group has failed.
  class Reader {
   public:
    Reader(ThreadGroup& group, int rank);
    ~Reader();
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

   private:
    ThreadGroup& group_;
  };

  int spins() const { return spins_; }
  bool failed() const { return failed_.load(std::memory_order_seq_cst); }

  /// What a rank that waits for flags of a heap sleeps on.
  struct alignas(128) Bell {
    std::atomic<uint32_t> word{0};
    std::atomic<bool> sleeping{false};
  };
  Bell& bell(int rank) { return bells_[rank]; }
  /// Wakes `rank` where it sleeps. Set the flag that it waits for first.
  void ring(int rank);

  /// The memory of the group's heap number `number`, the same for all ranks.
  std::shared_ptr<ThreadHeapMemory> heap_memory(int64_t number);

  void poison(ErrorCode code, std::string reason) noexcept;
  /// Waits until no peer reads any rank's buffers; only after poison(), when no read can begin.
  void drain() const noexcept;
  /// Throws the reason when the group has failed.
  void check(int rank);

  /// The subgroup that `color` becomes in split number `split`, the same for each of its ranks; the
  /// first of them makes it. Asked once by each.
  std::shared_ptr<ThreadGroup> child(int64_t split, int color, const std::vector<int>& nodes);

  /// Where a rank was last seen, for messages.
  struct Progress {
    std::atomic<const char*> phase{""};
    std::atomic<int64_t> layer{-1};
    std::atomic<int64_t> call{-1};
    std::atomic<bool> closed{false};  ///< the rank gave its end back
    std::atomic<int> waits_for{-1};   ///< the rank whose heap flag it sleeps for
  };
  Progress& progress(int rank) { return progress_[rank]; }
  /// Where `rank` now works or waits.
  void note(int rank, const CallSite& site) {
    Progress& progress = progress_[rank];
    progress.phase.store(site.phase, std::memory_order_relaxed);
    progress.layer.store(site.layer, std::memory_order_relaxed);
    progress.call.store(site.call, std::memory_order_relaxed);
  }
  /// "last seen in phase x, call 7".
  std::string last_seen(int rank) const;
  /// "rank 3 (last seen in phase x, call 7)".
  std::string describe_rank(int rank) const;
  /// The same, and for whom that rank waits, and so on to the rank that waits for nobody.
  std::string describe_chain(int rank) const;

 private:
  // The lane's word: bit 31 "failed", bits 12-30 number of the meeting, bits 0-11 ranks that have
  // arrived at it. One word, so that "the last rank has come" and "the deadline has passed" exclude
  // each other.
  struct alignas(128) Lane {
    std::atomic<uint32_t> word{0};
    std::unique_ptr<Post[]> posts;
  };
  static constexpr uint32_t kFailed = 1u << 31;
  static constexpr uint32_t kMeeting = 1u << 12;
  static constexpr uint32_t kCountMask = kMeeting - 1;
  static uint32_t meeting_of(uint32_t word) { return (word & ~kFailed) / kMeeting; }

  Lane& lane(int64_t operation) { return lanes_[operation % Communicator::kMaxInFlight]; }
  const Lane& lane(int64_t operation) const {
    return lanes_[operation % Communicator::kMaxInFlight];
  }
  /// The disagreement between posts, or an empty string.
  std::string compare_posts(int64_t operation) const;
  std::string compare_counts(int64_t operation) const;
  void expire(int64_t operation, int rank, uint32_t meeting);
  std::string describe_missing(int64_t operation, int rank, uint32_t word) const;
  void fail_lanes();
  [[noreturn]] void throw_reason(int rank);

  const int size_;
  const std::vector<int> nodes_;
  const int spins_;
  const std::chrono::nanoseconds deadline_;
  Lane lanes_[Communicator::kMaxInFlight];
  std::unique_ptr<Progress[]> progress_;
  std::unique_ptr<Bell[]> bells_;

  std::mutex mutex_;                 // guards code_ and reason_, held until every lane has failed
  std::atomic<bool> failed_{false};  // pairs with readers_: see Reader
  std::atomic<int> readers_{0};
  ErrorCode code_ = ErrorCode::ok;
  std::string reason_;

  struct Child {
    std::shared_ptr<ThreadGroup> group;
    size_t taken = 0;
  };
  std::mutex children_mutex_;
  std::map<std::pair<int64_t, int>, Child> children_;  // by split and color

  struct PendingHeap {
    std::shared_ptr<ThreadHeapMemory> memory;
    int ranks = 0;  // that have asked for it
  };
  std::mutex heaps_mutex_;
  std::map<int64_t, PendingHeap> heaps_;  // that some ranks have not asked for yet
};

}  // namespace moekit::comm
