// One rank under mpirun of which one goes wrong; tests/python/test_mpi_faults.py starts it.
//
//   mpirun -n R mpi_rank FOLDER NODES WORLD...
//
// Ranks lie on NODES nodes (0: their hosts). A WORLD is a list such as
// prepare=push,kind=stalls,step=1; the next one gets a group of its own over the same processes.
// Files in FOLDER, which all ranks see, take the place of the memory that forked ranks share. Each
// rank writes a line of JSON for each world to FOLDER/outcome<rank> and ends with the status that
// the moekit program has for the error of the last one.
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "faults/rank_run.h"
#include "moekit/communicator.h"

namespace moekit::faults {
namespace {

constexpr std::array<std::pair<const char*, Kind>, 14> kKinds{{
    {"none", Kind::none},
    {"leaves", Kind::leaves},
    {"dies", Kind::dies},
    {"stalls", Kind::stalls},
    {"late", Kind::late},
    {"sends_more", Kind::sends_more},
    {"sends_less", Kind::sends_less},
    {"expects_more", Kind::expects_more},
    {"expects_less", Kind::expects_less},
    {"promises_more", Kind::promises_more},
    {"promises_less", Kind::promises_less},
    {"promises_absurd", Kind::promises_absurd},
    {"flag_behind", Kind::flag_behind},
    {"flag_ahead", Kind::flag_ahead},
}};

Kind kind_of(const std::string& name) {
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
  }
  throw std::invalid_argument("no fault is called " + name);
}

World parse_world(const std::string& text, int ranks) {
  World world;
  world.ranks = ranks;
  world.fault.operation = kFirstThatFits;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t at = word.find('=');
    const std::string key = word.substr(0, at), value = word.substr(at + 1);
    if (key == "prepare") {
      world.prepare = value;
    } else if (key == "kind") {
      world.fault.kind = kind_of(value);
    } else if (key == "step") {
      world.fault.step = std::stoi(value);
    } else if (key == "deadline_ms") {
      world.deadline = std::chrono::milliseconds(std::stoi(value));
    } else if (key == "left_out") {
      world.left_out = {std::stoi(value)};
    } else if (key == "another_plan") {
      world.another_plan = value == "1";
    } else {
      throw std::invalid_argument("a world has no " + key);
    }
  }
  return world;
}

int status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::ok: return 0;
    case ErrorCode::invalid_argument: return 2;
    case ErrorCode::comm: return 6;
    case ErrorCode::timeout: return 7;
    default: return 70;
  }
}

nlohmann::json to_json(const RankOutcome& outcome, const Script& script) {
  return {
      {"gone", outcome.gone},   {"finished", outcome.finished},   {"code", to_string(outcome.code)},
      {"error", outcome.error}, {"wrong_row", outcome.wrong_row}, {"fired", script.fired()}};
}

int run(const std::string& folder, int nodes, const std::vector<std::string>& worlds) {
  const MpiWorld mpi = MpiWorld::start();
  const std::string rank = std::to_string(mpi.rank);
  std::ofstream outcomes(folder + "/outcome" + rank);
  bool all_well = true;
  ErrorCode code = ErrorCode::ok;
  for (size_t w = 0; w < worlds.size(); ++w) {
    World world = parse_world(worlds[w], mpi.size);
    world.meets_at_steps = nodes == 1;
    const std::string file = folder + "/world" + std::to_string(w);
    Script script(world.fault, world.ranks, file + ".script");
    Meeting meeting(world.ranks, file + ".meeting");
    const Expected& expected = RankRun::expected_outputs(world.ranks, world.calls);
    RankRun one(world, script, meeting, expected, mpi.rank);
    const RankOutcome outcome = one.run([&] {
      meeting.arrive_and_wait();
      return mpi.ranks({world.deadline, nodes}).impl;
    });
    code = outcome.code;
    all_well = all_well && !outcome.gone && code == ErrorCode::ok;
    outcomes << to_json(outcome, script).dump() << std::endl;
  }
  if (all_well) {
    mpi.finish();
    return 0;
  }
  // MPI_Finalize would wait for ranks that are gone.
  outcomes.close();
  std::fflush(nullptr);
  _exit(status_of(code));
}

}  // namespace
}  // namespace moekit::faults

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "mpi_rank FOLDER NODES WORLD...\n");
    return 2;
  }
  try {
    return moekit::faults::run(argv[1], std::stoi(argv[2]), {argv + 3, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mpi_rank: %s\n", error.what());
    std::fflush(nullptr);
    _exit(70);
  }
}
