#include "faults/fault_world.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <utility>

#include "faults/shared_page.h"
#include "moekit/communicator.h"
#include "prepare/prepare_finalize.h"

namespace moekit::faults {
namespace {

std::vector<RankOutcome> run_threads(const World& world, Script& script, const Expected& expected) {
  Meeting meeting(world.ranks);
  auto ends = comm::make_thread_group(world.ranks, world.deadline);
  std::vector<RankOutcome> outcomes(ends.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ends.size(); ++r) {
    threads.emplace_back([&, r] {
      RankRun rank(world, script, meeting, expected, static_cast<int>(r));
      outcomes[r] = rank.run([&] { return std::move(ends[r]); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

constexpr int kMaxRanks = 4;

/// What processes leave behind: a board for the bootstrap, and their outcomes.
struct Page {
  struct Outcome {
    bool told, gone;
    int64_t finished;
    ErrorCode code;
    char error[2000];
    char wrong_row[200];
  };
  std::byte board[kMaxRanks * 4096];
  Outcome outcomes[kMaxRanks];
};

class RankProcesses {
 public:
  RankProcesses(const World& world, Script& script, const Expected& expected)
      : world_(world), script_(script), expected_(expected), meeting_(world.ranks) {}

  std::vector<RankOutcome> run() {
    std::vector<pid_t> children;
    for (int rank = 0; rank < world_.ranks; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        tell(page_->outcomes[rank], RankRun(world_, script_, meeting_, expected_, rank).run([&] {
          return make_end(rank);
        }));
        _exit(0);
      }
      if (child < 0) throw std::runtime_error("no process for a rank");
      children.push_back(child);
    }
    std::vector<RankOutcome> outcomes;
    for (size_t r = 0; r < children.size(); ++r) {
      int status = 0;
      waitpid(children[r], &status, 0);
      outcomes.push_back(heard(static_cast<int>(r), status));
    }
    return outcomes;
  }

 private:
  std::shared_ptr<comm::Communicator> make_end(int rank) {
    Bootstrap bootstrap;
    bootstrap.rank = rank;
    bootstrap.size = world_.ranks;
    bootstrap.allgather = [&](const void* send, void* recv, int64_t bytes) {
      std::memcpy(page_->board + rank * bytes, send, static_cast<size_t>(bytes));
      meeting_.arrive_and_wait();
      std::memcpy(recv, page_->board, static_cast<size_t>(bytes * world_.ranks));
      meeting_.arrive_and_wait();
    };
    return make_process_ranks(bootstrap, {world_.deadline, 0}).impl;
  }

  static void tell(Page::Outcome& to, const RankOutcome& outcome) {
    to.gone = outcome.gone;
    to.finished = outcome.finished;
    to.code = outcome.code;
    std::strncpy(to.error, outcome.error.c_str(), sizeof(to.error) - 1);
    std::strncpy(to.wrong_row, outcome.wrong_row.c_str(), sizeof(to.wrong_row) - 1);
    to.told = true;
  }

  /// A process that was killed as the script says has died; any other end without a word is an
  /// error that no test expects.
  RankOutcome heard(int rank, int status) const {
    const Page::Outcome& from = page_->outcomes[rank];
    RankOutcome outcome;
    if (from.told) {
      outcome.gone = from.gone;
      outcome.finished = from.finished;
      outcome.code = from.code;
      outcome.error = from.error;
      outcome.wrong_row = from.wrong_row;
      return outcome;
    }
    outcome.gone = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL &&
                   world_.fault.kind == Kind::dies && rank == world_.fault.rank;
    if (!outcome.gone) {
      outcome.code = ErrorCode::internal;
      outcome.error = "the process ended with status " + std::to_string(status);
    }
    return outcome;
  }

  const World& world_;
  Script& script_;
  const Expected& expected_;
  Meeting meeting_;
  Shared<Page> page_;
};

}  // namespace

Outcome run_world(const World& world) {
  const bool processes = world.transport == Transport::processes;
  const Expected& expected = RankRun::expected_outputs(world.ranks, world.calls);
  Script script(world.fault, world.ranks);
  Outcome outcome;
  outcome.ranks = processes ? RankProcesses(world, script, expected).run()
                            : run_threads(world, script, expected);
  for (const RankOutcome& rank : outcome.ranks) EXPECT_EQ(rank.wrong_row, "");
  outcome.fired = script.fired();
  outcome.operations = script.operations();
  return outcome;
}

std::vector<std::string> members() {
  std::vector<std::string> names;
  for (const prepare::PrepareFinalize* member : prepare::registry()) {
    const std::string name(member->name());
    if (name.rfind("local", 0) != 0) names.push_back(name);
  }
  return names;
}

}  // namespace moekit::faults
