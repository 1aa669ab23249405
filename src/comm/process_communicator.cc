// The communicator of ranks that are processes: one rank's end, above a ProcessEngine.
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/communicator.h"
#include "comm/process_engine.h"
#include "comm/process_group.h"
#include "comm/process_heap.h"
#include "comm/subgroup.h"

namespace moekit::comm {
namespace {

class ProcessCommunicator final : public Communicator {
 public:
  explicit ProcessCommunicator(ProcessGroup group)
      : engine_(std::make_shared<ProcessEngine>(std::move(group))) {}
  ~ProcessCommunicator() override { engine_->leave(); }

  std::string_view name() const override { return engine_->group().name; }
  int rank() const override { return engine_->rank(); }
  int size() const override { return engine_->size(); }
  int node_of(int rank) const override { return engine_->group().nodes[static_cast<size_t>(rank)]; }
  std::chrono::nanoseconds deadline() const override { return engine_->group().deadline; }

  void barrier(CallSite site) override {
    engine_->finish(engine_->begin(OperationKind::barrier, {}, 0, site));
  }

  void allgather(const void* send, void* recv, int64_t bytes, CallSite site) override {
    MOEKIT_CHECK(bytes >= 0, "allgather needs a size of 0 or more, got {}", bytes);
    Exchange exchange;
    exchange.send = send;
    exchange.recv = recv;
    engine_->finish(engine_->begin(OperationKind::allgather, exchange, bytes, site));
  }

  Ticket begin_all_to_all_v(const Exchange& exchange, CallSite site) override {
    const auto ranks = static_cast<size_t>(size());
    MOEKIT_CHECK(exchange.send_offset.size() == ranks && exchange.send_bytes.size() == ranks &&
                     exchange.recv_offset.size() == ranks && exchange.recv_bytes.size() == ranks,
                 "all_to_all_v in phase {} needs one offset and size for each of {} ranks",
                 site.phase, ranks);
    return Ticket{engine_->begin(OperationKind::all_to_all_v, exchange, 0, site)};
  }

  bool ready(Ticket ticket) const override {
    return !engine_->in_flight(ticket.operation) || engine_->complete(ticket.operation);
  }

  void finish(Ticket ticket) override {
    MOEKIT_CHECK(engine_->in_flight(ticket.operation),
                 "rank {}: exchange {} is not in flight; finish each begun exchange once", rank(),
                 ticket.operation);
    engine_->finish(ticket.operation);
  }

  std::unique_ptr<SymmetricHeap> make_heap(int64_t bytes, int64_t num_flags,
                                           CallSite site) override {
    const HeapSize mine{bytes, num_flags};
    std::vector<HeapSize> all(static_cast<size_t>(size()));
    allgather(&mine, all.data(), sizeof(HeapSize), site);
    check_heap_sizes(all, site);
    auto heap = make_process_heap(engine_, rendezvous(site), mine);
    barrier(site);  // a peer that puts finds the heap registered here
    return heap;
  }

  std::unique_ptr<Communicator> split(int color, int key, CallSite site) override {
    const Subgroup subgroup = choose_subgroup(*this, color, key, site);
    const std::vector<int>& members = subgroup.ranks;
    // Every rank takes part in every allgather, members of other subgroups and of none too.
    Rendezvous part;
    part.rank = subgroup.rank;
    part.size = static_cast<int>(members.size());
    part.allgather = [&](const void* send, void* recv, int64_t bytes) {
      std::vector<std::byte> everybody(static_cast<size_t>(bytes * size()));
      allgather(send, everybody.data(), bytes, site);
      for (size_t i = 0; i < members.size(); ++i) {
        std::memcpy(static_cast<std::byte*>(recv) + static_cast<int64_t>(i) * bytes,
                    everybody.data() + members[i] * bytes, static_cast<size_t>(bytes));
      }
    };
    if (color < 0) {
      attend_group(part);
      return nullptr;
    }
    const ProcessGroup& group = engine_->group();
    GroupPlan plan;
    plan.name = group.name;
    plan.deadline = group.deadline;
    plan.node = node_of(rank());
    plan.transport = group.transport;
    plan.transport_rank = group.transport_ranks[static_cast<size_t>(rank())];
    return make_process_communicator(assemble_group(part, plan));
  }

  void abort(std::string_view reason) noexcept override {
    if (const std::optional<Error> refusal = refusal_in(reason)) {
      engine_->refuse(*refusal);
    } else {
      engine_->give_up(reason);
    }
  }

 private:
  Rendezvous rendezvous(CallSite site) {
    Rendezvous all;
    all.rank = rank();
    all.size = size();
    all.allgather = [this, site](const void* send, void* recv, int64_t bytes) {
      allgather(send, recv, bytes, site);
    };
    return all;
  }

  std::shared_ptr<ProcessEngine> engine_;  // heaps may outlive this end
};

}  // namespace

std::unique_ptr<Communicator> make_process_communicator(ProcessGroup group) {
  return std::make_unique<ProcessCommunicator>(std::move(group));
}

}  // namespace moekit::comm
