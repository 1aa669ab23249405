// Frames and links: how two ranks that are processes talk. A link is an ordered stream of frames of
// bounded size each way, over shared memory or over messages; nothing of it blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace moekit::comm {

enum class FrameKind : uint32_t {
  post,     ///< a rank has begun an operation: what it sends to the receiver and expects from it
  agree,    ///< all posts that the rank has seen agree with its own
  data,     ///< the next payload bytes of an operation
  put,      ///< payload for the receiver's part of a symmetric heap
  signal,   ///< a flag of a symmetric heap
  goodbye,  ///< the rank gives its end back in peace; the last frame of a link
  failure,  ///< the group has failed; the payload is the reason
  waits,    ///< the rank has waited for another one for half of the deadline
};

constexpr size_t kPhaseBytes = 64;

/// Where a rank is in its calls, as peers may read it. Plain bytes.
struct Position {
  int64_t call = -1;  ///< -1: never seen
  int64_t layer = -1;
  char phase[kPhaseBytes] = {};
};

/// Phases travel cut to kPhaseBytes.
inline void copy_phase(char (&to)[kPhaseBytes], const char* from) {
  const size_t length = strnlen(from, kPhaseBytes - 1);
  std::memcpy(to, from, length);
  to[length] = '\0';
}

/// Precedes the payload of a frame. Plain bytes: it crosses processes.
struct FrameHeader {
  FrameKind kind = FrameKind::post;
  uint32_t bytes = 0;           ///< of the payload
  uint32_t sequence = 0;        ///< number of the frame on its link; message links only
  uint32_t operation_kind = 0;  ///< post: OperationKind; failure: ErrorCode
  int64_t operation = -1;       ///< number of the operation; put and signal: number of the heap
  int64_t call = 0;             ///< this, layer and phase: where the sender is
  int64_t layer = -1;
  int64_t sends = 0;    ///< post: bytes for the receiver; put: offset; signal: flag; waits: rank
  int64_t expects = 0;  ///< post: bytes from the receiver
  uint64_t value = 0;   ///< signal
  char phase[kPhaseBytes] = {};
};
static_assert(sizeof(FrameHeader) == 128);

class Link {
 public:
  virtual ~Link() = default;
  /// Sends one frame with as many of `bytes` as fit into it. Returns how many, or -1 when there is
  /// no room for a frame now.
  virtual int64_t try_send(const FrameHeader& header, const void* payload, int64_t bytes) = 0;
  /// The oldest frame that has come, with its payload behind it, or null.
  virtual const FrameHeader* front() = 0;
  /// Gives the place of front() back to the peer.
  virtual void pop() = 0;
  /// Makes sure that the peer notices what was sent and given back.
  virtual void flush() {}
};

}  // namespace moekit::comm
