// Several calls in flight on one layer from one thread a rank: every order of their steps gives the
// bits of one call after the other, and orders that differ between ranks end in an error that names
// both.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <optional>
#include <thread>
#include <tuple>

#include "engine/synthetic.h"
#include "moekit/error.h"
#include "moekit/layer.h"
#include "prepare/prepare_finalize.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

constexpr const char* kSpec = "E=6,k=3,H=32,I=16,weights=f32,activations=f32,tokens=4,shared_I=16";
constexpr int kSteps = 3;  // dispatch, experts, combine

/// Rows of one rank in one microbatch, unlike all others.
struct Microbatch {
  int64_t tokens, hidden;
  std::vector<float> rows, output;

  Microbatch(const Layer& layer, int rank, int number)
      : tokens((rank * 5 + number * 3 + 2) % 9), hidden(layer.config().hidden) {
    rows = engine::make_hidden(tokens, hidden, static_cast<uint64_t>(1000 * (number + 1) + rank));
    forget();
  }
  void forget() { output.assign(static_cast<size_t>(tokens * hidden + 1), NAN); }
  LayerArgs args() {
    LayerArgs a;
    a.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, hidden});
    a.output = TensorView::contiguous(output.data(), DType::f32, {tokens, hidden});
    return a;
  }
};

/// All orders of the steps of `count` calls; every entry is the call whose next step runs.
std::vector<std::vector<int>> interleavings(int count) {
  std::vector<std::vector<int>> all;
  std::vector<int> order, left(static_cast<size_t>(count), kSteps);
  const std::function<void()> extend = [&] {
    if (order.size() == static_cast<size_t>(count * kSteps)) all.push_back(order);
    for (int i = 0; i < count; ++i) {
      if (left[static_cast<size_t>(i)] == 0) continue;
      --left[static_cast<size_t>(i)];
      order.push_back(i);
      extend();
      order.pop_back();
      ++left[static_cast<size_t>(i)];
    }
  };
  extend();
  return all;
}

/// Calls of one rank, each with a workspace of its own.
class InFlight {
 public:
  InFlight(const Layer& layer, int rank, int count) : layer_(layer), pending_(count) {
    for (int i = 0; i < count; ++i) {
      batches_.emplace_back(layer, rank, i);
      workspaces_.push_back(layer.make_workspace());
    }
  }
  Microbatch& batch(int i) { return batches_[static_cast<size_t>(i)]; }
  void step(int i) {
    std::optional<PendingCall>& call = pending_[static_cast<size_t>(i)];
    int& done = done_[i];
    if (done == 0) {
      call.emplace(layer_.dispatch(batch(i).args(), nullptr, workspaces_[i].get()));
    } else if (done == 1) {
      call->experts();
    } else {
      call->combine();
      call.reset();
    }
    done = (done + 1) % kSteps;
  }

 private:
  const Layer& layer_;
  std::vector<Microbatch> batches_;
  std::vector<std::unique_ptr<Workspace>> workspaces_;
  std::vector<std::optional<PendingCall>> pending_;
  int done_[4] = {};
};

struct Ending {
  ErrorCode code = ErrorCode::ok;
  std::string text;
};

class Overlap : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  int ranks() const { return std::get<1>(GetParam()); }

  /// body(layer, rank) on a thread a rank, over a new group.
  std::vector<Ending> on_ranks(std::chrono::nanoseconds deadline,
                               const std::function<void(const Layer&, int)>& body) const {
    static const LayerSource source = make_layer(kSpec);
    auto ends = make_thread_ranks(ranks(), deadline);
    std::vector<Ending> endings(ends.size());
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks(); ++r) {
      threads.emplace_back([&, r] {
        try {
          PlanOptions options = options_for("", 1);
          options.prepare = std::get<0>(GetParam());
          options.max_tokens = 8;
          options.comm = ends[static_cast<size_t>(r)];
          body(Layer::from_canonical(source.canonical, options), r);
        } catch (const Error& e) {
          endings[static_cast<size_t>(r)] = {e.code(), e.what()};
        }
      });
    }
    for (std::thread& t : threads) t.join();
    return endings;
  }

  void expect_bits(int count, const std::vector<std::vector<int>>& orders) const {
    const auto endings = on_ranks(std::chrono::seconds(60), [&](const Layer& layer, int rank) {
      InFlight calls(layer, rank, count);
      std::vector<std::vector<float>> alone;
      for (int i = 0; i < count; ++i) {
        layer.run(calls.batch(i).args());
        alone.push_back(calls.batch(i).output);
      }
      for (const std::vector<int>& order : orders) {
        for (int i = 0; i < count; ++i) calls.batch(i).forget();
        for (const int i : order) calls.step(i);
        for (int i = 0; i < count; ++i) {
          const Microbatch& batch = calls.batch(i);
          ASSERT_TRUE(std::equal(batch.output.begin(), batch.output.end() - 1,
                                 alone[static_cast<size_t>(i)].begin()))
              << "rank " << rank << ", microbatch " << i << " of " << testing::PrintToString(order);
        }
      }
    });
    for (const Ending& ending : endings) EXPECT_EQ(ending.code, ErrorCode::ok) << ending.text;
  }

  void expect_named(const std::vector<Ending>& endings) const {
    for (const Ending& ending : endings) {
      EXPECT_TRUE(ending.code == ErrorCode::timeout || ending.code == ErrorCode::comm)
          << to_string(ending.code) << ": " << ending.text;
      for (const char* word : {"rank 1", "layer 0", "call 0", "call 1", "phase "}) {
        EXPECT_NE(ending.text.find(word), std::string::npos)
            << "no '" << word << "' in: " << ending.text;
      }
    }
  }
};

TEST_P(Overlap, TwoCallsInEveryOrderOfTheirSteps) { expect_bits(2, interleavings(2)); }

TEST_P(Overlap, ThreeCallsInManyOrdersOfTheirSteps) {
  const auto all = interleavings(3);
  ASSERT_EQ(all.size(), 1680u);
  std::vector<std::vector<int>> some;
  for (size_t i = 0; i < all.size(); i += 13) some.push_back(all[i]);
  expect_bits(3, some);
}

TEST_P(Overlap, WorkspacesInAnotherOrderOnOneRank) {
  // Calls are matched by their order; where workspaces hold heaps, those must match as well.
  std::atomic<bool> heaps{false};
  const auto endings = on_ranks(std::chrono::seconds(60), [&](const Layer& layer, int rank) {
    if (layer.explanation().plan.heap_bytes > 0) heaps = true;
    Microbatch first(layer, rank, 0), second(layer, rank, 1), expected(layer, rank, 0);
    layer.run(expected.args());
    auto a = layer.make_workspace(), b = layer.make_workspace();
    if (rank == 1) std::swap(a, b);
    for (int round = 0; round < 3; ++round) {
      first.forget();
      PendingCall x = layer.dispatch(first.args(), nullptr, a.get());
      PendingCall y = layer.dispatch(second.args(), nullptr, b.get());
      x.wait();
      y.wait();
      std::swap(a, b);
      EXPECT_TRUE(
          std::equal(first.output.begin(), first.output.end() - 1, expected.output.begin()));
    }
  });
  for (const Ending& ending : endings) {
    if (!heaps) {
      EXPECT_EQ(ending.code, ErrorCode::ok) << ending.text;
    } else {
      EXPECT_EQ(ending.code, ErrorCode::comm) << ending.text;
      EXPECT_NE(ending.text.find("ranks disagree about the step"), std::string::npos)
          << ending.text;
    }
  }
}

TEST_P(Overlap, StepsInAnotherOrderOnOneRank) {
  // Steps of calls 0 and 1 on the other ranks, and on rank 1.
  const std::vector<std::pair<std::vector<int>, std::vector<int>>> orders = {
      {{0, 1, 0, 1, 0, 1}, {0, 1, 1, 0, 0, 1}},  // experts of call 1 first
      {{0, 1, 0, 1, 0, 1}, {0, 0, 1, 0, 1, 1}},  // dispatch of call 1 later
  };
  for (const auto& order : orders) {
    std::atomic<bool> heaps{false};
    const auto endings =
        on_ranks(std::chrono::milliseconds(300), [&](const Layer& layer, int rank) {
          if (layer.explanation().plan.heap_bytes > 0) heaps = true;
          InFlight calls(layer, rank, 2);
          for (const int i : rank == 1 ? order.second : order.first) calls.step(i);
          for (int i = 0; i < 2; ++i) {
            const std::vector<float> mine = calls.batch(i).output;
            layer.run(calls.batch(i).args());
            EXPECT_TRUE(std::equal(mine.begin(), mine.end() - 1, calls.batch(i).output.begin()))
                << "rank " << rank << ", microbatch " << i;
          }
        });
    if (!heaps) {
      expect_named(endings);
      continue;
    }
    // Every workspace's heap has its own flags: rows find their call in any order of steps.
    for (const Ending& ending : endings) EXPECT_EQ(ending.code, ErrorCode::ok) << ending.text;
  }
}

TEST_P(Overlap, LayersInAnotherOrderOnOneRankAreNamed) {
  static const LayerSource source = make_layer(kSpec);
  auto ends = make_thread_ranks(ranks(), std::chrono::milliseconds(300));
  std::vector<Ending> endings(ends.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks(); ++r) {
    threads.emplace_back([&, r] {
      try {
        PlanOptions options = options_for("", 1);
        options.prepare = std::get<0>(GetParam());
        options.max_tokens = 8;
        options.comm = ends[static_cast<size_t>(r)];
        const Layer first = Layer::from_canonical(source.canonical, options);
        const Layer second = Layer::from_canonical(source.canonical, options);
        Microbatch batch(first, r, 0);
        (r == 1 ? second : first).run(batch.args());
      } catch (const Error& e) {
        endings[static_cast<size_t>(r)] = {e.code(), e.what()};
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const Ending& ending : endings) {
    EXPECT_TRUE(ending.code == ErrorCode::timeout || ending.code == ErrorCode::comm) << ending.text;
    EXPECT_NE(ending.text.find("rank 1"), std::string::npos) << ending.text;
    EXPECT_NE(ending.text.find("layer 0, call 0"), std::string::npos) << ending.text;
    EXPECT_NE(ending.text.find("layer 1, call 0"), std::string::npos) << ending.text;
  }
}

TEST_P(Overlap, ABusyWorkspaceIsRefusedToItsOwnThread) {
  const auto endings = on_ranks(std::chrono::seconds(60), [&](const Layer& layer, int rank) {
    Microbatch first(layer, rank, 0), second(layer, rank, 1);
    PendingCall pending = layer.dispatch(first.args());
    try {
      layer.run(second.args());
      ADD_FAILURE() << "one workspace took two calls";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::invalid_argument) << e.what();
      EXPECT_NE(std::string(e.what()).find("call in flight"), std::string::npos) << e.what();
    }
    pending.wait();
    layer.run(second.args());
  });
  for (const Ending& ending : endings) EXPECT_EQ(ending.code, ErrorCode::ok) << ending.text;
}

TEST_P(Overlap, ACallThatIsDroppedHalfWayEndsThePeersCalls) {
  for (const int steps : {1, 2}) {
    const auto endings = on_ranks(std::chrono::seconds(60), [&](const Layer& layer, int rank) {
      Microbatch batch(layer, rank, 0);
      PendingCall pending = layer.dispatch(batch.args());
      if (rank == 1 && steps == 1) return;
      pending.experts();
      if (rank == 1) return;
      pending.combine();
      layer.run(batch.args());
    });
    for (int r = 0; r < ranks(); ++r) {
      if (r == 1) continue;
      const Ending& ending = endings[static_cast<size_t>(r)];
      EXPECT_EQ(ending.code, ErrorCode::comm) << ending.text;
      EXPECT_NE(ending.text.find("rank 1 gave up: a call was dropped between its steps"),
                std::string::npos)
          << ending.text;
    }
  }
}

std::vector<std::string> members() {
  std::vector<std::string> names;
  for (const prepare::PrepareFinalize* member : prepare::registry()) {
    const std::string name(member->name());
    if (name.rfind("local", 0) != 0) names.push_back(name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Members, Overlap,
                         testing::Combine(testing::ValuesIn(members()), testing::Values(2, 3, 4)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace moekit::test
