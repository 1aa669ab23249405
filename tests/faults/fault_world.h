// Whole layers over ranks of which one goes wrong. Every rank and call has rows of its own, and
// what comes out is compared with the same layer on one rank: a row that went astray would show.
#pragma once

#include <string>
#include <vector>

#include "faults/rank_run.h"

namespace moekit::faults {

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
