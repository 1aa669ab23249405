// ProcessEngine: the protocol of ranks that are processes, above links. Each operation has a post
// from every rank to every rank; an all-to-all then has an agreement (all ranks have found that all
// counts agree), so that no payload moves where two ranks disagree. Payload goes through the links
// in frames. A frame is taken whenever it comes: nothing waits behind another operation's.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "comm/message_links.h"
#include "comm/operation_kind.h"
#include "comm/shm_island.h"

namespace moekit::comm {

/// What the ranks of a group have agreed to use; see process_group.h.
struct ProcessGroup {
  std::string name;
  int rank = 0;
  int size = 1;
  std::vector<int> nodes;  ///< by rank
  std::chrono::nanoseconds deadline{};
  std::unique_ptr<ShmIsland> island;            ///< null: this rank shares memory with nobody
  std::vector<int> members;                     ///< by rank: number on this rank's island, or -1
  std::unique_ptr<MessageLinks> messages;       ///< null: all ranks are on the island
  std::vector<int> message_links;               ///< by rank: its link of `messages`, or -1
  std::vector<int> transport_ranks;             ///< by rank: number in the transport's group
  std::shared_ptr<MessageTransport> transport;  ///< null: shared memory only
};

/// Takes what peers put into one symmetric heap over messages.
class HeapTarget {
 public:
  virtual ~HeapTarget() = default;
  virtual void take_put(int64_t offset, const void* payload, int64_t bytes) = 0;
  virtual void take_signal(int64_t flag, uint64_t value) = 0;
};

class ProcessEngine {
 public:
  explicit ProcessEngine(ProcessGroup group);
  /// Leaves the group: in peace when nothing is in flight and nothing has failed. No operation
  /// begins afterwards.
  void leave() noexcept;
  ProcessEngine(const ProcessEngine&) = delete;
  ProcessEngine& operator=(const ProcessEngine&) = delete;

  const ProcessGroup& group() const { return group_; }
  int rank() const { return group_.rank; }
  int size() const { return group_.size; }

  /// Starts an operation; throws invalid_argument when kMaxInFlight are unfinished.
  int64_t begin(OperationKind kind, const Exchange& exchange, int64_t bytes, CallSite site);
  bool in_flight(int64_t operation) const;
  /// Moves what can be moved. True when finish() would not wait, or would throw.
  bool complete(int64_t operation) noexcept;
  void finish(int64_t operation);

  void fail_group(ErrorCode code, std::string reason) noexcept;
  /// Fails the group: this rank goes no further, where it is now.
  void give_up(std::string_view why) noexcept;
  /// Fails the group with an error that all ranks get alike.
  void refuse(const Error& error) noexcept;
  /// Throws the reason when the group has failed.
  void check() const;
  bool failed() const { return failed_ || (group_.island && group_.island->failed()); }
  /// Moves what can be moved, without waiting. Returns whether anything did. What goes wrong fails
  /// the group.
  bool pump() noexcept;
  /// Waits until `done`; at the deadline the group fails with the words of `describe`. The deadline
  /// counts anew whenever `*progress` has grown.
  void wait_until(FunctionRef<bool()> done, const int64_t* progress,
                  FunctionRef<std::string()> describe);

  int64_t add_heap(HeapTarget* heap);
  void remove_heap(int64_t number);
  /// Sends a frame, or several where the payload needs them (`sends` is then the offset of each),
  /// to a rank of another island. Waits for room.
  void send(int to, FrameHeader header, const void* payload, int64_t bytes);
  /// Waits until large frames have been taken.
  void settle();
  void ring(int to);
  /// This rank comes to `site`; begin() says so itself.
  void note(const CallSite& site) noexcept;
  /// It waits for `peer` alone; -1: no longer. Ranks of other islands hear of it when the wait has
  /// become a long one.
  void note_wait(int peer) noexcept;
  /// "rank 3 (last seen in phase dispatch, call 7)".
  std::string describe_rank(int rank) const;
  /// The same, with the ranks that it waits for, one for the next, as far as this rank knows.
  std::string describe_chain(int rank) const;
  /// "phase dispatch, call 7": where this rank is.
  std::string describe_here() const;
  int64_t deadline_ms() const;

 private:
  /// One operation of this rank.
  struct Operation {
    int64_t number = -1;
    OperationKind kind = OperationKind::barrier;
    CallSite site;
    Exchange exchange;
    int64_t bytes = 0;                        // allgather
    int posts = 0, agreements = 0;            // of peers, that have come
    int posts_sent = 0, agreements_sent = 0;  // to peers
    int64_t to_send = 0, to_receive = 0;      // payload that is left
    int64_t moved = 0;
  };
  /// What this rank has sent to one peer of an operation.
  struct Outgoing {
    bool post = false, agreement = false;
    int64_t bytes = 0;
  };
  /// What one peer has sent of an operation.
  struct Incoming {
    int64_t number = -1;
    OperationKind kind = OperationKind::barrier;
    bool agreement = false;
    int64_t call = 0, layer = -1, sends = 0, expects = 0;
    int64_t bytes = 0;
    char phase[kPhaseBytes] = {};
  };

  Operation& operation(int64_t number) { return operations_[number % Communicator::kMaxInFlight]; }
  const Operation& operation(int64_t number) const {
    return operations_[number % Communicator::kMaxInFlight];
  }
  Outgoing& outgoing(int64_t number, int peer);
  Incoming& incoming(int64_t number, int peer);
  const Incoming& incoming(int64_t number, int peer) const;
  int64_t bytes_to(const Operation& o, int peer) const;
  int64_t bytes_from(const Operation& o, int peer) const;
  int peers() const { return group_.size - 1; }
  bool is_complete(const Operation& o) const;

  void take(int peer, const FrameHeader& frame);
  void take_position(int peer, const FrameHeader& frame);
  /// Writes where this rank is.
  void take_here(FrameHeader& header) const;
  void tell_wait();
  Position last_seen(int rank) const;
  /// "last seen in phase dispatch, call 7".
  static std::string describe(const Position& position);
  void take_post(int peer, const FrameHeader& frame);
  void take_data(int peer, const FrameHeader& frame);
  void compare(Operation& o, int peer);
  void disagree(std::string reason);
  bool advance(Operation& o);
  bool advance_peer(Operation& o, int peer);
  bool send_payload(Operation& o, int peer);
  bool link_moves(int peer);
  void learn_of_failure();
  void look_for_the_dead();
  void idle(uint32_t seen, int round, std::chrono::steady_clock::time_point until);
  std::string describe_wait(const Operation& o) const;
  std::string list_ranks(FunctionRef<bool(int)> missing) const;

  ProcessGroup group_;
  const int spins_;
  std::vector<Link*> links_;  // by rank; null: this one
  Operation operations_[Communicator::kMaxInFlight];
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  Position here_;
  int waits_for_ = -1;
  std::vector<Position> seen_;  // of ranks that are not on the island, as their frames tell
  std::vector<int> waits_;      // of the same: whom they have waited for since, or -1
  std::string gave_up_;         // made early: for want of memory a rank gives up in these words
  std::vector<HeapTarget*> heaps_;
  int64_t next_operation_ = 0;
  int64_t oldest_operation_ = 0;  // nothing before it is in flight
  std::chrono::steady_clock::time_point next_look_{};

  bool failed_ = false;
  ErrorCode code_ = ErrorCode::ok;
  std::string reason_;
};

}  // namespace moekit::comm
