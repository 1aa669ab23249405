// This process as one rank of an mpirun: joins the others, says who it is in errors, and leaves so
// that the launcher sees its exit status.
#pragma once

#include <chrono>
#include <string>

#include "moekit/communicator.h"

namespace moekit::cli {

/// Starts MPI and makes the group of all ranks. Standard output of every rank but 0 goes nowhere
/// from here on. Throws invalid_argument unless mpirun started `num_ranks` processes; ends the
/// process with status 7 when MPI itself does not start within the deadline. `num_nodes` 0: nodes
/// are hosts.
CommunicatorHandle join_ranks(int num_ranks, int num_nodes, std::chrono::nanoseconds deadline);

/// 0 where no ranks were joined.
int own_rank();

/// "rank 3: " before what this process reports, unless the message says so already or it has no
/// peers.
std::string with_rank(const std::string& message);

/// Leaves in peace: waits for the other ranks in MPI_Finalize. Nothing to do where none were
/// joined.
void leave_ranks();

/// After an error: tells the peers, and ends the process without MPI_Finalize, which would wait for
/// ranks that are gone. Returns where no ranks were joined.
void desert_ranks(int status, const std::string& reason);

}  // namespace moekit::cli
