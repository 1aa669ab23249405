// Groups of every transport with all ranks in this process, so that one test body holds them all to
// the same contract. Messages between nodes go through a hub that matches them as MPI would.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "comm/communicator.h"
#include "comm/process_group.h"
#include "comm/subgroup.h"
#include "moekit/error.h"

namespace moekit::comm::testing {

using Ends = std::vector<std::unique_ptr<Communicator>>;

struct Outcome {
  ErrorCode code = ErrorCode::ok;
  std::string text;
};

/// Runs body(end) on one thread a rank; returns what each threw.
inline std::vector<Outcome> on_ranks(Ends& ends, const std::function<void(Communicator&)>& body) {
  std::vector<Outcome> outcomes(ends.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ends.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(*ends[r]);
      } catch (const Error& e) {
        outcomes[r] = {e.code(), e.what()};
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return outcomes;
}

inline void expect_no_error(const std::vector<Outcome>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_EQ(outcomes[r].code, ErrorCode::ok) << "rank " << r << ": " << outcomes[r].text;
  }
}

/// Every rank has this error, which begins with its own number and has all the words.
inline void expect_all(const std::vector<Outcome>& outcomes, ErrorCode code,
                       std::initializer_list<const char*> words) {
  for (size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_EQ(outcomes[r].code, code) << "rank " << r << ": " << outcomes[r].text;
    EXPECT_EQ(outcomes[r].text.find("rank " + std::to_string(r) + ": "), 0u) << outcomes[r].text;
    for (const char* word : words) {
      EXPECT_NE(outcomes[r].text.find(word), std::string::npos)
          << "rank " << r << ": no '" << word << "' in: " << outcomes[r].text;
    }
  }
}

/// Matches sends and receives of one (from, to, tag) in the order in which they were started.
class MessageHub {
 public:
  struct Operation {
    int from, to, tag;
    void* buffer;
    int64_t bytes;
    bool sends, synchronous;
    bool done = false;
    std::vector<std::byte> copy;  // of a send that ended before it was received
  };

  void start(Operation& operation) {
    const std::lock_guard lock(mutex_);
    Channel& channel = channels_[{operation.from, operation.to, operation.tag}];
    if (!operation.sends) {
      channel.receives.push_back(&operation);
    } else if (operation.synchronous) {
      channel.sends.push_back({&operation, {}});
    } else {
      const auto* data = static_cast<const std::byte*>(operation.buffer);
      channel.sends.push_back({nullptr, std::vector<std::byte>(data, data + operation.bytes)});
      operation.done = true;
    }
    while (!channel.sends.empty() && !channel.receives.empty()) {
      Sent& sent = channel.sends.front();
      Operation& receive = *channel.receives.front();
      const void* from = sent.operation != nullptr ? sent.operation->buffer : sent.copy.data();
      std::memcpy(receive.buffer, from, static_cast<size_t>(receive.bytes));
      if (sent.operation != nullptr) sent.operation->done = true;
      receive.done = true;
      channel.sends.pop_front();
      channel.receives.pop_front();
    }
  }

  bool take_done(Operation& operation) {
    const std::lock_guard lock(mutex_);
    return std::exchange(operation.done, false);
  }

  void take_back(Operation& operation) {
    const std::lock_guard lock(mutex_);
    Channel& channel = channels_[{operation.from, operation.to, operation.tag}];
    std::erase(channel.receives, &operation);
    std::erase_if(channel.sends, [&](const Sent& sent) { return sent.operation == &operation; });
  }

 private:
  struct Sent {
    Operation* operation;
    std::vector<std::byte> copy;
  };
  struct Channel {
    std::deque<Sent> sends;
    std::deque<Operation*> receives;
  };
  std::mutex mutex_;
  std::map<std::tuple<int, int, int>, Channel> channels_;
};

class HubMessages final : public Messages {
 public:
  HubMessages(std::shared_ptr<MessageHub> hub, int rank)
      : hub_(std::move(hub)), rank_(rank), random_(static_cast<unsigned>(rank)) {}
  ~HubMessages() override { end(); }
  bool end() noexcept override {
    for (auto& operation : operations_) hub_->take_back(*operation);
    return true;
  }
  int add_send(int peer, int tag, void* buffer, int64_t bytes, bool synchronous) override {
    return add({rank_, peer, tag, buffer, bytes, true, synchronous, false, {}});
  }
  int add_receive(int peer, int tag, void* buffer, int64_t bytes) override {
    return add({peer, rank_, tag, buffer, bytes, false, false, false, {}});
  }
  void start(int operation) override { hub_->start(*operations_[static_cast<size_t>(operation)]); }
  std::span<const int> poll() override {
    ended_.clear();
    for (size_t i = 0; i < operations_.size(); ++i) {
      // Late news now and then, as networks have it.
      if (random_() % 4 != 0 && hub_->take_done(*operations_[i])) {
        ended_.push_back(static_cast<int>(i));
      }
    }
    return ended_;
  }

 private:
  int add(MessageHub::Operation operation) {
    operations_.push_back(std::make_unique<MessageHub::Operation>(std::move(operation)));
    return static_cast<int>(operations_.size()) - 1;
  }

  std::shared_ptr<MessageHub> hub_;
  const int rank_;
  std::minstd_rand random_;
  std::vector<std::unique_ptr<MessageHub::Operation>> operations_;
  std::vector<int> ended_;
};

class HubTransport final : public MessageTransport {
 public:
  HubTransport(std::shared_ptr<MessageHub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  std::string_view name() const override { return "hub"; }
  std::unique_ptr<Messages> connect() override {
    return std::make_unique<HubMessages>(hub_, rank_);
  }
  int next_tag() const override { return next_; }
  void take_tags(int first, int count) override { next_ = std::max(next_, first + count); }

 private:
  std::shared_ptr<MessageHub> hub_;
  const int rank_;
  int next_ = 0;
};

/// threads: one process's ranks. shm: shared memory. messages: a node a rank. mixed: two nodes.
enum class Kind { threads, shm, messages, mixed };

inline std::string name_of(Kind kind) {
  return kind == Kind::threads    ? "threads"
         : kind == Kind::shm      ? "shm"
         : kind == Kind::messages ? "messages"
                                  : "mixed";
}

inline constexpr Kind kAllKinds[] = {Kind::threads, Kind::shm, Kind::messages, Kind::mixed};

/// `num_nodes` 0: as the kind has it. Whatever a rank throws while the group is made is thrown.
inline Ends make_group(Kind kind, int ranks, std::chrono::nanoseconds deadline, int num_nodes = 0) {
  if (kind == Kind::threads) return make_thread_group(ranks, deadline, std::max(1, num_nodes));
  if (num_nodes == 0) {
    num_nodes = kind == Kind::messages ? ranks : kind == Kind::mixed ? std::min(2, ranks) : 1;
  }
  const auto hub = std::make_shared<MessageHub>();
  std::barrier meet(ranks);
  std::vector<std::byte> board;
  std::mutex mutex;
  Ends ends(static_cast<size_t>(ranks));
  std::vector<std::exception_ptr> errors(ends.size());
  auto make = [&](int rank) {
    Rendezvous rendezvous;
    rendezvous.rank = rank;
    rendezvous.size = ranks;
    rendezvous.allgather = [&, rank](const void* send, void* recv, int64_t bytes) {
      {
        const std::lock_guard lock(mutex);
        board.resize(static_cast<size_t>(bytes * ranks));
        std::memcpy(board.data() + rank * bytes, send, static_cast<size_t>(bytes));
      }
      meet.arrive_and_wait();
      std::memcpy(recv, board.data(), static_cast<size_t>(bytes * ranks));
      meet.arrive_and_wait();
    };
    GroupPlan plan;
    plan.name = name_of(kind);
    plan.deadline = deadline;
    plan.node = share_of_nodes(rank, ranks, num_nodes);
    if (kind != Kind::shm) plan.transport = std::make_shared<HubTransport>(hub, rank);
    plan.transport_rank = rank;
    try {
      ends[static_cast<size_t>(rank)] = make_process_communicator(assemble_group(rendezvous, plan));
    } catch (...) {
      errors[static_cast<size_t>(rank)] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(make, r);
  for (std::thread& t : threads) t.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return ends;
}

/// Tests of the contract that every transport keeps.
class EveryGroup : public ::testing::TestWithParam<Kind> {
 protected:
  Ends make(int ranks, std::chrono::nanoseconds deadline, int num_nodes = 0) const {
    return make_group(GetParam(), ranks, deadline, num_nodes);
  }
  bool threads() const { return GetParam() == Kind::threads; }
  /// So that all ranks hear of a failure at once.
  bool shares_memory() const { return threads() || GetParam() == Kind::shm; }
};

inline std::string kind_name(const ::testing::TestParamInfo<Kind>& info) {
  return name_of(info.param);
}

}  // namespace moekit::comm::testing
