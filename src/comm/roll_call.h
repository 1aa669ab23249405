// RollCall: who of the processes that one launcher has started on this host has come to a step that
// MPI takes with all of them, and in which it names nobody: MPI_Init, making a group of the world,
// MPI_Finalize. Each process leaves a mark in the folder that Open MPI makes for a job and removes
// after it. Where there is none, and of other hosts, nothing is known. Only words depend on it.
#pragma once

#include <atomic>
#include <string>
#include <utility>

namespace moekit::comm {

/// What a launcher tells a process.
struct Launch {
  std::string folder;  ///< of the job on this host; empty: not known
  std::string job;     ///< told apart from others in the folder
  int rank = -1;
  int size = 0;
  int local_size = 0;  ///< of those on this host

  /// As Open MPI's environment has it.
  static Launch of_environment();
};

class RollCall {
 public:
  explicit RollCall(Launch launch) : launch_(std::move(launch)) {}
  /// Of this process's launch.
  static RollCall& of_process();

  /// This process comes to its next step; all take the same.
  void come() noexcept;
  /// "rank 0 expected 3 ranks, seen 1: rank 1 has not come, rank 2 has ended (process 4242)", of
  /// the step that this process has come to last. Empty where nothing is known. Any thread.
  std::string describe() const;

 private:
  std::string mark_of(int rank) const;

  const Launch launch_;
  std::atomic<int> step_{0};
};

}  // namespace moekit::comm
