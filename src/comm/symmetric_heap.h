// SymmetricHeap: memory of one size on every rank of a group, which peers write into, with flags
// beside it. What a put carries is seen by whoever has seen a later signal of the same rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/communicator.h"

namespace moekit::comm {

/// One rank's end, from Communicator::make_heap. The calls below never allocate. Offsets are in
/// bytes from the start of a rank's part, which is aligned to 128 bytes and begins zeroed. Flags
/// begin at 0 and only grow; one rank alone signals each flag of a part.
/// put() and peer() writes may come from several threads of a rank at once where peer() is not
/// null; signal() and wait() from one, after the writes that they publish.
class SymmetricHeap {
 public:
  virtual ~SymmetricHeap() = default;
  virtual std::byte* base() const = 0;  ///< this rank's part
  virtual int64_t bytes() const = 0;    ///< of each part
  virtual int64_t num_flags() const = 0;
  /// The peer's part where its memory can be addressed (threads, shared windows), else null.
  virtual std::byte* peer(int rank) const = 0;

  /// Writes into the part of `rank` (itself too). `source` may be reused when put() returns.
  virtual void put(int rank, int64_t offset, const void* source, int64_t bytes) = 0;
  /// Sets flag `flag` of `rank` to `value`, after all earlier puts to that rank (release).
  virtual void signal(int rank, int64_t flag, uint64_t value) = 0;
  /// The value of this rank's own flag (acquire). Never blocks.
  virtual uint64_t flag(int64_t flag) const = 0;
  /// Waits until this rank's own flag is at least `value`. `peer` is who should signal it, for the
  /// message. Throws a timeout at the group's deadline, or the group's first reason when it failed.
  virtual void wait(int64_t flag, uint64_t value, int peer, CallSite site) = 0;
  /// Whether the group has failed, so that wait() would throw at once. Never blocks.
  virtual bool failed() const = 0;
};

}  // namespace moekit::comm
