// Marks of the processes of one launch, in a folder of the test.
#include "comm/roll_call.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

namespace moekit::comm {
namespace {

class RollCallTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "/moekit_roll_call_" + std::to_string(getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<RollCall> rank(int rank, int size, int local_size,
                                 const char* job = "job") const {
    return std::make_unique<RollCall>(Launch{folder_, job, rank, size, local_size});
  }

  std::string folder_;
};

TEST_F(RollCallTest, NamesWhoHasNotCome) {
  const auto first = rank(0, 3, 3), second = rank(1, 3, 3), third = rank(2, 3, 3);
  first->come();
  EXPECT_EQ(first->describe(),
            "rank 0 expected 3 ranks, seen 1: rank 1 has not come, rank 2 has not come");
  third->come();
  EXPECT_EQ(first->describe(), "rank 0 expected 3 ranks, seen 2: rank 1 has not come");
  second->come();
  EXPECT_EQ(first->describe(), "rank 0 expected 3 ranks, seen 3");
  first->come();
  second->come();
  EXPECT_EQ(second->describe(), "rank 1 expected 3 ranks, seen 2: rank 2 has not come");
}

TEST_F(RollCallTest, NamesWhoHasEnded) {
  const auto first = rank(0, 2, 2);
  first->come();
  const pid_t child = fork();
  if (child == 0) {
    rank(1, 2, 2)->come();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(first->describe(), "rank 0 expected 2 ranks, seen 1: rank 1 has ended (process " +
                                   std::to_string(child) + ")");
}

TEST_F(RollCallTest, KnowsNothingOfOtherHostsAndLaunches) {
  const auto first = rank(0, 4, 2), other = rank(1, 4, 2, "another");
  first->come();
  other->come();
  EXPECT_EQ(first->describe(), "rank 0 expected 2 ranks of this host, seen 1");
  rank(3, 4, 2)->come();
  EXPECT_EQ(first->describe(), "rank 0 expected 2 ranks of this host, seen 2");
  RollCall alone(Launch{});
  alone.come();
  EXPECT_EQ(alone.describe(), "");
}

TEST_F(RollCallTest, AMarkThatSaysNothingIsNone) {
  const auto first = rank(0, 2, 2);
  first->come();
  std::filesystem::create_directory(folder_ + "/moekit.job.1");
  EXPECT_EQ(first->describe(), "rank 0 expected 2 ranks, seen 1: rank 1 has not come");
  rank(1, 2, 2)->come();  // can't be written: no error
  EXPECT_EQ(first->describe(), "rank 0 expected 2 ranks, seen 1: rank 1 has not come");
}

}  // namespace
}  // namespace moekit::comm
