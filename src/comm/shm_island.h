// ShmIsland: ranks of one host that meet in shared memory: a ring of frames for each ordered pair,
// a doorbell for each rank, and one record of why the group failed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/frame.h"
#include "comm/shared_memory.h"
#include "moekit/error.h"

namespace moekit::comm {

class ShmIsland {
 public:
  /// Of the memory that `num_members` ranks need. Rings shrink as their number grows, to about 64
  /// MiB altogether and to no less than 512 payload bytes a frame.
  static int64_t bytes_for(int num_members);

  /// Memory of bytes_for(num_members) bytes, zeroed before the first rank came.
  ShmIsland(SharedMemory memory, int num_members, int index);
  ~ShmIsland();
  ShmIsland(const ShmIsland&) = delete;
  ShmIsland& operator=(const ShmIsland&) = delete;

  int num_members() const { return num_members_; }
  int index() const { return index_; }
  /// To the other members; null for this one.
  Link* link(int member) const { return links_[static_cast<size_t>(member)].get(); }

  /// Changes whenever a peer has sent something, given room back, or failed.
  uint32_t doorbell() const;
  /// Sleeps until the doorbell is no longer `seen`, or `until`.
  void sleep(uint32_t seen, std::chrono::steady_clock::time_point until);
  /// Rings a member that waits for what was written into memory of its own (heaps).
  void ring(int member);

  /// Tells the others where this member is, and for which rank of the group, on this island or not,
  /// it waits (-1: for none).
  void note(const Position& position) noexcept;
  void note_wait(int rank) noexcept;
  Position position(int member) const;
  int waits_for(int member) const;

  /// Whether the island has failed; code and reason are those of the member that said so first.
  bool failed() const;
  std::pair<ErrorCode, std::string> failure() const;
  void fail(ErrorCode code, std::string_view reason) noexcept;

  /// Gives this member's end back in peace.
  void close() noexcept;
  /// The member gave its end back in peace.
  bool closed(int member) const;
  /// The member's process has ended, or its end has gone, without a word.
  bool dead(int member) const;
  int64_t pid(int member) const;

 private:
  struct Control;
  struct Member;
  class Ring;
  class RingLink;

  Control& control() const;
  Member& member(int index) const;
  std::byte* ring_memory(int from, int to) const;
  static int64_t frame_bytes(int num_members);
  static int64_t ring_bytes(int num_members);

  SharedMemory memory_;
  const int num_members_;
  const int index_;
  std::vector<std::unique_ptr<Link>> links_;
};

}  // namespace moekit::comm
