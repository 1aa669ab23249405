// Jobs of ThreadPools on the program's OpenMP threads: every share runs once, whatever the team is.
#include "base/openmp_threads.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <set>
#include <string>
#include <thread>

#include "moekit/c_api.h"

namespace moekit {
namespace {

constexpr int kThreads = 3;

/// How often each share ran, and on how many threads.
struct Seen {
  std::array<std::atomic<int>, kThreads> shares{};
  std::array<std::thread::id, kThreads> threads{};
};

void run_once(ThreadPool& pool, Seen& seen) {
  auto body = [&](int thread) {
    ++seen.shares[static_cast<size_t>(thread)];
    seen.threads[static_cast<size_t>(thread)] = std::this_thread::get_id();
  };
  pool.run(body);
}

void expect_each_once(const Seen& seen) {
  for (const auto& count : seen.shares) EXPECT_EQ(count.load(), 1);
}

class OpenMpThreads : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the thread sanitizer does not see how libgomp's threads wait for each other";
#endif
    // As `import torch` brings it.
    if (dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL) == nullptr) GTEST_SKIP() << dlerror();
    set_team_ = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    ASSERT_NE(set_team_, nullptr);
    set_team_(kThreads + 1);
    ASSERT_EQ(moekit_use_openmp(1), MOEKIT_OK) << moekit_last_error();
  }
  void TearDown() override { EXPECT_EQ(moekit_use_openmp(0), MOEKIT_OK); }

  void (*set_team_)(int) = nullptr;

  ThreadPool pool_{kThreads};
};

TEST_F(OpenMpThreads, RunEveryShareOnce) {
  std::set<std::thread::id> threads;
  for (int i = 0; i < 20; ++i) {
    Seen seen;
    run_once(pool_, seen);
    expect_each_once(seen);
    EXPECT_EQ(seen.threads[0], std::this_thread::get_id());
    threads.insert(seen.threads.begin(), seen.threads.end());
  }
  EXPECT_EQ(threads.size(), static_cast<size_t>(kThreads));  // the same team each time
  int64_t sum = 0;
  std::atomic<int64_t> total{0};
  auto add = [&](int64_t task, int) { total += task; };
  pool_.parallel_for(100, add);
  for (int64_t task = 0; task < 100; ++task) sum += task;
  EXPECT_EQ(total.load(), sum);
}

TEST_F(OpenMpThreads, AreTheCallersAlone) {
  Seen here, there;
  std::thread([&] { run_once(pool_, there); }).join();  // asked for nothing: the pool's own workers
  expect_each_once(there);
  EXPECT_EQ(moekit_use_openmp(0), MOEKIT_OK);
  run_once(pool_, here);
  expect_each_once(here);
  // Both ran on the workers of the pool.
  EXPECT_EQ(here.threads[1], there.threads[1]);
}

TEST_F(OpenMpThreads, AreLeftAloneWhereTheyAreTooFew) {
  Seen own, few;
  moekit_use_openmp(0);
  run_once(pool_, own);
  ASSERT_EQ(moekit_use_openmp(1), MOEKIT_OK);
  set_team_(kThreads - 1);
  run_once(pool_, few);
  expect_each_once(few);
  EXPECT_EQ(few.threads, own.threads);
}

TEST_F(OpenMpThreads, NestedTeamsRunAllShares) {
  // Inside of a team a further one has one thread.
  ThreadPool outer(2);
  std::array<Seen, 2> seen;
  std::array<ThreadPool, 2> pools{ThreadPool(kThreads), ThreadPool(kThreads)};
  auto body = [&](int thread) {
    const auto i = static_cast<size_t>(thread);
    ASSERT_TRUE(use_openmp_threads(true));
    run_once(pools[i], seen[i]);
    if (thread != 0) use_openmp_threads(false);
  };
  outer.run(body);
  for (const Seen& one : seen) expect_each_once(one);
}

}  // namespace
}  // namespace moekit
