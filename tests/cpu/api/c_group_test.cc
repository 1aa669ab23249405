// Groups of the C ABI beyond threads: bootstraps, subgroups, giving up.
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "moekit/c_api.h"

namespace {

int32_t copy_to_itself(void* context, const void* send, void* recv, size_t bytes) {
  ++*static_cast<int*>(context);
  std::memcpy(recv, send, bytes);
  return 0;
}

int32_t refuse(void*, const void*, void*, size_t) { return 17; }

moekit_bootstrap alone(int* calls) {
  moekit_bootstrap bootstrap{};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.size = 1;
  bootstrap.allgather = copy_to_itself;
  bootstrap.context = calls;
  return bootstrap;
}

TEST(CGroup, ProcessesFromABootstrap) {
  int calls = 0;
  const moekit_bootstrap bootstrap = alone(&calls);
  moekit_group* group = nullptr;
  ASSERT_EQ(moekit_group_create_processes(&bootstrap, &group), MOEKIT_OK) << moekit_last_error();
  EXPECT_GT(calls, 0);
  EXPECT_EQ(moekit_group_size(group), 1);
  EXPECT_EQ(moekit_group_rank(group), 0);
  const int made_with = calls;
  moekit_group* part = nullptr;
  ASSERT_EQ(moekit_group_split(group, 0, 3, 0, &part), MOEKIT_OK) << moekit_last_error();
  EXPECT_EQ(moekit_group_size(part), 1);
  EXPECT_EQ(calls, made_with);  // the bootstrap is for the beginning only
  moekit_group_free(part);
  moekit_group_free(group);
}

TEST(CGroup, BootstrapsThatCannotBe) {
  int calls = 0;
  moekit_group* group = nullptr;
  moekit_bootstrap bootstrap = alone(&calls);
  bootstrap.allgather = refuse;
  EXPECT_EQ(moekit_group_create_processes(&bootstrap, &group), MOEKIT_COMM);
  EXPECT_NE(std::string(moekit_last_error()).find("17"), std::string::npos) << moekit_last_error();
  bootstrap = alone(&calls);
  bootstrap.allgather = nullptr;
  EXPECT_EQ(moekit_group_create_processes(&bootstrap, &group), MOEKIT_INVALID_ARGUMENT);
  bootstrap = alone(&calls);
  bootstrap.rank = 1;
  EXPECT_EQ(moekit_group_create_processes(&bootstrap, &group), MOEKIT_INVALID_ARGUMENT);
  bootstrap = alone(&calls);
  bootstrap.struct_size = 0;
  EXPECT_EQ(moekit_group_create_processes(&bootstrap, &group), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_group_create_processes(nullptr, &group), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(moekit_group_create_mpi(nullptr, 0, 0, &group), MOEKIT_INVALID_ARGUMENT);
  EXPECT_EQ(group, nullptr);
}

TEST(CGroup, ThreadsSplitAndGiveUp) {
  moekit_group* group = nullptr;
  ASSERT_EQ(moekit_group_create(3, 0, 1, &group), MOEKIT_OK);
  EXPECT_EQ(moekit_group_rank(group), -1);
  std::vector<moekit_group*> parts(3, nullptr);
  std::vector<moekit_status> splits(3), after(3);
  std::barrier meet(3);  // a failure reaches who is still inside the split
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      // Ranks 2 and 0 in that order; rank 1 in none.
      splits[static_cast<size_t>(r)] =
          moekit_group_split(group, r, r == 1 ? -1 : 0, -r, &parts[static_cast<size_t>(r)]);
      meet.arrive_and_wait();
      if (r == 1) moekit_group_abort(group, r, "nothing to do");
      moekit_group* none = nullptr;
      after[static_cast<size_t>(r)] = moekit_group_split(group, r, 0, 0, &none);
      moekit_group_free(none);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(splits, (std::vector<moekit_status>(3, MOEKIT_OK)));
  EXPECT_EQ(after, (std::vector<moekit_status>(3, MOEKIT_COMM)));
  EXPECT_EQ(parts[1], nullptr);
  EXPECT_EQ(moekit_group_rank(parts[0]), 1);
  EXPECT_EQ(moekit_group_rank(parts[2]), 0);
  EXPECT_EQ(moekit_group_split(group, 3, 0, 0, &parts[1]), MOEKIT_INVALID_ARGUMENT);
  for (moekit_group* part : parts) moekit_group_free(part);
  moekit_group_free(group);
}

}  // namespace
