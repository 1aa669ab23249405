// Links over messages: for ranks that share no memory. All operations are persistent ones of fixed
// size, made once and started many times; a few places a peer bound what is on its way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/frame.h"
#include "moekit/error.h"

namespace moekit::comm {

/// Messages of fixed size between the ranks of one group. Peers are numbered as the transport
/// numbers them. Operations of one (peer, tag) meet in the order in which they were started.
class Messages {
 public:
  virtual ~Messages() = default;
  /// Takes back what was started and has not ended. False when a send may go on reading its buffer,
  /// or a message that has come in part writing to its own, for ever after. The last call.
  virtual bool end() noexcept = 0;
  /// A new operation, not started; its number counts from 0. A `synchronous` send ends when the
  /// receiver has taken it, another one when its buffer may be reused.
  virtual int add_send(int peer, int tag, void* buffer, int64_t bytes, bool synchronous) = 0;
  virtual int add_receive(int peer, int tag, void* buffer, int64_t bytes) = 0;
  virtual void start(int operation) = 0;
  /// The operations that have ended since the last call; valid until the next.
  virtual std::span<const int> poll() = 0;
};

/// Makes Messages. One a process and group of the caller; subgroups share it.
class MessageTransport {
 public:
  virtual ~MessageTransport() = default;
  virtual std::string_view name() const = 0;  ///< "mpi"
  virtual std::unique_ptr<Messages> connect() = 0;
  /// Tags from here on are free on this rank.
  virtual int next_tag() const = 0;
  virtual void take_tags(int first, int count) = 0;
};

class MessageLinks {
 public:
  static constexpr int kTags = 3;

  /// `peers` in the transport's numbers. Tags first_tag to first_tag + kTags - 1 are free on all.
  MessageLinks(std::unique_ptr<Messages> messages, std::span<const int> peers, int first_tag);
  ~MessageLinks();

  Link* link(size_t index) const;
  /// Looks what has come and gone. Returns whether anything did.
  bool poll();
  /// Tells every peer, past all that is under way, and gives the news a moment to leave.
  void send_failure(ErrorCode code, std::string_view reason) noexcept;
  /// What a peer has told so.
  std::optional<std::pair<ErrorCode, std::string>> failure() const;
  /// Tells every peer that this rank leaves in peace.
  void send_goodbye();
  bool has_left(size_t index) const;
  /// Whether the receivers have taken all that was sent.
  bool settled() const;
  /// Whether a receiver has taken all large frames.
  bool has_taken_payload(size_t index) const;

 private:
  class PeerLink;
  struct Owner {
    PeerLink* link;
    int stream;
    int place;
    bool outgoing;
  };

  void own(int operation, Owner owner);

  std::vector<std::unique_ptr<PeerLink>> links_;
  std::vector<Owner> owners_;           // by operation
  std::unique_ptr<Messages> messages_;  // goes first: it receives into the buffers of links_
};

}  // namespace moekit::comm
