// ThreadPool: every task once, whichever workers come in time.
#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <chrono>
#include <numeric>

namespace moekit {
namespace {

/// Runs `rounds` jobs of `tasks` tasks, with pauses of pause(round), and checks every task's
/// effect.
template <typename Pause>
void run_rounds(int threads, int rounds, int64_t tasks, Pause pause) {
  ThreadPool pool(threads);
  std::vector<int> count(static_cast<size_t>(tasks));  // not atomic: tasks own their element
  for (int round = 1; round <= rounds; ++round) {
    auto body = [&](int64_t task, int thread) {
      EXPECT_LT(thread, threads);
      ++count[static_cast<size_t>(task)];
    };
    pool.parallel_for(tasks, body);
    ASSERT_EQ(std::accumulate(count.begin(), count.end(), int64_t{0}), round * tasks);
    pause(round);
  }
  for (const int n : count) EXPECT_EQ(n, rounds);
}

TEST(ThreadPool, RunsEveryTaskOnceInJobsWithoutPause) {
  for (const int threads : {1, 2, 5}) run_rounds(threads, 2000, 7, [](int) {});
}

/// Workers sleep between these jobs and come too late for many of them.
TEST(ThreadPool, RunsEveryTaskOnceWhenWorkersSleep) {
  for (const int threads : {2, 5}) {
    run_rounds(threads, 200, 2, [](int round) {
      std::this_thread::sleep_for(std::chrono::microseconds(round * 3));
    });
  }
}

/// A job that lasts until all have joined shows that workers come at all, after sleep too.
TEST(ThreadPool, WorkersJoinJobsThatLast) {
  ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> seen{0};
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    auto body = [&](int thread) {
      seen.fetch_or(1 << thread);
      while (seen.load() != 7 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
    };
    pool.run_awake(body);
    EXPECT_EQ(seen.load(), 7);
    if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

/// run() waits for every thread, however short the job and however deep they sleep.
TEST(ThreadPool, RunReachesEveryThread) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    std::vector<int> ran(static_cast<size_t>(threads));  // not atomic: threads own their element
    for (int round = 1; round <= 100; ++round) {
      auto body = [&](int thread) { ++ran[static_cast<size_t>(thread)]; };
      pool.run(body);
      EXPECT_EQ(ran, std::vector<int>(static_cast<size_t>(threads), round));
      auto task = [](int64_t, int) {};
      pool.parallel_for(3, task);
      if (round % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

}  // namespace
}  // namespace moekit
