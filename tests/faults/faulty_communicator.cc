#include "faults/faulty_communicator.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "comm/symmetric_heap.h"
#include "moekit/error.h"
#include "prepare/distributed_layout.h"

namespace moekit::faults {
namespace {

using comm::CallSite;
using comm::Exchange;
using comm::Ticket;

bool changes_counts(Kind kind) {
  return kind == Kind::sends_more || kind == Kind::sends_less || kind == Kind::expects_more ||
         kind == Kind::expects_less;
}
bool changes_promises(Kind kind) {
  return kind == Kind::promises_more || kind == Kind::promises_less ||
         kind == Kind::promises_absurd;
}
bool changes_flags(Kind kind) { return kind == Kind::flag_behind || kind == Kind::flag_ahead; }
bool happens_anywhere(Kind kind) {
  return kind == Kind::leaves || kind == Kind::dies || kind == Kind::stalls || kind == Kind::late;
}

class FaultyCommunicator;

class FaultyHeap final : public comm::SymmetricHeap {
 public:
  FaultyHeap(std::unique_ptr<comm::SymmetricHeap> inner, FaultyCommunicator& end)
      : inner_(std::move(inner)), end_(end) {}
  std::byte* base() const override { return inner_->base(); }
  int64_t bytes() const override { return inner_->bytes(); }
  int64_t num_flags() const override { return inner_->num_flags(); }
  std::byte* peer(int rank) const override { return inner_->peer(rank); }
  uint64_t flag(int64_t flag) const override { return inner_->flag(flag); }
  bool failed() const override { return inner_->failed(); }
  void put(int rank, int64_t offset, const void* source, int64_t bytes) override;
  void signal(int rank, int64_t flag, uint64_t value) override;
  void wait(int64_t flag, uint64_t value, int peer, CallSite site) override;

 private:
  std::unique_ptr<comm::SymmetricHeap> inner_;
  FaultyCommunicator& end_;
};

class FaultyCommunicator final : public comm::Communicator {
 public:
  FaultyCommunicator(std::shared_ptr<comm::Communicator> inner, Script& script)
      : inner_(std::move(inner)),
        script_(script),
        name_(inner_->name()),
        rank_(inner_->rank()),
        size_(inner_->size()),
        deadline_(inner_->deadline()),
        lends_(inner_->lends()) {}

  std::string_view name() const override { return name_; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int node_of(int rank) const override { return inner_ != nullptr ? inner_->node_of(rank) : 0; }
  std::chrono::nanoseconds deadline() const override { return deadline_; }

  void barrier(CallSite site) override {
    operation(site.phase);
    forward([&] { inner_->barrier(site); });
  }
  void allgather(const void* send, void* recv, int64_t bytes, CallSite site) override {
    operation(site.phase);
    forward([&] { inner_->allgather(send, recv, bytes, site); });
  }
  Ticket begin_all_to_all_v(const Exchange& exchange, CallSite site) override {
    const Kind kind = script_.fault().kind;
    const bool counts = changes_counts(kind);
    const bool promises = changes_promises(kind) && std::strcmp(site.phase, "dispatch counts") == 0;
    const bool due = operation(site.phase, counts || promises);
    Exchange mine = exchange;
    if (due && counts) mine = with_other_counts(exchange);
    if (due && promises) mine = with_other_promises(exchange);
    Ticket ticket;
    forward([&] { ticket = inner_->begin_all_to_all_v(mine, site); });
    return ticket;
  }
  bool ready(Ticket ticket) const override { return inner_ == nullptr || inner_->ready(ticket); }
  void finish(Ticket ticket) override {
    operation("finish");
    forward([&] { inner_->finish(ticket); });
  }
  bool lends() const override { return lends_; }
  void finish_reading(Ticket ticket,
                      FunctionRef<void(std::span<const void* const>)> read) override {
    operation("finish");
    forward([&] { inner_->finish_reading(ticket, read); });
  }
  std::unique_ptr<comm::SymmetricHeap> make_heap(int64_t bytes, int64_t num_flags,
                                                 CallSite site) override {
    std::unique_ptr<comm::SymmetricHeap> heap;
    forward([&] { heap = inner_->make_heap(bytes, num_flags, site); });
    return std::make_unique<FaultyHeap>(std::move(heap), *this);
  }
  /// The smaller group's ranks behave.
  std::unique_ptr<comm::Communicator> split(int color, int key, CallSite site) override {
    return inner_->split(color, key, site);
  }
  void abort(std::string_view reason) noexcept override {
    if (inner_ != nullptr) inner_->abort(reason);
  }
  void note_refusal(const Error& error) noexcept override {
    if (inner_ != nullptr) inner_->note_refusal(error);
  }

  /// Comes to an operation; suffers what the script says. True where the operation itself is to be
  /// changed.
  bool operation(const char* name, bool changeable = false) {
    if (inner_ == nullptr) throw Left{};
    const Kind kind = script_.fault().kind;
    if (!script_.due(rank_, name, happens_anywhere(kind) || changeable)) return false;
    switch (kind) {
      case Kind::dies: raise(SIGKILL); return false;
      case Kind::leaves: inner_.reset(); throw Left{};
      case Kind::stalls: script_.wait_until_noticed(); return false;
      case Kind::late: std::this_thread::sleep_for(std::chrono::milliseconds(15)); return false;
      default: return true;
    }
  }

  template <typename Body>
  void forward(Body&& body) {
    try {
      body();
    } catch (const Error&) {
      script_.noticed(rank_);
      throw;
    }
  }

  Kind kind() const { return script_.fault().kind; }

 private:
  int next_peer() const { return (rank_ + 1) % size_; }

  Exchange with_other_counts(const Exchange& exchange) {
    const Kind kind = script_.fault().kind;
    const bool of_sends = kind == Kind::sends_more || kind == Kind::sends_less;
    const bool more = kind == Kind::sends_more || kind == Kind::expects_more;
    const auto& old = of_sends ? exchange.send_bytes : exchange.recv_bytes;
    bytes_.assign(old.begin(), old.end());
    bytes_[static_cast<size_t>(next_peer())] += more ? 16 : -16;
    Exchange mine = exchange;
    (of_sends ? mine.send_bytes : mine.recv_bytes) = bytes_;
    return mine;
  }

  Exchange with_other_promises(const Exchange& exchange) {
    int64_t end = 0;
    for (int r = 0; r < size_; ++r) {
      end = std::max(end, exchange.send_offset[r] + exchange.send_bytes[r]);
    }
    const auto* from = static_cast<const std::byte*>(exchange.send);
    payload_.assign(from, from + end);
    prepare::CountHeader header;
    std::byte* at = payload_.data() + exchange.send_offset[next_peer()];
    std::memcpy(&header, at, sizeof(header));
    const Kind kind = script_.fault().kind;
    header.rows += kind == Kind::promises_more ? 1 : kind == Kind::promises_less ? -1 : 1 << 20;
    std::memcpy(at, &header, sizeof(header));
    Exchange mine = exchange;
    mine.send = payload_.data();
    return mine;
  }

  std::shared_ptr<comm::Communicator> inner_;  // null: it has left
  Script& script_;
  const std::string name_;
  const int rank_;
  const int size_;
  const std::chrono::nanoseconds deadline_;
  const bool lends_;
  // Of the changed exchange; peers may read them until it is finished.
  std::vector<int64_t> bytes_;
  std::vector<std::byte> payload_;
};

void FaultyHeap::put(int rank, int64_t offset, const void* source, int64_t bytes) {
  end_.forward([&] { inner_->put(rank, offset, source, bytes); });
}

void FaultyHeap::signal(int rank, int64_t flag, uint64_t value) {
  const bool changed = end_.operation("signal", changes_flags(end_.kind()));
  if (changed) value = end_.kind() == Kind::flag_ahead ? value + 2 : value - 1;
  end_.forward([&] { inner_->signal(rank, flag, value); });
}

void FaultyHeap::wait(int64_t flag, uint64_t value, int peer, CallSite site) {
  end_.operation(site.phase);
  end_.forward([&] { inner_->wait(flag, value, peer, site); });
}

}  // namespace

Script::Script(const Fault& fault, int num_ranks, const std::string& file)
    : fault_(fault), positions_(static_cast<size_t>(num_ranks)), page_(file) {}

std::shared_ptr<comm::Communicator> Script::wrap(std::shared_ptr<comm::Communicator> end) {
  return std::make_shared<FaultyCommunicator>(std::move(end), *this);
}

std::vector<std::string> Script::operations() const {
  return {page_->operations, page_->operations + page_->num_operations};
}

void Script::enter(int rank, int64_t call, int step) {
  Position& at = positions_[static_cast<size_t>(rank)];
  at.call = call;
  at.step = step;
  at.operation = 0;
}

bool Script::ahead(int64_t call, int step) const {
  return fault_.kind == Kind::none || call < fault_.call ||
         (call == fault_.call && step <= fault_.step);
}

bool Script::due(int rank, const char* operation, bool fits) {
  Position& at = positions_[static_cast<size_t>(rank)];
  ++at.operation;
  if (rank != fault_.rank || at.call != fault_.call || at.step != fault_.step) return false;
  if (page_->num_operations == kMaxOperations) throw std::length_error("too many operations");
  std::strncpy(page_->operations[page_->num_operations++], operation, 63);
  const bool chosen =
      fault_.operation == kFirstThatFits ? !fired() : at.operation == fault_.operation;
  if (fault_.kind == Kind::none || !chosen || !fits) return false;
  page_->fired.store(true);
  return true;
}

void Script::noticed(int rank) {
  Position& at = positions_[static_cast<size_t>(rank)];
  if (!at.noticed) page_->num_noticed.fetch_add(1);
  at.noticed = true;
}

void Script::wait_until_noticed() const {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  const int others = static_cast<int>(positions_.size()) - 1;
  while (page_->num_noticed.load() < others && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace moekit::faults
