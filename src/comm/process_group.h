// How ranks that are processes find each other and decide, for each pair, how it talks: through
// shared memory within an island (one host, and one node where a transport between nodes is there),
// through messages else.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/process_engine.h"
#include "comm/shared_memory.h"

namespace moekit::comm {

/// What ranks have before they have a communicator. recv[r*bytes ..) = rank r's `bytes` bytes.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  std::function<void(const void* send, void* recv, int64_t bytes)> allgather;
};

/// What one rank knows of the group to come.
struct GroupPlan {
  std::string name;
  std::chrono::nanoseconds deadline{};
  int node = -1;  ///< -1: nodes are hosts
  std::shared_ptr<MessageTransport> transport;
  int transport_rank = 0;
};

/// Collective. What fails on one rank fails on all, with the same reason.
ProcessGroup assemble_group(const Rendezvous& rendezvous, const GroupPlan& plan);
/// Takes part in the rendezvous of others, whose allgather it shares.
void attend_group(const Rendezvous& rendezvous);

/// Memory that the ranks of each island share, made by its first rank. Collective over
/// `rendezvous`; `members` are the ranks of this rank's island in order.
SharedMemory share_memory(const Rendezvous& rendezvous, const std::vector<int>& members,
                          int64_t bytes);

std::unique_ptr<Communicator> make_process_communicator(ProcessGroup group);

}  // namespace moekit::comm
