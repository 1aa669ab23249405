#include "faults/fault_world.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <thread>
#include <utility>

#include "engine/synthetic.h"
#include "faults/shared_page.h"
#include "moekit/layer.h"
#include "prepare/prepare_finalize.h"
#include "support/run_layer.h"

namespace moekit::faults {
namespace {

constexpr const char* kSpec = "E=6,k=3,H=32,I=16,weights=f32,activations=f32,tokens=4,shared_I=16";
constexpr int64_t kMaxTokens = 8;

const LayerSource& source() {
  static const LayerSource layer = test::make_layer(kSpec);
  return layer;
}

PlanOptions options_of(const std::string& prepare) {
  PlanOptions options = test::options_for("", 1);
  options.prepare = prepare;
  options.max_tokens = kMaxTokens;
  return options;
}

/// Rows of one rank in one call: like no other rank's or call's.
struct Batch {
  int64_t tokens = 0;
  int64_t hidden = 0;
  std::vector<float> rows, output;

  Batch(int rank, int64_t call) {
    hidden = source().config.hidden;
    tokens = (rank * 5 + call * 3 + 2) % (kMaxTokens + 1);
    rows = engine::make_hidden(tokens, hidden, static_cast<uint64_t>(1000 * (call + 1) + rank));
    output.assign(static_cast<size_t>(tokens * hidden + 1),
                  std::numeric_limits<float>::quiet_NaN());
  }
  LayerArgs args() {
    LayerArgs a;
    a.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, hidden});
    a.output = TensorView::contiguous(output.data(), DType::f32, {tokens, hidden});
    return a;
  }
};

/// The same rows through the layer on one rank, for every rank and call. Made before ranks start:
/// processes inherit it.
using Expected = std::map<std::pair<int, int64_t>, std::vector<float>>;

const Expected& expected_outputs(int ranks, int64_t calls) {
  static const Layer alone = Layer::from_canonical(source().canonical, options_of(""));
  static Expected all;
  for (int rank = 0; rank < ranks; ++rank) {
    for (int64_t call = 0; call < calls; ++call) {
      if (all.count({rank, call}) > 0) continue;
      Batch batch(rank, call);
      alone.run(batch.args());
      all[{rank, call}] = batch.output;
    }
  }
  return all;
}

class RankRun {
 public:
  RankRun(const World& world, Script& script, Meeting& meeting, const Expected& expected, int rank)
      : world_(world), script_(script), meeting_(meeting), expected_(expected), rank_(rank) {}

  template <typename MakeEnd>
  RankOutcome run(const MakeEnd& make_end) {
    try {
      run_calls(make_end());
    } catch (const Left&) {
      outcome_.gone = true;
    } catch (const Error& error) {
      outcome_.code = error.code();
      outcome_.error = error.what();
    } catch (const std::exception& error) {
      outcome_.code = ErrorCode::internal;
      outcome_.error = error.what();
    }
    meeting_.leave();
    return outcome_;
  }

 private:
  bool faulty() const { return rank_ == world_.fault.rank; }

  void run_calls(std::shared_ptr<comm::Communicator> end) {
    PlanOptions options = options_of(world_.prepare);
    options.comm = {script_.wrap(std::move(end))};
    if (world_.another_plan && faulty()) options.combine_dtype = DType::bf16;
    meeting_.arrive_and_wait();  // all ranks are there
    const Layer layer = Layer::from_canonical(source().canonical, options);
    for (int64_t call = 0; call < world_.calls; ++call) {
      const auto& left_out = world_.left_out;
      if (faulty() && std::count(left_out.begin(), left_out.end(), call) > 0) continue;
      Batch batch(rank_, call);
      try {
        run_call(layer, batch, call);
      } catch (...) {
        compare_rows(batch, call, true);
        throw;
      }
      compare_rows(batch, call, false);
      ++outcome_.finished;
    }
  }

  void run_call(const Layer& layer, Batch& batch, int64_t call) {
    enter(call, 0);
    PendingCall pending = layer.dispatch(batch.args());
    enter(call, 1);
    pending.experts();
    enter(call, 2);
    pending.combine();
  }

  /// All ranks come to a step together until the fault has happened, so that a busy machine is not
  /// taken for a fault elsewhere.
  void enter(int64_t call, int step) {
    if (world_.left_out.empty() && script_.ahead(call, step)) meeting_.arrive_and_wait();
    script_.enter(rank_, call, step);
  }

  /// Every row is right; after an error a row may also be untouched.
  void compare_rows(const Batch& batch, int64_t call, bool failed) {
    const float* expected = expected_.at({rank_, call}).data();
    for (int64_t t = 0; t < batch.tokens; ++t) {
      const float* row = batch.output.data() + t * batch.hidden;
      const bool right = std::equal(row, row + batch.hidden, expected + t * batch.hidden);
      const bool untouched =
          std::all_of(row, row + batch.hidden, [](float x) { return std::isnan(x); });
      if (right || (failed && untouched) || !outcome_.wrong_row.empty()) continue;
      outcome_.wrong_row = "rank " + std::to_string(rank_) + ", call " + std::to_string(call) +
                           ", token " + std::to_string(t) + " got another row";
    }
  }

  const World& world_;
  Script& script_;
  Meeting& meeting_;
  const Expected& expected_;
  const int rank_;
  RankOutcome outcome_;
};

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
  const Expected& expected = expected_outputs(world.ranks, world.calls);
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
