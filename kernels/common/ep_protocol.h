// The cross-rank protocol of pushed rows: which flag of a symmetric heap says what in which call,
// and when memory of a peer may be written again. Plain state and pure transitions, for host and
// device alike: whoever moves the bytes (CPU members, kernels, a checker that tries every order of
// events) asks PushRank what comes next and does it.
//
// A call: every rank puts rows and a header into every peer's part and signals; takes what came;
// puts results back and signals those who had sent it rows; adds up what came back. There is no
// other meeting. A put is seen by whoever has seen a later signal of the same rank; nothing else
// orders puts. Calls are numbered from 1; a flag's value is the number of the call that set it.
//
// Why nothing is lost or overwritten:
//  1. Headers and row flags have two generations, call % 2. Rank s writes those of call n + 2 only
//     after it has seen the row flag of call n + 1 of every peer. A peer sends that after its call
//     n is over, so it has read the header of call n.
//  2. Row slots of s at d have one generation. s writes them only after d's return flag has reached
//     the last call in which s had sent rows to d: d signals it when it has read them ("credit").
//     A call collects its returns before it ends, so the wait costs nothing but after a faulty
//     call.
//  3. Return slots of s have one generation. d writes them in call n only after the row flag of
//     call n of s, which s sends after it has added up the returns of its calls before.
//  4. What a rank lends to its peers in call n, results that they read in its part instead of in
//     return slots, it may overwrite once it has seen the row flag of call n + 1 of every peer:
//     each sends that after it has added up.
//  5. A rank waits for a peer's return flag only where it has sent that peer rows in this call, and
//     a peer signals wherever it got rows, in faulty calls too.
#pragma once

#include <cstdint>

#include "tensor/host_device.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

namespace moekit::ep {

#if defined(__CUDACC__)
template <typename T>
using AtomicRef = cuda::atomic_ref<T, cuda::thread_scope_system>;
inline constexpr auto kAcquire = cuda::std::memory_order_acquire;
inline constexpr auto kRelease = cuda::std::memory_order_release;
#else
template <typename T>
using AtomicRef = std::atomic_ref<T>;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kRelease = std::memory_order_release;
#endif

/// What the signalling rank wrote before is visible after a load that sees its value.
MOEKIT_HOST_DEVICE inline uint64_t load_acquire(uint64_t& word) {
  return AtomicRef<uint64_t>(word).load(kAcquire);
}
MOEKIT_HOST_DEVICE inline void store_release(uint64_t& word, uint64_t value) {
  AtomicRef<uint64_t>(word).store(value, kRelease);
}

/// Generations of headers and row flags (rule 1).
inline constexpr uint64_t kGenerations = 2;

/// Where flags lie in a rank's part. Each is set by one peer.
struct PushFlags {
  int32_t num_ranks = 1;

  /// Rows and header of `call` from `source` are there.
  MOEKIT_HOST_DEVICE int64_t rows(int32_t source, uint64_t call) const {
    return static_cast<int64_t>(call % kGenerations) * num_ranks + source;
  }
  /// Results of `server` are there, and it has read the rows that it got.
  MOEKIT_HOST_DEVICE int64_t returns(int32_t server) const {
    return static_cast<int64_t>(kGenerations) * num_ranks + server;
  }
  MOEKIT_HOST_DEVICE int64_t total() const {
    return (static_cast<int64_t>(kGenerations) + 1) * num_ranks;
  }
};

/// Which header of `source` a call writes: headers are [kGenerations, num_ranks].
MOEKIT_HOST_DEVICE inline int64_t header_slot(int32_t num_ranks, int32_t source, uint64_t call) {
  return static_cast<int64_t>(call % kGenerations) * num_ranks + source;
}

/// Where a rank stands in a call.
enum class PushPhase : uint32_t {
  idle,             ///< between calls
  credit,           ///< waits until row slots at peers are free
  write_rows,       ///< puts rows and headers
  publish_rows,     ///< signals every peer
  arrive,           ///< waits for every peer's rows
  serve,            ///< reads headers and rows, puts results
  publish_returns,  ///< signals the peers that had sent rows
  collect,          ///< waits for results
  add_up,           ///< reads the results
};

/// What a rank remembers of a peer. Zero before the first call.
struct PushPeer {
  uint64_t last_rows = 0;  ///< the last call in which this rank put rows into the peer's slots
  int64_t rows_out = 0;    ///< rows of this call for the peer; set before begin()
  int64_t rows_in = 0;     ///< rows of this call from the peer; set in PushPhase::serve
};

/// Zero before the first call, then the state of one rank, which alone reads and writes it.
struct PushState {
  uint64_t call = 0;
  PushPhase phase = PushPhase::idle;
  int32_t peer = 0;        ///< the phase's next one
  uint32_t void_call = 0;  ///< the call was given up in PushPhase::serve: nobody reads its results
};

/// What a rank does next: wait until its own flag reaches the value, signal a peer's flag, or what
/// the phase says. `peer` is who signals, or who is signalled.
struct PushStep {
  enum class Kind : uint32_t { wait, signal, act };
  Kind kind = Kind::act;
  int32_t peer = -1;
  int64_t flag = 0;
  uint64_t value = 0;
};

/// The transitions. A view: state and peers [num_ranks] live where calls find them again.
class PushRank {
 public:
  MOEKIT_HOST_DEVICE PushRank(int32_t rank, int32_t num_ranks, PushState* state, PushPeer* peers)
      : rank_(rank), flags_{num_ranks}, state_(state), peers_(peers) {}

  MOEKIT_HOST_DEVICE int32_t rank() const { return rank_; }
  MOEKIT_HOST_DEVICE PushPhase phase() const { return state_->phase; }
  MOEKIT_HOST_DEVICE uint64_t call() const { return state_->call; }
  MOEKIT_HOST_DEVICE const PushFlags& flags() const { return flags_; }
  MOEKIT_HOST_DEVICE PushPeer& peer(int32_t rank) const { return peers_[rank]; }

  /// Starts a call: PushPhase::idle, rows_out set for every peer.
  MOEKIT_HOST_DEVICE void begin() {
    ++state_->call;
    state_->void_call = 0;
    enter(PushPhase::credit);
  }

  /// What comes next: a wait, a signal, or what the phase says.
  MOEKIT_HOST_DEVICE PushStep next() const { return step_for(state_->peer); }

  /// The wait of this phase for peer `p`, or nothing: lets a caller look at all flags at once.
  MOEKIT_HOST_DEVICE PushStep wait_for(int32_t p) const {
    const PushStep step = step_for(p);
    if (step.kind == PushStep::Kind::wait && p >= state_->peer && concerns(p)) return step;
    return {};
  }

  /// next() is done. In PushPhase::serve, rows_in is set for every peer.
  MOEKIT_HOST_DEVICE void advance() {
    switch (state_->phase) {
      case PushPhase::idle: return;
      case PushPhase::write_rows:
        for (int32_t p = 0; p < flags_.num_ranks; ++p) {
          if (peers_[p].rows_out > 0) peers_[p].last_rows = state_->call;
        }
        return enter(PushPhase::publish_rows);
      case PushPhase::serve: return enter(PushPhase::publish_returns);
      case PushPhase::add_up: return enter(PushPhase::idle);
      default: ++state_->peer; return skip();
    }
  }

  /// In PushPhase::serve, rows_in set: ends the call here on all ranks alike. Peers get their slots
  /// back (publish_returns follows), nobody reads results.
  MOEKIT_HOST_DEVICE void give_up() {
    state_->void_call = 1;
    advance();
  }

 private:
  MOEKIT_HOST_DEVICE PushStep step_for(int32_t p) const {
    using Kind = PushStep::Kind;
    switch (state_->phase) {
      case PushPhase::credit: return {Kind::wait, p, flags_.returns(p), peers_[p].last_rows};
      case PushPhase::publish_rows: return {Kind::signal, p, rows_flag(rank_), state_->call};
      case PushPhase::arrive: return {Kind::wait, p, rows_flag(p), state_->call};
      case PushPhase::publish_returns:
        return {Kind::signal, p, flags_.returns(rank_), state_->call};
      case PushPhase::collect: return {Kind::wait, p, flags_.returns(p), state_->call};
      default: return {};
    }
  }

  MOEKIT_HOST_DEVICE int64_t rows_flag(int32_t source) const {
    return flags_.rows(source, state_->call);
  }

  MOEKIT_HOST_DEVICE void enter(PushPhase phase) {
    state_->phase = phase;
    state_->peer = 0;
    skip();
  }

  MOEKIT_HOST_DEVICE bool concerns(int32_t p) const {
    switch (state_->phase) {
      case PushPhase::credit: return peers_[p].rows_out > 0 && peers_[p].last_rows > 0;
      case PushPhase::publish_returns: return peers_[p].rows_in > 0;
      case PushPhase::collect: return peers_[p].rows_out > 0 && state_->void_call == 0;
      default: return true;
    }
  }

  /// Passes over peers that the phase does not concern, and over phases that are over.
  MOEKIT_HOST_DEVICE void skip() {
    while (has_peers()) {
      while (state_->peer < flags_.num_ranks && !concerns(state_->peer)) ++state_->peer;
      if (state_->peer < flags_.num_ranks) return;
      state_->peer = 0;
      state_->phase = after();
    }
  }

  MOEKIT_HOST_DEVICE bool has_peers() const {
    switch (state_->phase) {
      case PushPhase::credit:
      case PushPhase::publish_rows:
      case PushPhase::arrive:
      case PushPhase::publish_returns:
      case PushPhase::collect: return true;
      default: return false;
    }
  }

  MOEKIT_HOST_DEVICE PushPhase after() const {
    switch (state_->phase) {
      case PushPhase::credit: return PushPhase::write_rows;
      case PushPhase::publish_rows: return PushPhase::arrive;
      case PushPhase::arrive: return PushPhase::serve;
      case PushPhase::publish_returns: return PushPhase::collect;
      default: return state_->void_call != 0 ? PushPhase::idle : PushPhase::add_up;
    }
  }

  int32_t rank_;
  PushFlags flags_;
  PushState* state_;
  PushPeer* peers_;
};

}  // namespace moekit::ep
