// The public face of the communicators.
#include "base/check.h"
#include "comm/communicator.h"
#include "comm/mpi_library.h"
#include "comm/process_group.h"
#include "comm/roll_call.h"
#include "comm/subgroup.h"
#include "moekit/communicator.h"

namespace moekit {
namespace {

void check_options(const ProcessOptions& options, int size) {
  MOEKIT_CHECK(size >= 1 && size <= comm::Communicator::kMaxRanks,
               "a group of processes has 1 to {} ranks, got {}", comm::Communicator::kMaxRanks,
               size);
  MOEKIT_CHECK(options.deadline > std::chrono::nanoseconds::zero(),
               "the deadline of a group must be above zero, got {} ns", options.deadline.count());
  MOEKIT_CHECK(options.num_nodes >= 0 && options.num_nodes <= size,
               "{} ranks can lie on 1 to {} nodes (0: their hosts), got {}", size, size,
               options.num_nodes);
}

comm::GroupPlan plan_of(const ProcessOptions& options, const char* name, int rank, int size) {
  comm::GroupPlan plan;
  plan.name = name;
  plan.deadline = options.deadline;
  if (options.num_nodes > 0) plan.node = comm::share_of_nodes(rank, size, options.num_nodes);
  return plan;
}

CommunicatorHandle make_mpi_group(std::shared_ptr<comm::MpiLibrary> library, const void* mpi_comm,
                                  const ProcessOptions& options) {
  const auto transport = library->open(mpi_comm, options.deadline);
  check_options(options, transport->size());
  comm::Rendezvous rendezvous;
  rendezvous.rank = transport->rank();
  rendezvous.size = transport->size();
  rendezvous.allgather = [&](const void* send, void* recv, int64_t bytes) {
    transport->allgather(send, recv, bytes, options.deadline);
  };
  comm::GroupPlan plan = plan_of(options, "mpi", rendezvous.rank, rendezvous.size);
  plan.transport = transport;
  plan.transport_rank = rendezvous.rank;
  return {comm::make_process_communicator(comm::assemble_group(rendezvous, plan))};
}

}  // namespace

int CommunicatorHandle::rank() const { return impl == nullptr ? 0 : impl->rank(); }
int CommunicatorHandle::size() const { return impl == nullptr ? 1 : impl->size(); }

int CommunicatorHandle::node_of(int rank) const {
  MOEKIT_CHECK(rank >= 0 && rank < size(), "rank {} is not in a group of {}", rank, size());
  return impl == nullptr ? 0 : impl->node_of(rank);
}

std::string CommunicatorHandle::transport() const {
  return impl == nullptr ? "none" : std::string(impl->name());
}

CommunicatorHandle CommunicatorHandle::split(int color, int key) const {
  if (impl == nullptr) return {};
  return {impl->split(color, key, {"plan: split", 0})};
}

void CommunicatorHandle::abort(const std::string& reason) const noexcept {
  if (impl != nullptr) impl->abort(reason);
}

std::vector<CommunicatorHandle> make_thread_ranks(int num_ranks, std::chrono::nanoseconds deadline,
                                                  int num_nodes) {
  std::vector<CommunicatorHandle> handles;
  for (auto& end : comm::make_thread_group(num_ranks, deadline, num_nodes)) {
    handles.push_back(CommunicatorHandle{std::move(end)});
  }
  return handles;
}

CommunicatorHandle make_process_ranks(const Bootstrap& bootstrap, const ProcessOptions& options) {
  check_options(options, bootstrap.size);
  MOEKIT_CHECK(bootstrap.rank >= 0 && bootstrap.rank < bootstrap.size,
               "bootstrap: expected a rank from 0 to {}, got {}", bootstrap.size - 1,
               bootstrap.rank);
  MOEKIT_CHECK(bootstrap.allgather != nullptr, "bootstrap: expected an allgather, got none");
  const comm::Rendezvous rendezvous{bootstrap.rank, bootstrap.size, bootstrap.allgather};
  const comm::GroupPlan plan = plan_of(options, "shm", bootstrap.rank, bootstrap.size);
  CommunicatorHandle handle{
      comm::make_process_communicator(comm::assemble_group(rendezvous, plan))};
  if (bootstrap.barrier) bootstrap.barrier();
  return handle;
}

CommunicatorHandle make_mpi_ranks(const void* mpi_comm, const ProcessOptions& options) {
  MOEKIT_CHECK(mpi_comm != nullptr,
               "make_mpi_ranks: expected the address of an MPI_Comm, got null; pass the subgroup "
               "whose ranks shall share the layer");
  return make_mpi_group(comm::MpiLibrary::load(), mpi_comm, options);
}

MpiWorld MpiWorld::start() {
  MpiWorld world;
  comm::MpiLibrary::load()->start(&world.rank, &world.size);
  return world;
}

CommunicatorHandle MpiWorld::ranks(const ProcessOptions& options) const {
  const auto library = comm::MpiLibrary::load();
  return make_mpi_group(library, library->world(), options);
}

std::string MpiWorld::absent() { return comm::RollCall::of_process().describe(); }

void MpiWorld::finish() const { comm::MpiLibrary::load()->finish(); }

MpiSupport find_mpi() {
  MpiSupport support;
  try {
    const auto library = comm::MpiLibrary::load();
    support.available = true;
    support.library = library->description();
    support.path = library->path();
  } catch (const Error& error) {
    support.reason = error.what();
  }
  return support;
}

}  // namespace moekit
