// Communicators for expert-parallel layers: ranks that are threads of one process, processes of one
// host, or processes under MPI. docs/expert-parallel.md shows how to embed each.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moekit/export.h"

namespace moekit {

namespace comm {
class Communicator;
}

/// One rank's end of a group. Copyable handle; the group lives as long as any handle. An empty
/// handle is a group of one.
struct MOEKIT_API CommunicatorHandle {
  std::shared_ptr<comm::Communicator> impl;
  int rank() const;
  int size() const;
  /// Nodes count from 0. Throws invalid_argument unless 0 <= rank < size().
  int node_of(int rank) const;
  /// "none", "threads", "shm", "mpi", ...
  std::string transport() const;
  /// Collective: a group of the ranks that give the same `color` (below zero: an empty handle), in
  /// the order of (key, rank).
  CommunicatorHandle split(int color, int key) const;
  /// Fails the group, so that no peer waits for this rank any longer: each gets a comm error with
  /// `reason`. Call it before an application ends after an error of its own. Where `reason` has the
  /// words of an error that all ranks get alike (plans that differ, a capacity that refuses), a
  /// peer that is still on its way there gets that error instead.
  void abort(const std::string& reason) const noexcept;
};

/// `num_ranks` ends, one for each thread of this process. Every wait ends at `deadline` with a
/// timeout error.
MOEKIT_API std::vector<CommunicatorHandle> make_thread_ranks(
    int num_ranks, std::chrono::nanoseconds deadline = std::chrono::seconds(30), int num_nodes = 1);

/// What an application has that starts ranks as processes by its own means: its rank, and one
/// collective call. Both are used while a communicator is made, never later.
struct Bootstrap {
  int rank = 0;
  int size = 1;
  /// recv[r * bytes, (r + 1) * bytes) = the `bytes` bytes that rank r sends. What it throws leaves
  /// make_process_ranks.
  std::function<void(const void* send, void* recv, int64_t bytes)> allgather;
  /// Optional: called once, after the communicator has been made on this rank.
  std::function<void()> barrier;
};

struct ProcessOptions {
  std::chrono::nanoseconds deadline = std::chrono::seconds(30);
  /// 0: nodes are hosts. More: contiguous shares of the ranks, as if they were hosts; over MPI,
  /// ranks of different nodes then talk by messages.
  int num_nodes = 0;
};

/// This process's end of a group of processes on one host, over shared memory. Collective over the
/// bootstrap's ranks. Throws unsupported where ranks share no memory.
MOEKIT_API CommunicatorHandle make_process_ranks(const Bootstrap& bootstrap,
                                                 const ProcessOptions& options = {});

/// This process's end of the group of `mpi_comm`, an MPI_Comm* of an application that has
/// initialized MPI: shared memory inside a node, messages between nodes. Collective over that
/// communicator, which is duplicated, never used for messages. The world is used when it is what
/// the caller passes. Destroy the handle, and layers made with it, before MPI_Finalize. Throws
/// unsupported where libmoekit_mpi.so or the MPI library is missing.
MOEKIT_API CommunicatorHandle make_mpi_ranks(const void* mpi_comm,
                                             const ProcessOptions& options = {});

/// MPI for programs that leave it to moekit (the moekit program): an application that uses MPI
/// itself calls make_mpi_ranks instead.
struct MOEKIT_API MpiWorld {
  int rank = 0;
  int size = 1;
  /// MPI_Init. Throws unsupported where the plug-in is missing, invalid_argument when MPI is
  /// initialized already. It can take as long as the slowest rank needs to come.
  static MpiWorld start();
  /// The group of all ranks of this world.
  CommunicatorHandle ranks(const ProcessOptions& options = {}) const;
  /// Who has not come to what this process waits for in start(), ranks() or finish(): "rank 0
  /// expected 3 ranks, seen 2: rank 1 has not come". Of the ranks of this host, where Open MPI has
  /// started them; empty else. Any thread, also while another one waits.
  static std::string absent();
  /// MPI_Finalize. After an error, end the process without it: it waits for ranks that are gone.
  void finish() const;
};

/// Whether ranks over MPI can be made here.
struct MpiSupport {
  bool available = false;
  std::string library;  ///< what the MPI library calls itself
  std::string path;     ///< of the plug-in
  std::string reason;   ///< why not, and what to do
};
MOEKIT_API MpiSupport find_mpi();

}  // namespace moekit
