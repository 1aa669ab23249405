// Symmetric heaps: what a signal publishes, waits that end, ranks that disagree or fail.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/symmetric_heap.h"
#include "groups.h"
#include "moekit/error.h"

namespace moekit::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using testing::expect_no_error;
using testing::on_ranks;
using testing::Outcome;

int64_t stress_rounds() {
  const char* text = std::getenv("MOEKIT_STRESS_ROUNDS");
  return text != nullptr ? std::atoll(text) : 2000;
}

TEST(Heap, BeginsZeroedAndAligned) {
  auto ends = make_thread_group(3, seconds(30));
  expect_no_error(on_ranks(ends, [](Communicator& end) {
    auto heap = end.make_heap(1000, 5, {"plan: heap", 0});
    EXPECT_EQ(heap->bytes(), 1000);
    EXPECT_EQ(heap->num_flags(), 5);
    EXPECT_EQ(heap->base(), heap->peer(end.rank()));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(heap->base()) % 128, 0u);
    for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(heap->base()[i], std::byte{0});
    for (int64_t f = 0; f < 5; ++f) EXPECT_EQ(heap->flag(f), 0u);
    EXPECT_FALSE(heap->failed());
    end.barrier({"checked", 0});
    auto empty = end.make_heap(0, 0, {"plan: heap", 1});
    EXPECT_EQ(empty->bytes(), 0);
  }));
}

TEST(Heap, OneRankAlone) {
  const auto end = make_self();
  auto heap = end->make_heap(64, 2, {"plan: heap", 0});
  const int64_t value = 77;
  heap->put(0, 8, &value, sizeof(value));
  heap->signal(0, 1, 9);
  heap->wait(1, 9, 0, {"alone", 0});
  heap->wait(1, 3, 0, {"alone", 0});  // at least
  int64_t seen = 0;
  std::memcpy(&seen, heap->base() + 8, sizeof(seen));
  EXPECT_EQ(seen, 77);
  EXPECT_EQ(heap->flag(0), 0u);
}

TEST(Heap, ASignalPublishesThePutsBeforeIt) {
  const int64_t rounds = stress_rounds();
  for (int ranks : {2, 3, 7}) {
    auto ends = make_thread_group(ranks, seconds(60));
    expect_no_error(on_ranks(ends, [&](Communicator& end) {
      constexpr int64_t kWords = 40;
      // A block a source, then acknowledgements.
      auto heap = end.make_heap(ranks * kWords * 8, 2 * ranks, {"plan: heap", 0});
      std::mt19937 own(static_cast<unsigned>(end.rank()));
      for (int64_t round = 1; round <= rounds / 4 + 1; ++round) {
        const uint64_t value = static_cast<uint64_t>(round);
        int64_t block[kWords];
        for (int to = 0; to < ranks; ++to) {
          for (int64_t i = 0; i < kWords; ++i) block[i] = round * 1000 + end.rank() * 100 + to + i;
          if (to % 2 == 0) {
            heap->put(to, end.rank() * kWords * 8, block, sizeof(block));
          } else {
            std::memcpy(heap->peer(to) + end.rank() * kWords * 8, block, sizeof(block));
          }
          heap->signal(to, end.rank(), value);
          if (own() % 8 == 0) std::this_thread::yield();
        }
        for (int step = 0; step < ranks; ++step) {
          const int from = (end.rank() + step) % ranks;
          heap->wait(from, value, from, {"rows", round});
          EXPECT_EQ(heap->flag(from), value);
          std::memcpy(block, heap->base() + from * kWords * 8, sizeof(block));
          for (int64_t i = 0; i < kWords; ++i) {
            ASSERT_EQ(block[i], round * 1000 + from * 100 + end.rank() + i);
          }
          heap->signal(from, ranks + end.rank(), value);
        }
        if (own() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 150));
        for (int to = 0; to < ranks; ++to) heap->wait(ranks + to, value, to, {"read", round});
      }
    }));
  }
}

TEST(Heap, SizesThatDifferAreEverybodysError) {
  auto ends = make_thread_group(3, seconds(30));
  const auto outcomes = on_ranks(ends, [](Communicator& end) {
    end.make_heap(end.rank() == 2 ? 128 : 64, 4, {"plan: heap", 0});
  });
  for (const Outcome& o : outcomes) {
    EXPECT_EQ(o.code, ErrorCode::comm);
    EXPECT_NE(o.text.find("rank 0 asks for 64 bytes and 4 flags, rank 2 for 128"),
              std::string::npos)
        << o.text;
  }
  const auto negative = on_ranks(ends, [](Communicator& end) {
    end.make_heap(-1, 4, {"plan: heap", 0});
  });
  for (const Outcome& o : negative) EXPECT_EQ(o.code, ErrorCode::invalid_argument) << o.text;
}

TEST(Heap, AWaitEndsAtTheDeadlineOnAllRanks) {
  auto ends = make_thread_group(3, milliseconds(100));
  const auto outcomes = on_ranks(ends, [](Communicator& end) {
    auto heap = end.make_heap(64, 4, {"plan: heap", 0});
    heap->signal((end.rank() + 1) % 3, 1, 5);
    if (end.rank() == 1) {
      heap->wait(1, 5, 0, {"first half", 7});
      std::this_thread::sleep_for(milliseconds(400));
      heap->wait(1, 6, 0, {"too late", 8});  // the group has failed long since
    } else {
      heap->wait(2, 6, 1, {"second half", 7});
    }
  });
  for (size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(outcomes[r].code, ErrorCode::timeout) << outcomes[r].text;
    for (const char* words : {"waited 100 ms for rank 1 (last seen in phase first half, call 7)",
                              "in phase second half, call 7", "expected 6, seen 0"}) {
      EXPECT_NE(outcomes[r].text.find(words), std::string::npos) << outcomes[r].text;
    }
  }
}

TEST(Heap, AFailureWakesSleepersAndStays) {
  auto ends = make_thread_group(4, seconds(60));
  const auto outcomes = on_ranks(ends, [](Communicator& end) {
    auto heap = end.make_heap(64, 4, {"plan: heap", 0});
    if (end.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(50));
      end.abort("the printer is on fire");
      EXPECT_TRUE(heap->failed());
      heap->wait(0, 1, 0, {"after", 1});
    } else {
      heap->wait(0, 1, 2, {"before", 0});
    }
  });
  for (size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(outcomes[r].code, ErrorCode::comm);
    EXPECT_NE(outcomes[r].text.find("rank 2 gave up: the printer is on fire"), std::string::npos)
        << outcomes[r].text;
  }
}

TEST(Heap, OutlivesItsEndAndSeveralLiveSideBySide) {
  auto ends = make_thread_group(2, seconds(30));
  std::vector<std::unique_ptr<SymmetricHeap>> first(2), second(2);
  expect_no_error(on_ranks(ends, [&](Communicator& end) {
    first[end.rank()] = end.make_heap(64, 1, {"plan: heap", 0});
    second[end.rank()] = end.make_heap(128, 2, {"plan: heap", 1});
  }));
  ends.clear();
  const int32_t value = 5;
  first[0]->put(1, 0, &value, sizeof(value));
  first[0]->signal(1, 0, 1);
  second[1].reset();
  const int32_t other = 6;
  second[0]->put(1, 4, &other, sizeof(other));  // a late put of a peer that is still there
  EXPECT_EQ(first[1]->flag(0), 1u);
  EXPECT_EQ(second[0]->flag(0), 0u);
  int32_t seen = 0;
  std::memcpy(&seen, first[1]->base(), sizeof(seen));
  EXPECT_EQ(seen, 5);
}

}  // namespace
}  // namespace moekit::comm
