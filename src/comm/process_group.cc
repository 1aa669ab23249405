#include "comm/process_group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/rank_text.h"

namespace moekit::comm {
namespace {

// Changes with every change of what processes exchange or share.
constexpr uint64_t kProtocol = 0x6d6f656b69740002;

struct Hello {
  uint64_t protocol = 0;
  uint64_t host = 0;
  int32_t node = -1;
  int32_t transport_rank = -1;
  int32_t next_tag = 0;
  int32_t reserved = 0;
};

/// How one step went on one rank.
struct Status {
  int32_t code = 0;
  int32_t descriptor = -1;  ///< of shared memory that the rank has made
  int64_t pid = 0;
  char text[496] = {};
};

template <typename T>
std::vector<T> gather(const Rendezvous& rendezvous, const T& mine) {
  std::vector<T> all(static_cast<size_t>(rendezvous.size));
  rendezvous.allgather(&mine, all.data(), sizeof(T));
  return all;
}

/// Runs a step whose failure must not make this rank leave the others in their next allgather.
template <typename F>
Status attempt(F&& step) {
  Status status;
  status.pid = getpid();
  auto note = [&](ErrorCode code, const char* text) {
    status.code = static_cast<int32_t>(code);
    std::strncpy(status.text, text, sizeof(status.text) - 1);
  };
  try {
    step(status);
  } catch (const Error& e) {
    note(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    note(ErrorCode::out_of_memory, "no memory is left for the communicator");
  } catch (const std::exception& e) {
    note(ErrorCode::internal, e.what());
  }
  return status;
}

bool all_went_well(const std::vector<Status>& all) {
  return std::all_of(all.begin(), all.end(), [](const Status& s) { return s.code == 0; });
}

/// `all` holds one round after the other.
void check_all(const std::vector<Status>& all, int num_ranks) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].code == 0) continue;
    fail(static_cast<ErrorCode>(all[i].code), "{}",
         rank_text(static_cast<int64_t>(i) % num_ranks, all[i].text));
  }
}

/// Numbers the nodes in the order in which the ranks meet them.
std::vector<int> number_nodes(const std::vector<Hello>& hellos) {
  std::vector<std::pair<int64_t, uint64_t>> known;
  std::vector<int> nodes;
  for (const Hello& hello : hellos) {
    const std::pair<int64_t, uint64_t> key(hello.node, hello.node < 0 ? hello.host : 0);
    auto found = std::find(known.begin(), known.end(), key);
    if (found == known.end()) found = known.insert(known.end(), key);
    nodes.push_back(static_cast<int>(found - known.begin()));
  }
  return nodes;
}

void check_hellos(const std::vector<Hello>& hellos, bool has_transport) {
  for (size_t r = 0; r < hellos.size(); ++r) {
    MOEKIT_CHECK_AS(ErrorCode::comm, hellos[r].protocol == kProtocol,
                    "rank {} runs another version of moekit than rank 0, or its allgather mixes "
                    "ranks up; use one version, and an allgather that puts rank r's bytes at r",
                    r);
    MOEKIT_CHECK_AS(ErrorCode::unsupported, has_transport || hellos[r].host == hellos[0].host,
                    "rank {} shares no memory with rank 0 (another host, container or user): this "
                    "group has shared memory only; make it over MPI, or of the ranks of one host",
                    r);
  }
}

}  // namespace

namespace {

/// Two rounds, whatever happens; `statuses` then has what went wrong.
SharedMemory try_to_share(const Rendezvous& rendezvous, const std::vector<int>& members,
                          int64_t bytes, std::vector<Status>& statuses) {
  SharedMemory memory;
  const bool alone = members.size() < 2;
  const bool first = !alone && members.front() == rendezvous.rank;
  auto make = [&](Status& status) {
    if (!first) return;
    memory = SharedMemory::create(bytes);
    status.descriptor = memory.descriptor();
  };
  const std::vector<Status> made = gather(rendezvous, attempt(make));
  auto open = [&](Status&) {
    if (first || alone) return;
    const Status& theirs = made[static_cast<size_t>(members.front())];
    if (theirs.code == 0) {
      memory = SharedMemory::open(theirs.pid, theirs.descriptor, bytes);
    }
  };
  const std::vector<Status> opened = gather(rendezvous, attempt(open));
  statuses.insert(statuses.end(), made.begin(), made.end());
  statuses.insert(statuses.end(), opened.begin(), opened.end());
  return memory;
}

}  // namespace

SharedMemory share_memory(const Rendezvous& rendezvous, const std::vector<int>& members,
                          int64_t bytes) {
  std::vector<Status> statuses;
  SharedMemory memory = try_to_share(rendezvous, members, bytes, statuses);
  check_all(statuses, rendezvous.size);
  return memory;
}

ProcessGroup assemble_group(const Rendezvous& rendezvous, const GroupPlan& plan) {
  Hello mine;
  mine.protocol = kProtocol;
  mine.host = host_identity();
  mine.node = plan.node;
  if (plan.transport) {
    mine.transport_rank = plan.transport_rank;
    mine.next_tag = plan.transport->next_tag();
  }
  const std::vector<Hello> hellos = gather(rendezvous, mine);
  check_hellos(hellos, plan.transport != nullptr);

  ProcessGroup group;
  group.name = plan.name;
  group.rank = rendezvous.rank;
  group.size = rendezvous.size;
  group.deadline = plan.deadline;
  group.nodes = number_nodes(hellos);
  group.transport = plan.transport;
  group.members.assign(hellos.size(), -1);
  group.message_links.assign(hellos.size(), -1);
  const auto self = static_cast<size_t>(rendezvous.rank);
  std::vector<int> members, message_peers;
  int first_tag = 0;
  for (size_t r = 0; r < hellos.size(); ++r) {
    group.transport_ranks.push_back(hellos[r].transport_rank);
    first_tag = std::max(first_tag, static_cast<int>(hellos[r].next_tag));
    const bool near =
        hellos[r].host == mine.host && (!plan.transport || group.nodes[r] == group.nodes[self]);
    if (near) {
      group.members[r] = static_cast<int>(members.size());
      members.push_back(static_cast<int>(r));
    } else {
      group.message_links[r] = static_cast<int>(message_peers.size());
      message_peers.push_back(hellos[r].transport_rank);
    }
  }
  const int num_members = static_cast<int>(members.size());
  // All rounds are gone through, and only then what went wrong is thrown: ranks of other subgroups
  // may share them.
  std::vector<Status> statuses;
  SharedMemory memory =
      try_to_share(rendezvous, members, ShmIsland::bytes_for(num_members), statuses);
  auto connect = [&](Status&) {
    if (!all_went_well(statuses)) return;
    if (num_members > 1) {
      group.island =
          std::make_unique<ShmIsland>(std::move(memory), num_members, group.members[self]);
    }
    if (plan.transport) plan.transport->take_tags(first_tag, MessageLinks::kTags);
    if (!message_peers.empty()) {
      group.messages =
          std::make_unique<MessageLinks>(plan.transport->connect(), message_peers, first_tag);
    }
  };
  const std::vector<Status> connected = gather(rendezvous, attempt(connect));
  statuses.insert(statuses.end(), connected.begin(), connected.end());
  check_all(statuses, rendezvous.size);
  return group;
}

void attend_group(const Rendezvous& rendezvous) {
  gather(rendezvous, Hello{});
  gather(rendezvous, Status{});  // memory made
  gather(rendezvous, Status{});  // memory opened
  gather(rendezvous, Status{});  // links made
}

}  // namespace moekit::comm
