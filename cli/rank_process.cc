#include "rank_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <optional>
#include <thread>

#include "moekit/error.h"

namespace moekit::cli {
namespace {

constexpr int kTimeoutStatus = 7;

struct State {
  std::optional<MpiWorld> world;
  CommunicatorHandle ranks;
  std::chrono::nanoseconds deadline{};
};
State state;

/// Ends the process when a call of MPI that knows no deadline takes longer than one.
class Watchdog {
 public:
  Watchdog(std::chrono::nanoseconds deadline, std::string what)
      : thread_([this, deadline, what = std::move(what)] {
          std::unique_lock lock(mutex_);
          if (over_.wait_for(lock, deadline, [this] { return done_; })) return;
          const std::string absent = MpiWorld::absent();
          fmt::print(stderr,
                     "moekit: timeout: {}{} did not end within {} ms: {}; its own output says why, "
                     "or raise --deadline\n",
                     with_rank(""), what,
                     std::chrono::duration_cast<std::chrono::milliseconds>(deadline).count(),
                     absent.empty() ? "a rank has not come, or has ended" : absent);
          std::fflush(nullptr);
          _exit(kTimeoutStatus);
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    over_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  bool done_ = false;
  std::thread thread_;
};

void silence_stdout() {
  std::fflush(stdout);
  const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nowhere < 0) return;
  dup2(nowhere, STDOUT_FILENO);
  close(nowhere);
}

}  // namespace

CommunicatorHandle join_ranks(int num_ranks, int num_nodes, std::chrono::nanoseconds deadline) {
  state.deadline = deadline;
  {
    const Watchdog watchdog(deadline, "MPI_Init");
    state.world = MpiWorld::start();
  }
  if (state.world->rank != 0) silence_stdout();
  if (state.world->size != num_ranks) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--ranks: expected {}, the processes that mpirun started, got {}; give "
                            "mpirun -n and --ranks the same number",
                            state.world->size, num_ranks));
  }
  ProcessOptions options;
  options.deadline = deadline;
  options.num_nodes = num_nodes;
  state.ranks = state.world->ranks(options);
  return state.ranks;
}

int own_rank() { return state.world ? state.world->rank : 0; }

std::string with_rank(const std::string& message) {
  if (!state.world || state.world->size == 1) return message;
  const std::string prefix = fmt::format("rank {}: ", state.world->rank);
  return message.starts_with(prefix) ? message : prefix + message;
}

void leave_ranks() {
  if (!state.world) return;
  state.ranks = {};
  const Watchdog watchdog(state.deadline, "MPI_Finalize");
  state.world->finish();
}

void desert_ranks(int status, const std::string& reason) {
  if (!state.world) return;
  state.ranks.abort(reason);
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace moekit::cli
