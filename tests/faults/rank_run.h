// What one rank of a world does: it makes the layer and its calls, and compares every output with
// the same layer on one rank. The rank may be a thread, a forked process or one under mpirun.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "faults/faulty_communicator.h"
#include "faults/shared_page.h"
#include "moekit/error.h"

namespace moekit::faults {

/// Long enough for a busy machine to bring all ranks to a step; every fault that is noticed by
/// waiting costs as much.
#if defined(__SANITIZE_THREAD__)
inline constexpr std::chrono::milliseconds kDeadline{600};
#else
inline constexpr std::chrono::milliseconds kDeadline{300};
#endif

enum class Transport { threads, processes };

struct World {
  std::string prepare;
  Transport transport = Transport::threads;
  int ranks = 2;
  int64_t calls = 3;
  Fault fault;
  std::chrono::nanoseconds deadline = kDeadline;
  /// Ranks come to every step of a call together until the fault has happened, so that a busy
  /// machine is not taken for a fault elsewhere. Not where rows are messages, which their receiver
  /// takes inside its own steps only.
  bool meets_at_steps = true;
  /// Calls that the faulty rank leaves out; ranks then do not wait for each other.
  std::vector<int64_t> left_out;
  /// The faulty rank plans for results of another type.
  bool another_plan = false;
};

struct RankOutcome {
  bool gone = false;     ///< it left or died, as its script says
  int64_t finished = 0;  ///< calls whose output is there
  ErrorCode code = ErrorCode::ok;
  std::string error;
  std::string wrong_row;  ///< the first token that got another row than its own
};

/// Rows of every (rank, call) through the layer on one rank.
using Expected = std::map<std::pair<int, int64_t>, std::vector<float>>;

class RankRun {
 public:
  using MakeEnd = std::function<std::shared_ptr<comm::Communicator>()>;
  /// Kept for the life of the process. Processes that are forked later inherit it.
  static const Expected& expected_outputs(int ranks, int64_t calls);

  /// Everything has to outlive the run.
  RankRun(const World& world, Script& script, Meeting& meeting, const Expected& expected, int rank)
      : world_(world), script_(script), meeting_(meeting), expected_(expected), rank_(rank) {}

  /// Never throws; errors are part of the outcome.
  RankOutcome run(const MakeEnd& make_end);

 private:
  struct Batch;
  bool faulty() const { return rank_ == world_.fault.rank; }
  void run_calls(std::shared_ptr<comm::Communicator> end);
  void enter(int64_t call, int step);
  void compare_rows(const Batch& batch, int64_t call, bool failed);

  const World& world_;
  Script& script_;
  Meeting& meeting_;
  const Expected& expected_;
  const int rank_;
  RankOutcome outcome_;
};

}  // namespace moekit::faults
