// The ends of a ThreadGroup: one rank's view of it. Rows are copied once, by the rank that
// receives them.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "comm/communicator.h"
#include "comm/subgroup.h"
#include "comm/thread_group.h"
#include "comm/thread_heap.h"
#include "trace/span.h"

namespace moekit::comm {
namespace {

/// memcpy that may be asked for nothing from nowhere.
void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank, std::string_view name)
      : group_(std::move(group)),
        rank_(rank),
        name_(name),
        lent_(static_cast<size_t>(group_->size())) {}
  ~ThreadCommunicator() override {
    for (const InFlight& mine : in_flight_) {
      if (mine.operation >= 0) abort("it left with an exchange in flight");
    }
    group_->progress(rank_).closed.store(true, std::memory_order_relaxed);
  }

  std::string_view name() const override { return name_; }
  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  int node_of(int rank) const override { return group_->node_of(rank); }
  std::chrono::nanoseconds deadline() const override { return group_->deadline(); }

  void barrier(CallSite site) override {
    const int64_t operation = begin(OperationKind::barrier, {}, 0, site);
    InFlight& mine = in_flight_[slot_of(operation)];
    mine.operation = -1;  // one meeting is the whole of it
    group_->wait(operation, rank_, mine.meeting);
  }

  void allgather(const void* send, void* recv, int64_t bytes, CallSite site) override {
    MOEKIT_CHECK(bytes >= 0, "allgather needs a size of 0 or more, got {}", bytes);
    Exchange exchange;
    exchange.send = send;
    const int64_t operation = begin(OperationKind::allgather, exchange, bytes, site);
    group_->wait(operation, rank_, in_flight_[slot_of(operation)].meeting);
    {
      ThreadGroup::Reader reader(*group_, rank_);
      for (int r = 0; r < size(); ++r) {
        copy_bytes(static_cast<std::byte*>(recv) + r * bytes,
                   group_->post(operation, r).exchange.send, bytes);
      }
    }
    close(operation);
  }

  Ticket begin_all_to_all_v(const Exchange& exchange, CallSite site) override {
    const size_t ranks = static_cast<size_t>(size());
    MOEKIT_CHECK(exchange.send_offset.size() == ranks && exchange.send_bytes.size() == ranks &&
                     exchange.recv_offset.size() == ranks && exchange.recv_bytes.size() == ranks,
                 "all_to_all_v in phase {} needs one offset and size for each of {} ranks",
                 site.phase, ranks);
    return Ticket{begin(OperationKind::all_to_all_v, exchange, 0, site)};
  }

  bool ready(Ticket ticket) const override {
    const InFlight& mine = in_flight_[slot_of(ticket.operation)];
    return mine.operation != ticket.operation || group_->met(ticket.operation, mine.meeting);
  }

  void finish(Ticket ticket) override {
    wait_for_posts(ticket);
    {
      ThreadGroup::Reader reader(*group_, rank_);
      pull(ticket.operation);
    }
    close(ticket.operation);
  }

  bool lends() const override { return true; }

  void finish_reading(Ticket ticket,
                      FunctionRef<void(std::span<const void* const>)> read) override {
    wait_for_posts(ticket);
    {
      ThreadGroup::Reader reader(*group_, rank_);
      for (int r = 0; r < size(); ++r) {
        lent_[static_cast<size_t>(r)] = group_->post(ticket.operation, r).exchange.lent;
      }
      read(lent_);
    }
    close(ticket.operation);
  }

  std::unique_ptr<SymmetricHeap> make_heap(int64_t bytes, int64_t num_flags,
                                           CallSite site) override {
    const HeapSize mine{bytes, num_flags};
    std::vector<HeapSize> all(static_cast<size_t>(size()));
    allgather(&mine, all.data(), sizeof(HeapSize), site);
    check_heap_sizes(all, site);  // every rank sees the same and throws the same
    auto memory = group_->heap_memory(next_heap_++);
    try {
      memory->make_part(rank_, mine);
    } catch (const Error& error) {
      abort(error.what());
      throw;
    }
    barrier(site);  // all parts are there
    return make_thread_heap(group_, std::move(memory), mine, rank_);
  }

  std::unique_ptr<Communicator> split(int color, int key, CallSite site) override {
    const Subgroup part = choose_subgroup(*this, color, key, site);
    const int64_t number = next_split_++;
    if (color < 0) return nullptr;
    return std::make_unique<ThreadCommunicator>(group_->child(number, color, part.nodes), part.rank,
                                                name_);
  }

  void abort(std::string_view reason) noexcept override {
    try {
      if (const std::optional<Error> refusal = refusal_in(reason)) {
        group_->poison(refusal->code(), refusal->what());
      } else {
        group_->poison(ErrorCode::comm, fmt::format("rank {} gave up: {} ({})", rank_, reason,
                                                    group_->last_seen(rank_)));
      }
    } catch (...) {  // no memory for the words: the failure itself must still reach the peers
      group_->poison(ErrorCode::comm, std::string());
    }
    group_->drain();
  }

 private:
  struct InFlight {
    int64_t operation = -1;
    uint32_t meeting = 0;
  };

  static size_t slot_of(int64_t operation) { return static_cast<size_t>(operation % kMaxInFlight); }

  int64_t begin(OperationKind kind, const Exchange& exchange, int64_t bytes, CallSite site) {
    group_->check(rank_);
    const int64_t operation = next_operation_;
    InFlight& mine = in_flight_[slot_of(operation)];
    MOEKIT_CHECK(mine.operation < 0,
                 "rank {}: {} exchanges are in flight already ({}); finish one first", rank_,
                 kMaxInFlight, to_string(site));
    ++next_operation_;
    Post& post = group_->post(operation, rank_);
    post.kind = kind;
    post.site = site;
    post.exchange = exchange;
    post.bytes = bytes;
    group_->note(rank_, site);
    mine.meeting = group_->arrive(operation, rank_, true);
    mine.operation = operation;
    return operation;
  }

  /// First meeting: all ranks have begun the exchange.
  void wait_for_posts(Ticket ticket) {
    const InFlight& mine = in_flight_[slot_of(ticket.operation)];
    MOEKIT_CHECK(ticket.operation >= 0 && mine.operation == ticket.operation,
                 "rank {}: exchange {} is not in flight; finish each begun exchange once", rank_,
                 ticket.operation);
    const trace::Span span(trace::Stage::wait);
    group_->wait(ticket.operation, rank_, mine.meeting);
  }

  /// Second meeting: nobody leaves before all have read.
  void close(int64_t operation) {
    in_flight_[slot_of(operation)].operation = -1;
    const trace::Span span(trace::Stage::wait);
    group_->wait(operation, rank_, group_->arrive(operation, rank_, false));
  }

  void pull(int64_t operation) {
    const Exchange& mine = group_->post(operation, rank_).exchange;
    trace::Span span(trace::Stage::copy);
    int64_t bytes = 0;
    // Starting at one's own number spreads the ranks over the senders' memory.
    for (int step = 0; step < size(); ++step) {
      const int from = (rank_ + step) % size();
      const Exchange& theirs = group_->post(operation, from).exchange;
      copy_bytes(static_cast<std::byte*>(mine.recv) + mine.recv_offset[from],
                 static_cast<const std::byte*>(theirs.send) + theirs.send_offset[rank_],
                 mine.recv_bytes[from]);
      bytes += mine.recv_bytes[from];
    }
    span.facts().bytes = bytes;
  }

  std::shared_ptr<ThreadGroup> group_;
  const int rank_;
  const std::string_view name_;
  int64_t next_operation_ = 0;
  int64_t next_heap_ = 0;
  int64_t next_split_ = 0;
  InFlight in_flight_[kMaxInFlight];
  std::vector<const void*> lent_;  // of the exchange that is being read
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_group(int num_ranks,
                                                             std::chrono::nanoseconds deadline,
                                                             int num_nodes) {
  MOEKIT_CHECK(num_ranks >= 1 && num_ranks <= Communicator::kMaxRanks,
               "a group of threads has 1 to {} ranks, got {}", Communicator::kMaxRanks, num_ranks);
  MOEKIT_CHECK(num_nodes >= 1 && num_nodes <= num_ranks,
               "{} ranks can lie on 1 to {} nodes, got {}", num_ranks, num_ranks, num_nodes);
  MOEKIT_CHECK(deadline > std::chrono::nanoseconds::zero(),
               "the deadline of a group must be above zero, got {} ns", deadline.count());
  std::vector<int> nodes;
  for (int r = 0; r < num_ranks; ++r) nodes.push_back(share_of_nodes(r, num_ranks, num_nodes));
  const auto group = std::make_shared<ThreadGroup>(deadline, std::move(nodes));
  std::vector<std::unique_ptr<Communicator>> ends;
  for (int r = 0; r < num_ranks; ++r) {
    ends.push_back(std::make_unique<ThreadCommunicator>(group, r, "threads"));
  }
  return ends;
}

std::unique_ptr<Communicator> make_self() {
  const auto group = std::make_shared<ThreadGroup>(std::chrono::seconds(30), std::vector<int>{0});
  return std::make_unique<ThreadCommunicator>(group, 0, "self");
}

void Communicator::finish_reading(Ticket, FunctionRef<void(std::span<const void* const>)>) {
  MOEKIT_CHECK_AS(ErrorCode::internal, false, "ranks over {} can't read each other's memory",
                  name());
}

int64_t exclusive_offsets(std::span<const int64_t> bytes, std::span<int64_t> offset) {
  MOEKIT_CHECK(bytes.size() == offset.size(), "{} sizes need as many offsets, got {}", bytes.size(),
               offset.size());
  int64_t total = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int64_t size = bytes[i];
    offset[i] = total;
    total += size;
  }
  return total;
}

}  // namespace moekit::comm
