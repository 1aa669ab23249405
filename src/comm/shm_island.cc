#include "comm/shm_island.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "base/math.h"
#include "comm/wait_word.h"

namespace moekit::comm {
namespace {

constexpr int64_t kFrames = 8;  // of one ring
constexpr int64_t kAllRings = int64_t{64} << 20;
constexpr int64_t kLargestPayload = int64_t{32} << 10;
constexpr int64_t kSmallestPayload = 512;
constexpr size_t kReasonBytes = 1800;

constexpr size_t kPositionWords = sizeof(Position) / sizeof(uint64_t);
static_assert(sizeof(Position) == kPositionWords * sizeof(uint64_t));

// States of the failure record.
constexpr uint32_t kFine = 0, kClaimed = 1, kWritten = 2;

}  // namespace

// Atomics in pages that processes share must not hide a lock of one of them.
static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);

struct ShmIsland::Control {
  std::atomic<uint32_t> state;
  int32_t code;
  char reason[kReasonBytes];
};

struct alignas(128) ShmIsland::Member {
  std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> closed;
  std::atomic<int64_t> pid;
  std::atomic<int32_t> waits_for;  ///< number of the rank + 1
  // Odd while the member writes its position, 0 before the first.
  std::atomic<uint32_t> version;
  std::atomic<uint64_t> position[kPositionWords];
};

/// One producer, one consumer. The counters only grow.
class ShmIsland::Ring {
 public:
  Ring(std::byte* memory, int64_t frame_bytes)
      : head_(reinterpret_cast<Head*>(memory)),
        frames_(memory + sizeof(Head)),
        frame_bytes_(frame_bytes) {}

  static constexpr int64_t bytes_of(int64_t frame_bytes) {
    return static_cast<int64_t>(sizeof(Head)) + kFrames * frame_bytes;
  }

  int64_t try_send(const FrameHeader& header, const void* payload, int64_t bytes) {
    const uint64_t sent = head_->sent.load(std::memory_order_relaxed);
    if (!has_room(sent)) {
      // Sequentially consistent with given_back(): either the consumer sees that somebody starves,
      // or its room is seen here.
      head_->starved.store(1, std::memory_order_seq_cst);
      if (!has_room(sent)) return -1;
    }
    const int64_t taken = std::min(bytes, frame_bytes_ - static_cast<int64_t>(sizeof(FrameHeader)));
    std::byte* frame = frames_ + static_cast<int64_t>(sent % kFrames) * frame_bytes_;
    FrameHeader written = header;
    written.bytes = static_cast<uint32_t>(taken);
    std::memcpy(frame, &written, sizeof(written));
    if (payload != nullptr)
      std::memcpy(frame + sizeof(written), payload, static_cast<size_t>(taken));
    head_->sent.store(sent + 1, std::memory_order_release);  // publishes the frame
    return taken;
  }

  const FrameHeader* front() const {
    const uint64_t taken = head_->taken.load(std::memory_order_relaxed);
    if (head_->sent.load(std::memory_order_acquire) == taken) return nullptr;
    return reinterpret_cast<const FrameHeader*>(frames_ + static_cast<int64_t>(taken % kFrames) *
                                                              frame_bytes_);
  }

  /// Returns whether the producer waits for room.
  bool give_back() {
    head_->taken.store(head_->taken.load(std::memory_order_relaxed) + 1,
                       std::memory_order_seq_cst);  // the reads are over
    return head_->starved.load(std::memory_order_seq_cst) != 0 &&
           head_->starved.exchange(0, std::memory_order_seq_cst) != 0;
  }

 private:
  struct Head {
    alignas(64) std::atomic<uint64_t> sent;
    alignas(64) std::atomic<uint64_t> taken;
    std::atomic<uint32_t> starved;
  };

  bool has_room(uint64_t sent) const {
    return sent - head_->taken.load(std::memory_order_seq_cst) < static_cast<uint64_t>(kFrames);
  }

  Head* head_;
  std::byte* frames_;
  int64_t frame_bytes_;
};

class ShmIsland::RingLink final : public Link {
 public:
  RingLink(ShmIsland& island, int peer, int64_t frame_bytes)
      : island_(island),
        peer_(peer),
        out_(island.ring_memory(island.index_, peer), frame_bytes),
        in_(island.ring_memory(peer, island.index_), frame_bytes) {}

  int64_t try_send(const FrameHeader& header, const void* payload, int64_t bytes) override {
    const int64_t taken = out_.try_send(header, payload, bytes);
    if (taken >= 0) noticed_ = false;
    return taken;
  }
  const FrameHeader* front() override { return in_.front(); }
  void pop() override {
    if (in_.give_back()) noticed_ = false;
  }
  void flush() override {
    if (noticed_) return;
    noticed_ = true;
    island_.ring(peer_);
  }

 private:
  ShmIsland& island_;
  const int peer_;
  Ring out_, in_;
  bool noticed_ = true;
};

int64_t ShmIsland::frame_bytes(int num_members) {
  const int64_t pairs = std::max<int64_t>(1, static_cast<int64_t>(num_members) * num_members);
  const int64_t payload =
      std::clamp(kAllRings / pairs / kFrames, kSmallestPayload, kLargestPayload) / 64 * 64;
  return static_cast<int64_t>(sizeof(FrameHeader)) + payload;
}

int64_t ShmIsland::ring_bytes(int num_members) {
  return round_up(Ring::bytes_of(frame_bytes(num_members)), 128);
}

int64_t ShmIsland::bytes_for(int num_members) {
  return round_up(sizeof(Control), 128) + num_members * static_cast<int64_t>(sizeof(Member)) +
         static_cast<int64_t>(num_members) * num_members * ring_bytes(num_members);
}

ShmIsland::Control& ShmIsland::control() const {
  return *reinterpret_cast<Control*>(memory_.data());
}

ShmIsland::Member& ShmIsland::member(int index) const {
  return reinterpret_cast<Member*>(memory_.data() + round_up(sizeof(Control), 128))[index];
}

std::byte* ShmIsland::ring_memory(int from, int to) const {
  const int64_t pair = static_cast<int64_t>(from) * num_members_ + to;
  return reinterpret_cast<std::byte*>(&member(num_members_)) + pair * ring_bytes(num_members_);
}

ShmIsland::ShmIsland(SharedMemory memory, int num_members, int index)
    : memory_(std::move(memory)), num_members_(num_members), index_(index) {
  for (int peer = 0; peer < num_members; ++peer) {
    links_.push_back(peer == index
                         ? nullptr
                         : std::make_unique<RingLink>(*this, peer, frame_bytes(num_members)));
  }
  memory_.hold(index);
  member(index).pid.store(getpid(), std::memory_order_release);
}

ShmIsland::~ShmIsland() { close(); }

void ShmIsland::close() noexcept { member(index_).closed.store(1, std::memory_order_release); }

uint32_t ShmIsland::doorbell() const {
  return member(index_).doorbell.load(std::memory_order_acquire);
}

void ShmIsland::sleep(uint32_t seen, std::chrono::steady_clock::time_point until) {
  Member& mine = member(index_);
  // Sequentially consistent with ring(): either the peer sees a sleeper and wakes it, or the kernel
  // sees that the doorbell has changed.
  mine.sleeping.store(1, std::memory_order_seq_cst);
  sleep_on(mine.doorbell, seen, until, WordScope::shared);
  mine.sleeping.store(0, std::memory_order_relaxed);
}

void ShmIsland::ring(int index) {
  Member& peer = member(index);
  peer.doorbell.fetch_add(1, std::memory_order_seq_cst);
  if (peer.sleeping.load(std::memory_order_seq_cst) != 0) {
    wake_all(peer.doorbell, WordScope::shared);
  }
}

void ShmIsland::note(const Position& position) noexcept {
  Member& mine = member(index_);
  uint64_t words[kPositionWords];
  std::memcpy(words, &position, sizeof(position));
  const uint32_t version = mine.version.load(std::memory_order_relaxed);
  mine.version.store(version + 1, std::memory_order_relaxed);
  // Whoever sees one of these words sees the odd version too, or a later one.
  for (size_t i = 0; i < kPositionWords; ++i) {
    mine.position[i].store(words[i], std::memory_order_release);
  }
  mine.version.store(version + 2, std::memory_order_release);
}

void ShmIsland::note_wait(int rank) noexcept {
  member(index_).waits_for.store(rank + 1, std::memory_order_relaxed);
}

int ShmIsland::waits_for(int index) const {
  return member(index).waits_for.load(std::memory_order_relaxed) - 1;
}

Position ShmIsland::position(int index) const {
  const Member& peer = member(index);
  uint64_t words[kPositionWords];
  // A member that dies while it writes leaves an odd version: its words are the best there is.
  for (int tries = 0; tries < 100; ++tries) {
    const uint32_t version = peer.version.load(std::memory_order_acquire);
    if (version == 0) return {};
    for (size_t i = 0; i < kPositionWords; ++i) {
      words[i] = peer.position[i].load(std::memory_order_acquire);
    }
    if (version % 2 == 0 && peer.version.load(std::memory_order_relaxed) == version) break;
  }
  Position position;
  std::memcpy(&position, words, sizeof(position));
  position.phase[kPhaseBytes - 1] = '\0';
  return position;
}

bool ShmIsland::failed() const { return control().state.load(std::memory_order_acquire) != kFine; }

std::pair<ErrorCode, std::string> ShmIsland::failure() const {
  const Control& shared = control();
  // A member that dies while it writes the reason must not hold the others.
  for (int i = 0; i < 100 && shared.state.load(std::memory_order_acquire) == kClaimed; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (shared.state.load(std::memory_order_acquire) != kWritten) {
    return {ErrorCode::comm, "a rank failed and ended before it said why"};
  }
  return {static_cast<ErrorCode>(shared.code),
          std::string(shared.reason, strnlen(shared.reason, kReasonBytes))};
}

void ShmIsland::fail(ErrorCode code, std::string_view reason) noexcept {
  Control& shared = control();
  uint32_t fine = kFine;
  if (!shared.state.compare_exchange_strong(fine, kClaimed, std::memory_order_acq_rel)) return;
  shared.code = static_cast<int32_t>(code);
  const size_t length = std::min(reason.size(), kReasonBytes - 1);
  std::memcpy(shared.reason, reason.data(), length);
  shared.reason[length] = '\0';
  shared.state.store(kWritten, std::memory_order_release);
  for (int peer = 0; peer < num_members_; ++peer) {
    if (peer != index_) ring(peer);
  }
}

bool ShmIsland::closed(int index) const {
  return member(index).closed.load(std::memory_order_acquire) != 0;
}

bool ShmIsland::dead(int index) const {
  // Held before the first frame, given up after `closed` is set.
  return index != index_ && !memory_.held(index) && !closed(index);
}

int64_t ShmIsland::pid(int index) const {
  return member(index).pid.load(std::memory_order_acquire);
}

}  // namespace moekit::comm
