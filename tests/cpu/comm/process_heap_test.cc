// Symmetric heaps over every transport, rows that cross nodes as messages included.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "comm/symmetric_heap.h"
#include "groups.h"

namespace moekit::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_all;
using testing::expect_no_error;
using testing::on_ranks;

class EveryHeap : public testing::EveryGroup {};

TEST_P(EveryHeap, WhatASignalPublishesIsThere) {
  auto ends = make(4, seconds(60));
  expect_no_error(on_ranks(ends, [](Communicator& end) {
    constexpr int64_t kWords = 20000;  // larger than a frame
    const int size = end.size(), rank = end.rank();
    auto heap = end.make_heap(kWords * 8 * size, 2 * size, {"plan: heap", 0});
    ASSERT_EQ(reinterpret_cast<uintptr_t>(heap->base()) % 128, 0u);
    std::mt19937 random(static_cast<unsigned>(rank));
    for (uint64_t round = 1; round <= 30; ++round) {
      // Part r of everybody's heap is written by rank r; flag r says so, flag size + r releases it.
      for (int step = 1; step < size; ++step) {
        const int to = (rank + step) % size;
        const auto words = static_cast<int64_t>(random() % kWords + 1);
        std::vector<uint64_t> row(static_cast<size_t>(words), round << 8 | unsigned(rank));
        row[0] = static_cast<uint64_t>(words);
        heap->put(to, rank * kWords * 8, row.data(), words * 8);
        heap->signal(to, rank, round);
      }
      for (int step = 1; step < size; ++step) {
        const int from = (rank + step) % size;
        heap->wait(from, round, from, {"rows", static_cast<int64_t>(round)});
        const auto* row = reinterpret_cast<const uint64_t*>(heap->base() + from * kWords * 8);
        for (uint64_t i = 1; i < row[0]; ++i) ASSERT_EQ(row[i], round << 8 | unsigned(from));
        heap->signal(from, size + rank, round);
      }
      for (int r = 0; r < size; ++r) {
        if (r != rank) heap->wait(size + r, round, r, {"release", static_cast<int64_t>(round)});
      }
    }
  }));
}

TEST_P(EveryHeap, PutsToItself) {
  auto ends = make(2, seconds(60));
  expect_no_error(on_ranks(ends, [](Communicator& end) {
    auto heap = end.make_heap(100, 1, {"plan: heap", 0});
    const int32_t mine = 40 + end.rank();
    heap->put(end.rank(), 96, &mine, 4);
    heap->signal(end.rank(), 0, 5);
    EXPECT_EQ(heap->flag(0), 5u);
    heap->wait(0, 5, end.rank(), {"own", 0});
    EXPECT_EQ(std::memcmp(heap->base() + 96, &mine, 4), 0);
    EXPECT_EQ(heap->peer(end.rank()), heap->base());
    end.barrier({"after", 0});
  }));
}

TEST_P(EveryHeap, ASignalThatNeverComesIsATimeout) {
  auto ends = make(2, milliseconds(200));
  expect_all(on_ranks(ends,
                      [](Communicator& end) {
                        auto heap = end.make_heap(64, 2, {"plan: heap", 0});
                        if (end.rank() == 1) heap->signal(0, 1, 3);
                        if (end.rank() == 0) heap->wait(1, 4, 1, {"rows", 9});
                        end.barrier({"after", 0});
                      }),
             ErrorCode::timeout, {"rank 1", "expected"});
}

TEST_P(EveryHeap, SizesThatDisagreeAreRefused) {
  auto ends = make(3, seconds(60));
  const auto outcomes = on_ranks(ends, [](Communicator& end) {
    end.make_heap(end.rank() == 2 ? 64 : 128, 1, {"plan: heap", 0});
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.code, ErrorCode::comm) << outcome.text;
}

INSTANTIATE_TEST_SUITE_P(Comm, EveryHeap, ::testing::ValuesIn(testing::kAllKinds),
                         testing::kind_name);

}  // namespace
}  // namespace moekit::comm
