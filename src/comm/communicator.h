// Communicator: what expert-parallel ranks use to meet. Every wait has a deadline; on expiry every
// rank gets a timeout error that names rank, peer, phase, call number, expected and seen.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "moekit/error.h"

namespace moekit::comm {

/// Where a wait stands, for error messages. Ranks that meet with different sites get an error that
/// names both.
struct CallSite {
  const char* phase = "";  ///< static storage: peers may read it after the call
  int64_t call = 0;
  int64_t layer = -1;  ///< the layer's number in the group (number_layer), -1: none
};

/// "phase combine rows, layer 2, call 5", for messages.
std::string to_string(const CallSite& site);

/// An exchange in flight. Plain bytes, so that it can live in a workspace.
struct Ticket {
  int64_t operation = -1;
};

/// One send and receive list of an all-to-all. Spans have size() entries; they, `send` and `recv`
/// stay alive and untouched until finish() returns.
struct Exchange {
  const void* send = nullptr;
  std::span<const int64_t> send_offset;  ///< bytes from `send`; ranges may overlap
  std::span<const int64_t> send_bytes;
  void* recv = nullptr;
  std::span<const int64_t> recv_offset;
  std::span<const int64_t> recv_bytes;
  /// Where the group lends(), on all ranks or on none: what peers read in finish_reading() instead
  /// of getting copies. `send` and `recv` are not used then; sizes are still stated and compared.
  const void* lent = nullptr;
};

class SymmetricHeap;  // symmetric_heap.h

/// One rank's end. Methods are collective unless said otherwise, called by one thread a rank, in
/// the same order on all. A group that failed once (deadline, disagreement, abort) stays failed:
/// every later call throws the first reason at once.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::string_view name() const = 0;  ///< "threads", "mpi", ...
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int node_of(int rank) const = 0;

  virtual void barrier(CallSite site) = 0;
  /// recv[r*bytes .. ) = rank r's `send` of `bytes` bytes.
  virtual void allgather(const void* send, void* recv, int64_t bytes, CallSite site) = 0;

  /// Starts an all-to-all and returns without waiting for a peer. Counts that disagree between two
  /// ranks are an error on all ranks, named with both figures, before any payload moves. At most
  /// kMaxInFlight exchanges may be unfinished.
  virtual Ticket begin_all_to_all_v(const Exchange& exchange, CallSite site) = 0;
  /// Whether finish() would find every peer's rows there. Never blocks, never throws: a failed
  /// group is ready, and finish() throws. Not collective.
  virtual bool ready(Ticket ticket) const = 0;
  /// Completes the exchange: `recv` is filled and no peer reads `send` any more.
  virtual void finish(Ticket ticket) = 0;

  /// Whether ranks can read each other's memory, so that rows need not be copied first.
  virtual bool lends() const { return false; }
  /// Completes an exchange of lent rows. read(lent) is called once, when all ranks have begun it;
  /// lent[r] is rank r's Exchange::lent. What is reached from there stays as it was when its rank
  /// began, until read() returns on all ranks. read() must not throw nor use the communicator.
  virtual void finish_reading(Ticket ticket,
                              FunctionRef<void(std::span<const void* const> lent)> read);

  void all_to_all_v(const Exchange& exchange, CallSite site) {
    finish(begin_all_to_all_v(exchange, site));
  }

  /// A heap of `bytes` bytes and `num_flags` flags on every rank; all ranks ask for the same. It
  /// may outlive this end. For plan time: it allocates.
  virtual std::unique_ptr<SymmetricHeap> make_heap(int64_t bytes, int64_t num_flags,
                                                   CallSite site) = 0;

  /// A communicator of the ranks that give the same `color` (those below zero get none), in the
  /// order of (key, rank). The deadline, nodes and transport are this group's. For plan time.
  virtual std::unique_ptr<Communicator> split(int color, int key, CallSite site) = 0;

  /// Fails the group with `reason`, so that peers stop waiting for this rank. Not collective.
  virtual void abort(std::string_view reason) noexcept = 0;
  /// This rank throws `error` because of what all ranks see in an exchange, so that all throw the
  /// same. Should it then abort() in these words, peers that are still inside that exchange get the
  /// error itself, its code included, and not that this rank gave up. Not collective.
  virtual void note_refusal(const Error& error) noexcept;

  virtual std::chrono::nanoseconds deadline() const = 0;

  /// The number of a layer that is made over this end, once a layer: 0, 1, ... All ranks make their
  /// layers in the same order, so that equal numbers mean the same layer.
  int64_t number_layer() { return num_layers_++; }

  /// The most microbatches of a call times the exchanges of `hierarchical`, and some to spare.
  static constexpr int kMaxInFlight = 40;
  static constexpr int kMaxRanks = 1024;

 protected:
  /// The refusal that was noted last, where `reason` has its words.
  std::optional<Error> refusal_in(std::string_view reason) const noexcept;

 private:
  int64_t num_layers_ = 0;
  mutable std::mutex refusal_mutex_;  // abort() may come from another thread
  std::optional<Error> refusal_;
};

/// Ranks as threads of one process. Each rank's thread takes the end make_thread_group()[rank].
/// `num_nodes` fakes a topology: contiguous shares of ranks. Throws invalid_argument unless
/// 1 <= num_ranks <= kMaxRanks, 1 <= num_nodes <= num_ranks and deadline > 0.
std::vector<std::unique_ptr<Communicator>> make_thread_group(int num_ranks,
                                                             std::chrono::nanoseconds deadline,
                                                             int num_nodes = 1);
/// A communicator of one.
std::unique_ptr<Communicator> make_self();

/// offset[i] = bytes[0] + ... + bytes[i-1]; returns the total. Sizes agree; offset may be bytes
/// itself.
int64_t exclusive_offsets(std::span<const int64_t> bytes, std::span<int64_t> offset);

}  // namespace moekit::comm
