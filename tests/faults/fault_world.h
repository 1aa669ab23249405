// Whole layers over ranks of which one goes wrong. Every rank and call has rows of its own, and
// what comes out is compared with the same layer on one rank: a row that went astray would show.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "faults/faulty_communicator.h"
#include "moekit/error.h"
#include "moekit/plan.h"

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

struct Outcome {
  std::vector<RankOutcome> ranks;
  bool fired = false;
  std::vector<std::string> operations;  ///< of the faulty rank in its step
};

/// Runs the world to its end, on threads or in processes forked for it; all outputs, of failed
/// calls too, have been compared, and a wrong row is a failure of the test.
Outcome run_world(const World& world);

/// The members whose rows cross ranks.
std::vector<std::string> members();

}  // namespace moekit::faults
