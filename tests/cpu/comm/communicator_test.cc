// Communicators: every exchange against its definition, and every way in which ranks can fail to
// meet: all ranks must end with the same, telling error, none may wait for ever.
#include "comm/communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "groups.h"
#include "moekit/communicator.h"
#include "moekit/error.h"

namespace moekit::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

using testing::Ends;
using testing::EveryGroup;
using testing::expect_all;
using testing::expect_no_error;
using testing::on_ranks;

/// An all-to-all of whole int32 values: rank s sends counts[s][d] values to d.
class Mailer {
 public:
  explicit Mailer(const Communicator& end)
      : rank_(end.rank()), size_(end.size()), bytes_(4, std::vector<int64_t>(end.size())) {}

  static int32_t value(int from, int to, int64_t i) {
    return from * 1000003 + to * 1009 + static_cast<int32_t>(i);
  }

  Exchange prepare(const std::function<int64_t(int, int)>& count) {
    for (int r = 0; r < size_; ++r) {
      bytes_[1][r] = count(rank_, r) * 4;
      bytes_[3][r] = count(r, rank_) * 4;
    }
    send_.assign(static_cast<size_t>(exclusive_offsets(bytes_[1], bytes_[0]) / 4), 0);
    recv_.assign(static_cast<size_t>(exclusive_offsets(bytes_[3], bytes_[2]) / 4), -1);
    for (int r = 0; r < size_; ++r) {
      for (int64_t i = 0; i < bytes_[1][r] / 4; ++i) {
        send_[bytes_[0][r] / 4 + i] = value(rank_, r, i);
      }
    }
    return Exchange{send_.data(), bytes_[0], bytes_[1], recv_.data(), bytes_[2], bytes_[3]};
  }

  void expect_received() const {
    for (int r = 0; r < size_; ++r) {
      for (int64_t i = 0; i < bytes_[3][r] / 4; ++i) {
        ASSERT_EQ(recv_[bytes_[2][r] / 4 + i], value(r, rank_, i)) << rank_ << " from " << r;
      }
    }
  }
  const std::vector<int32_t>& received() const { return recv_; }
  std::vector<int64_t>& recv_bytes() { return bytes_[3]; }

 private:
  int rank_;
  int size_;
  std::vector<std::vector<int64_t>> bytes_;  // send offset, send, recv offset, recv
  std::vector<int32_t> send_, recv_;
};

TEST(ExclusiveOffsets, CountsPastAHundredAndTwentyEight) {  // F08
  for (size_t n : {1u, 127u, 128u, 130u, 257u}) {
    std::vector<int64_t> ones(n, 1), offset(n);
    EXPECT_EQ(exclusive_offsets(ones, offset), static_cast<int64_t>(n));
    for (size_t i = 0; i < n; ++i) EXPECT_EQ(offset[i], static_cast<int64_t>(i));
  }
}

TEST(ExclusiveOffsets, InPlace) {
  std::vector<int64_t> values = {3, 0, 5};
  EXPECT_EQ(exclusive_offsets(values, values), 8);
  EXPECT_EQ(values, (std::vector<int64_t>{0, 3, 3}));
}

TEST(ThreadGroup, RefusesSizesThatCantBe) {
  EXPECT_THROW(make_thread_group(0, seconds(1)), Error);
  EXPECT_THROW(make_thread_group(1025, seconds(1)), Error);
  EXPECT_THROW(make_thread_group(2, seconds(0)), Error);
  EXPECT_THROW(make_thread_group(2, seconds(1), 3), Error);
}

TEST_P(EveryGroup, Topology) {
  const auto ends = make(6, seconds(1), 4);
  EXPECT_EQ(ends[0]->size(), 6);
  EXPECT_EQ(ends[5]->rank(), 5);
  std::vector<int> nodes;
  for (int r = 0; r < 6; ++r) nodes.push_back(ends[0]->node_of(r));
  EXPECT_EQ(nodes, (std::vector<int>{0, 0, 1, 2, 2, 3}));
}

TEST(ThreadGroup, PublicHandles) {
  EXPECT_EQ(CommunicatorHandle{}.size(), 1);
  EXPECT_EQ(CommunicatorHandle{}.rank(), 0);
  const auto handles = make_thread_ranks(3);
  ASSERT_EQ(handles.size(), 3u);
  EXPECT_EQ(handles[2].rank(), 2);
  EXPECT_EQ(handles[2].size(), 3);
  EXPECT_EQ(handles[0].impl->deadline(), seconds(30));
}

TEST(Self, ExchangesWithItself) {
  const auto self = make_self();
  EXPECT_EQ(self->name(), "self");
  self->barrier({"alone", 0});
  const int32_t sent = 7;
  int32_t got = 0;
  self->allgather(&sent, &got, 4, {"alone", 1});
  EXPECT_EQ(got, 7);
  Mailer mailer(*self);
  self->all_to_all_v(mailer.prepare([](int, int) { return 5; }), {"alone", 2});
  mailer.expect_received();
}

TEST(ThreadGroup, LentRowsAreReadWhereTheyLie) {
  for (int ranks : {1, 2, 7}) {
    auto ends = make_thread_group(ranks, seconds(60));
    expect_no_error(on_ranks(ends, [&](Communicator& end) {
      ASSERT_TRUE(end.lends());
      const std::vector<int64_t> sizes(static_cast<size_t>(ranks), 8);
      for (int64_t call = 0; call < 50; ++call) {
        int64_t mine = end.rank() + 100 * call;
        Exchange exchange{nullptr, sizes, sizes, nullptr, sizes, sizes, &mine};
        const Ticket ticket = end.begin_all_to_all_v(exchange, {"lend", call});
        int reads = 0;
        auto read = [&](std::span<const void* const> lent) {
          ++reads;
          ASSERT_EQ(static_cast<int>(lent.size()), ranks);
          for (int r = 0; r < ranks; ++r) {
            EXPECT_EQ(*static_cast<const int64_t*>(lent[r]), r + 100 * call);
          }
        };
        end.finish_reading(ticket, read);
        EXPECT_EQ(reads, 1);
        mine = -1;  // nobody reads it any more
      }
    }));
  }
}

TEST(ThreadGroup, LendingRanksAndOthersDisagree) {
  auto ends = make_thread_group(2, seconds(60));
  const auto outcomes = on_ranks(ends, [&](Communicator& end) {
    const std::vector<int64_t> sizes(2, 0);
    const int64_t mine = 0;
    Exchange exchange{
        nullptr, sizes, sizes, nullptr, sizes, sizes, end.rank() == 0 ? &mine : nullptr};
    auto read = [](std::span<const void* const>) { FAIL() << "nothing was lent"; };
    end.finish_reading(end.begin_all_to_all_v(exchange, {"lend", 0}), read);
  });
  expect_all(outcomes, ErrorCode::comm, {"ranks disagree about the step", "phase lend, call 0"});
}

TEST_P(EveryGroup, Exchanges) {
  // More threads than bits of a byte (F08); processes of one host are fewer.
  const std::vector<int> sizes =
      threads() ? std::vector<int>{1, 2, 3, 4, 7, 130, 257} : std::vector<int>{1, 2, 3, 4, 7, 16};
  for (int ranks : sizes) {
    auto ends = make(ranks, seconds(60));
    const auto count = [](int from, int to) -> int64_t { return (from * 7 + to * 3) % 5; };
    expect_no_error(on_ranks(ends, [&](Communicator& end) {
      Mailer mailer(end);
      for (int64_t call = 0; call < 3; ++call) {
        end.barrier({"start", call});
        const int64_t mine = end.rank() + 100 * call;
        std::vector<int64_t> all(static_cast<size_t>(ranks), -1);
        end.allgather(&mine, all.data(), 8, {"counts", call});
        for (int r = 0; r < ranks; ++r) ASSERT_EQ(all[r], r + 100 * call);
        end.all_to_all_v(mailer.prepare(count), {"rows", call});
        mailer.expect_received();
      }
    }));
  }
}

TEST_P(EveryGroup, ZeroRowsAndColumnsOfTheCountMatrix) {  // F05
  const int64_t silent[2][2] = {{1, 1}, {0, 0}};
  auto two = make(2, seconds(30));
  expect_no_error(on_ranks(two, [&](Communicator& end) {
    Mailer mailer(end);
    end.all_to_all_v(mailer.prepare([&](int s, int d) { return silent[s][d]; }), {"rows", 0});
    mailer.expect_received();
  }));
  auto four = make(4, seconds(30));
  expect_no_error(on_ranks(four, [&](Communicator& end) {
    Mailer mailer(end);
    // Rank 1 sends nothing, rank 2 gets nothing; then nobody sends anything at all.
    end.all_to_all_v(mailer.prepare([](int s, int d) { return s == 1 || d == 2 ? 0 : 1 + s + d; }),
                     {"rows", 0});
    mailer.expect_received();
    end.all_to_all_v(mailer.prepare([](int, int) { return 0; }), {"rows", 1});
    EXPECT_TRUE(mailer.received().empty());
  }));
}

TEST_P(EveryGroup, CountsThatDisagreeMoveNothing) {  // F06
  auto ends = make(3, seconds(30));
  std::vector<std::vector<int32_t>> received(3);
  const auto outcomes = on_ranks(ends, [&](Communicator& end) {
    Mailer mailer(end);
    Exchange exchange = mailer.prepare([](int s, int d) { return s == 0 && d == 1 ? 0 : 2; });
    std::vector<int32_t> room(64, -1);
    exchange.recv = room.data();
    if (end.rank() == 1) mailer.recv_bytes()[0] = 16;
    try {
      end.all_to_all_v(exchange, {"dispatch rows", 12});
    } catch (...) {
      received[end.rank()] = room;
      throw;
    }
  });
  expect_all(outcomes, ErrorCode::comm,
             {"dispatch rows", "call 12", "rank 0 sends 0 bytes to rank 1", "expects 16 bytes"});
  for (const auto& room : received) EXPECT_EQ(room, std::vector<int32_t>(64, -1));
}

TEST_P(EveryGroup, SitesThatDisagreeAreNamed) {
  auto ends = make(4, seconds(30));
  expect_all(on_ranks(ends,
                      [](Communicator& end) {
                        end.barrier({"start", 3});
                        end.barrier({end.rank() == 2 ? "combine" : "dispatch", 3});
                      }),
             ErrorCode::comm, {"dispatch", "combine", "rank 2", "call 3"});
  auto others = make(2, seconds(30));
  expect_all(on_ranks(others,
                      [](Communicator& end) {
                        end.barrier({"start", end.rank() + 5});
                      }),
             ErrorCode::comm, {"call 5", "call 6"});
  auto sizes = make(2, seconds(30));
  expect_all(on_ranks(sizes,
                      [](Communicator& end) {
                        std::byte room[64] = {};
                        end.allgather(room, room + 32, 8 + end.rank(), {"counts", 0});
                      }),
             ErrorCode::comm, {"8 bytes", "9 bytes"});
}

TEST_P(EveryGroup, ARankThatCallsLessOftenEndsInATimeoutOnAll) {  // F04
  for (int ranks : {2, 5}) {
    auto ends = make(ranks, milliseconds(100));
    std::atomic<int> failed{0};
    const auto outcomes = on_ranks(ends, [&](Communicator& end) {
      try {
        for (int64_t call = 0; call < (end.rank() == 1 ? 2 : 3); ++call) {
          end.barrier({"dispatch", call});
        }
      } catch (const Error&) {
        ++failed;
        throw;
      }
      // Rank 1 goes on to its teardown when the others have noticed.
      while (failed.load() < ranks - 1) std::this_thread::yield();
      end.barrier({"teardown", 0});
    });
    expect_all(outcomes, ErrorCode::timeout,
               {"rank 1 (last seen in phase dispatch, call 1", "phase dispatch, call 2",
                ranks == 2 ? "expected 2 ranks, seen 1" : "expected 5 ranks, seen 4"});
  }
}

TEST_P(EveryGroup, TimeoutNamesARankThatNeverCameAndOneThatLeft) {
  auto ends = make(3, milliseconds(50));
  ends[2].reset();
  ends.pop_back();
  std::vector<std::unique_ptr<Communicator>> present;
  present.push_back(std::move(ends[0]));
  const auto outcomes = on_ranks(present, [](Communicator& end) { end.barrier({"start", 0}); });
  expect_all(outcomes, ErrorCode::timeout,
             {"rank 1 (never seen)", "rank 2 (never seen, has left the group)", "seen 1"});
}

TEST_P(EveryGroup, AFailedGroupStaysFailed) {
  auto ends = make(2, milliseconds(50));
  EXPECT_THROW(ends[0]->barrier({"start", 0}), Error);
  std::vector<std::string> first(ends.size());
  for (int i = 0; i < 3; ++i) {
    for (auto& end : ends) {
      try {
        end->barrier({"again", i});
        ADD_FAILURE() << "a failed group took part";
      } catch (const Error& e) {
        // By messages, rank 0's call may be heard of before its timeout: then the calls differ.
        if (shares_memory() || end->rank() == 0) {
          EXPECT_EQ(e.code(), ErrorCode::timeout);
        }
        EXPECT_NE(std::string(e.what()).find("phase start, call 0"), std::string::npos) << e.what();
        std::string& told = first[static_cast<size_t>(end->rank())];
        if (told.empty()) told = e.what();
        EXPECT_EQ(told, e.what());
      }
    }
  }
}

TEST_P(EveryGroup, AbortReleasesPeersAndNamesTheReason) {
  auto ends = make(4, seconds(60));
  expect_all(on_ranks(ends,
                      [](Communicator& end) {
                        if (end.rank() == 3) end.abort("row 5 holds expert 99");
                        end.barrier({"dispatch", 0});
                      }),
             ErrorCode::comm, {"rank 3 gave up", "row 5 holds expert 99"});
}

TEST_P(EveryGroup, AnErrorThatAllRanksThrowAlikeKeepsItsCode) {
  const Error refusal(ErrorCode::invalid_argument, "the plans differ in top_k");
  auto ends = make(3, seconds(60));
  // Rank 2 is still on its way when the others give up in the words of the error.
  expect_all(on_ranks(ends,
                      [&](Communicator& end) {
                        if (end.rank() == 2) end.barrier({"plan", 0});
                        end.note_refusal(refusal);
                        end.abort("invalid_argument: the plans differ in top_k");
                        end.barrier({"plan", 0});
                      }),
             ErrorCode::invalid_argument, {": the plans differ in top_k"});
  // Other words are another fault.
  ends = make(3, seconds(60));
  expect_all(on_ranks(ends,
                      [&](Communicator& end) {
                        end.note_refusal(refusal);
                        if (end.rank() == 1) end.abort("out of paper");
                        end.barrier({"plan", 0});
                      }),
             ErrorCode::comm, {"rank 1 gave up: out of paper"});
}

TEST(ThreadGroup, AMeetingThatIsOverHolds) {
  for (int round = 0; round < 200; ++round) {
    auto ends = make_thread_group(3, seconds(60));
    testing::expect_no_error(testing::on_ranks(ends, [](Communicator& end) {
      int64_t mine = end.rank(), all[3];
      end.allgather(&mine, all, 8, {"plan", 0});
      EXPECT_EQ(all[2], 2);
      end.abort("done");
    }));
  }
}

TEST_P(EveryGroup, LeavingWithAnExchangeInFlightFailsTheGroup) {
  auto ends = make(2, seconds(60));
  {
    Mailer mailer(*ends[1]);
    ends[1]->begin_all_to_all_v(mailer.prepare([](int, int) { return 1; }), {"rows", 0});
    ends[1].reset();
  }
  Mailer mailer(*ends[0]);
  try {
    ends[0]->all_to_all_v(mailer.prepare([](int, int) { return 1; }), {"rows", 0});
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::comm);
    EXPECT_NE(std::string(e.what()).find("rank 1 gave up"), std::string::npos) << e.what();
  }
}

TEST_P(EveryGroup, ExchangesInFlightCompleteInAnyOrderOfFinish) {
  auto ends = make(3, seconds(60));
  expect_no_error(on_ranks(ends, [this](Communicator& end) {
    const auto small = [](int s, int d) -> int64_t { return s + 2 * d; };
    const auto large = [](int s, int d) -> int64_t { return 50 + s - d; };
    for (int64_t call = 0; call < 40; ++call) {
      Mailer first(end), second(end);
      const Ticket a = end.begin_all_to_all_v(first.prepare(small), {"a", call});
      const Ticket b = end.begin_all_to_all_v(second.prepare(large), {"b", call});
      end.barrier({"between", call});
      // All ranks have posted both before the barrier; rows of processes move while they look.
      while (!end.ready(a) || !end.ready(b)) ASSERT_FALSE(threads());
      end.finish(b);
      end.finish(a);
      first.expect_received();
      second.expect_received();
    }
  }));
}

TEST_P(EveryGroup, ReadyDoesNotBlock) {
  auto ends = make(2, seconds(60));
  Mailer mine(*ends[0]);
  const auto count = [](int, int) -> int64_t { return 4; };
  const Ticket ticket = ends[0]->begin_all_to_all_v(mine.prepare(count), {"rows", 0});
  EXPECT_FALSE(ends[0]->ready(ticket));
  std::thread peer([&] {
    Mailer theirs(*ends[1]);
    ends[1]->all_to_all_v(theirs.prepare(count), {"rows", 0});
    theirs.expect_received();
  });
  ends[0]->finish(ticket);
  peer.join();
  mine.expect_received();
  EXPECT_THROW(ends[0]->finish(ticket), Error);
}

TEST_P(EveryGroup, TooManyExchangesInFlightAreRefused) {
  auto ends = make(2, seconds(60));
  Mailer mailer(*ends[0]);
  const Exchange exchange = mailer.prepare([](int, int) { return 0; });
  for (int i = 0; i < Communicator::kMaxInFlight; ++i) {
    ends[0]->begin_all_to_all_v(exchange, {"rows", i});
  }
  EXPECT_THROW(ends[0]->begin_all_to_all_v(exchange, {"rows", 99}), Error);
}

/// Rounds of the stress test: MOEKIT_STRESS_ROUNDS, or a count that suits a normal run.
int64_t stress_rounds() {
  const char* text = std::getenv("MOEKIT_STRESS_ROUNDS");
  return text != nullptr ? std::atoll(text) : 3000;
}

TEST_P(EveryGroup, StressWithDelays) {
  for (int ranks : {2, 3, 8}) {
    auto ends = make(ranks, seconds(120));
    const int64_t rounds = stress_rounds() / ranks;
    expect_no_error(on_ranks(ends, [&](Communicator& end) {
      std::mt19937 shared(42);                                     // the same on all ranks
      std::mt19937 own(static_cast<unsigned>(1000 + end.rank()));  // delays
      Mailer first(end), second(end);
      std::vector<int64_t> all(static_cast<size_t>(ranks));
      for (int64_t round = 0; round < rounds; ++round) {
        const unsigned salt = shared();
        const auto count = [&](int s, int d) -> int64_t {
          return ((s * 31 + d * 17) ^ salt) % 9 < 4 ? 0 : ((s + d) ^ salt) % 23;
        };
        const unsigned delay = own() % 16;
        if (delay == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
        if (delay < 4) std::this_thread::yield();
        switch (salt % 4) {
          case 0: end.barrier({"barrier", round}); break;
          case 1: {
            const int64_t mine = round * 1000 + end.rank();
            end.allgather(&mine, all.data(), 8, {"gather", round});
            for (int r = 0; r < ranks; ++r) ASSERT_EQ(all[r], round * 1000 + r);
            break;
          }
          case 2:
            end.all_to_all_v(first.prepare(count), {"rows", round});
            first.expect_received();
            break;
          default: {
            const Ticket a = end.begin_all_to_all_v(first.prepare(count), {"a", round});
            const Ticket b = end.begin_all_to_all_v(second.prepare(count), {"b", round});
            if (own() % 2 == 0) end.ready(a);
            const bool swapped = salt % 8 == 3;
            end.finish(swapped ? b : a);
            end.finish(swapped ? a : b);
            first.expect_received();
            second.expect_received();
            break;
          }
        }
      }
    }));
  }
}

TEST_P(EveryGroup, StressOfFailures) {
  // A rank fails at a random point of a random round: the peers must always end with its reason,
  // and nobody may touch a buffer that is gone.
  const int64_t groups = std::max<int64_t>(50, stress_rounds() / 20);
  std::mt19937 random(7);
  for (int64_t g = 0; g < groups; ++g) {
    const int ranks = 2 + static_cast<int>(random() % 4);
    const int culprit = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const int64_t last = static_cast<int64_t>(random() % 5);
    auto ends = make(ranks, seconds(60));
    const auto outcomes = on_ranks(ends, [&](Communicator& end) {
      for (int64_t round = 0; round <= 5; ++round) {
        Mailer mailer(end);
        const Ticket ticket = end.begin_all_to_all_v(
            mailer.prepare([](int s, int d) -> int64_t { return 100 * (1 + s + d); }),
            {"rows", round});
        if (end.rank() == culprit && round == last) {
          end.abort("injected");
          end.barrier({"never", 0});
        }
        end.finish(ticket);
        mailer.expect_received();
      }
    });
    expect_all(outcomes, ErrorCode::comm, {"injected"});
  }
}

/// Subgroups exchange apart from each other, in the order of their keys.
TEST_P(EveryGroup, Split) {
  auto ends = make(7, seconds(60));
  expect_no_error(on_ranks(ends, [](Communicator& end) {
    // Colors 0 and 1 by parity, rank 6 in none; keys turn the order round.
    const int color = end.rank() == 6 ? -1 : end.rank() % 2;
    auto part = end.split(color, -end.rank(), {"plan: split", 0});
    if (color < 0) {
      EXPECT_EQ(part, nullptr);
      return end.barrier({"after", 0});
    }
    ASSERT_EQ(part->size(), 3);
    EXPECT_EQ(part->rank(), 2 - end.rank() / 2);
    EXPECT_EQ(part->name(), end.name());
    EXPECT_EQ(part->deadline(), end.deadline());
    const int32_t mine = end.rank();
    std::vector<int32_t> all(3);
    for (int64_t call = 0; call < 20; ++call) {
      part->allgather(&mine, all.data(), 4, {"gather", call});
      EXPECT_EQ(all, (std::vector<int32_t>{4 + color, 2 + color, color}));
    }
    auto alone = part->split(part->rank(), 0, {"plan: alone", 0});
    EXPECT_EQ(alone->size(), 1);
    alone->barrier({"alone", 0});
    Mailer mailer(*part);
    part->all_to_all_v(mailer.prepare([](int s, int d) -> int64_t { return 3000 * s + d; }),
                       {"rows", 0});
    mailer.expect_received();
    end.barrier({"after", 0});
  }));
}

TEST_P(EveryGroup, SplitKeepsNodes) {
  auto ends = make(4, seconds(60), GetParam() == testing::Kind::shm ? 2 : 4);
  expect_no_error(on_ranks(ends, [&](Communicator& end) {
    auto part = end.split(end.rank() < 3 ? 0 : 1, 0, {"plan: split", 0});
    for (int r = 0; r < part->size(); ++r) {
      for (int other = 0; other < part->size(); ++other) {
        const int first = end.rank() < 3 ? 0 : 3;
        EXPECT_EQ(part->node_of(r) == part->node_of(other),
                  end.node_of(first + r) == end.node_of(first + other));
      }
    }
  }));
}

TEST_P(EveryGroup, AFailureOfASubgroupStaysThere) {
  auto ends = make(4, seconds(60));
  expect_no_error(on_ranks(ends, [](Communicator& end) {
    auto part = end.split(end.rank() / 2, 0, {"plan: split", 0});
    if (end.rank() == 0) part->abort("injected");
    if (end.rank() < 2) {
      EXPECT_THROW(part->barrier({"start", 0}), Error);
    } else {
      part->barrier({"start", 0});
    }
    end.barrier({"after", 0});
  }));
}

TEST_P(EveryGroup, RowsLargerThanAnyStaging) {
  auto ends = make(3, seconds(60));
  expect_no_error(on_ranks(ends, [](Communicator& end) {
    Mailer first(end), second(end);
    const auto count = [](int s, int d) -> int64_t { return 400000 + 1000 * s + d; };
    const Ticket a = end.begin_all_to_all_v(first.prepare(count), {"a", 0});
    const Ticket b = end.begin_all_to_all_v(second.prepare(count), {"b", 0});
    end.finish(b);
    end.finish(a);
    first.expect_received();
    second.expect_received();
    std::vector<int32_t> mine(100000, end.rank()), all(300000);
    end.allgather(mine.data(), all.data(), 400000, {"gather", 0});
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<int32_t>(i / 100000));
  }));
}

INSTANTIATE_TEST_SUITE_P(Comm, EveryGroup, ::testing::ValuesIn(testing::kAllKinds),
                         testing::kind_name);

}  // namespace
}  // namespace moekit::comm
