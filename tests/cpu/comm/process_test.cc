// Ranks that are processes: forked children that find each other through a shared page. What only
// processes can do: end without a word, stop, outnumber the CPUs.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/symmetric_heap.h"
#include "moekit/communicator.h"
#include "moekit/error.h"

namespace moekit::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kMaxProcesses = 32;
constexpr int kOtherFailure = 99;

/// What a child leaves behind.
struct Verdict {
  int code;
  double cpu_seconds;
  char text[1024];
};

/// The page that parent and children share: a board and a barrier for the bootstrap, and verdicts.
struct Page {
  pthread_barrier_t barrier;
  std::byte board[kMaxProcesses * 4096];
  Verdict verdicts[kMaxProcesses];
};

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  auto of = [](const timeval& t) { return static_cast<double>(t.tv_sec) + t.tv_usec / 1e6; };
  return of(usage.ru_utime) + of(usage.ru_stime);
}

class Processes {
 public:
  explicit Processes(int size) : size_(size) {
    page_ = static_cast<Page*>(
        mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&page_->barrier, &attributes, static_cast<unsigned>(size));
    pthread_barrierattr_destroy(&attributes);
  }
  ~Processes() { munmap(page_, sizeof(Page)); }

  /// Forks the ranks; each runs body(handle) and leaves a verdict. Returns their process ids.
  std::vector<pid_t> start(std::chrono::nanoseconds deadline,
                           const std::function<void(CommunicatorHandle&)>& body) {
    std::vector<pid_t> children;
    for (int rank = 0; rank < size_; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        run(rank, deadline, body);
        _exit(0);
      }
      children.push_back(child);
    }
    return children;
  }

  /// Status of each child as waitpid tells it.
  static std::vector<int> wait(const std::vector<pid_t>& children) {
    std::vector<int> statuses;
    for (const pid_t child : children) {
      int status = 0;
      waitpid(child, &status, 0);
      statuses.push_back(status);
    }
    return statuses;
  }

  const Verdict& verdict(int rank) const { return page_->verdicts[rank]; }

  void expect_no_error() const {
    for (int r = 0; r < size_; ++r) {
      EXPECT_EQ(verdict(r).code, 0) << "rank " << r << ": " << verdict(r).text;
    }
  }

 private:
  void run(int rank, std::chrono::nanoseconds deadline,
           const std::function<void(CommunicatorHandle&)>& body) {
    Verdict& mine = page_->verdicts[rank];
    mine.code = kOtherFailure;
    try {
      Bootstrap bootstrap;
      bootstrap.rank = rank;
      bootstrap.size = size_;
      bootstrap.allgather = [&](const void* send, void* recv, int64_t bytes) {
        std::memcpy(page_->board + rank * bytes, send, static_cast<size_t>(bytes));
        pthread_barrier_wait(&page_->barrier);
        std::memcpy(recv, page_->board, static_cast<size_t>(bytes * size_));
        pthread_barrier_wait(&page_->barrier);
      };
      CommunicatorHandle handle = make_process_ranks(bootstrap, {deadline, 0});
      body(handle);
      mine.code = ::testing::Test::HasFailure() ? kOtherFailure : 0;
    } catch (const Error& e) {
      mine.code = static_cast<int>(e.code());
      std::strncpy(mine.text, e.what(), sizeof(mine.text) - 1);
    } catch (const std::exception& e) {
      std::strncpy(mine.text, e.what(), sizeof(mine.text) - 1);
    }
    mine.cpu_seconds = cpu_seconds();
  }

  const int size_;
  Page* page_;
};

/// Some of everything, checked.
void exchange(Communicator& end, int rounds) {
  const int size = end.size(), rank = end.rank();
  std::vector<int64_t> bytes(static_cast<size_t>(size)), offset(bytes.size());
  for (int64_t round = 0; round < rounds; ++round) {
    end.barrier({"start", round});
    const int64_t mine = rank * 1000 + round;
    std::vector<int64_t> all(static_cast<size_t>(size));
    end.allgather(&mine, all.data(), 8, {"gather", round});
    for (int r = 0; r < size; ++r) ASSERT_EQ(all[static_cast<size_t>(r)], r * 1000 + round);
    // Rank s sends (s + d + round) % 3 * 5000 words to d.
    auto words = [&](int s, int d) { return (s + d + round) % 3 * 5000; };
    for (int r = 0; r < size; ++r) bytes[static_cast<size_t>(r)] = words(rank, r) * 4;
    std::vector<int32_t> send(static_cast<size_t>(exclusive_offsets(bytes, offset) / 4), rank);
    std::vector<int32_t> recv(send.size(), -1);
    end.all_to_all_v({send.data(), offset, bytes, recv.data(), offset, bytes}, {"rows", round});
    for (int r = 0; r < size; ++r) {
      for (int64_t i = 0; i < words(r, rank); ++i) {
        ASSERT_EQ(recv[static_cast<size_t>(offset[static_cast<size_t>(r)] / 4 + i)], r);
      }
    }
  }
}

TEST(Processes, Exchange) {
  for (const int size : {1, 2, 4}) {
    Processes ranks(size);
    Processes::wait(ranks.start(seconds(60), [](CommunicatorHandle& handle) {
      EXPECT_EQ(handle.transport(), "shm");
      exchange(*handle.impl, 50);
    }));
    ranks.expect_no_error();
  }
}

TEST(Processes, SixteenShareTheCpus) {
  Processes ranks(16);
  Processes::wait(ranks.start(seconds(60), [](CommunicatorHandle& handle) {
    exchange(*handle.impl, 10);
    // While one rank works, the others sleep.
    if (handle.rank() == 3) std::this_thread::sleep_for(seconds(1));
    const double before = cpu_seconds();
    handle.impl->barrier({"after work", 0});
    EXPECT_LT(cpu_seconds() - before, 0.5);
  }));
  ranks.expect_no_error();
}

TEST(Processes, SplitAndHeap) {
  Processes ranks(4);
  Processes::wait(ranks.start(seconds(60), [](CommunicatorHandle& handle) {
    const CommunicatorHandle part = handle.split(handle.rank() % 2, handle.rank());
    ASSERT_EQ(part.size(), 2);
    exchange(*part.impl, 5);
    auto heap = handle.impl->make_heap(4096, 4, {"plan: heap", 0});
    const int to = (handle.rank() + 1) % 4, from = (handle.rank() + 3) % 4;
    for (uint64_t round = 1; round <= 200; ++round) {
      const std::vector<uint64_t> row(512, round * 10 + static_cast<uint64_t>(handle.rank()));
      heap->put(to, 0, row.data(), 4096);
      heap->signal(to, 0, round);
      heap->wait(0, round, from, {"rows", static_cast<int64_t>(round)});
      const auto* got = reinterpret_cast<const uint64_t*>(heap->base());
      for (int i = 0; i < 512; ++i) ASSERT_EQ(got[i], round * 10 + static_cast<uint64_t>(from));
      heap->signal(from, 1, round);  // the row may be replaced
      heap->wait(1, round, to, {"release", static_cast<int64_t>(round)});
    }
  }));
  ranks.expect_no_error();
}

TEST(Processes, APeerThatDiesIsNamedLongBeforeTheDeadline) {
  Processes ranks(4);
  const auto children = ranks.start(seconds(120), [](CommunicatorHandle& handle) {
    exchange(*handle.impl, 3);
    if (handle.rank() == 2) raise(SIGKILL);
    for (int64_t call = 0;; ++call) handle.impl->barrier({"dispatch", call});
  });
  const auto start = std::chrono::steady_clock::now();
  const std::vector<int> statuses = Processes::wait(children);
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(60));
  EXPECT_TRUE(WIFSIGNALED(statuses[2]));
  for (const int r : {0, 1, 3}) {
    EXPECT_EQ(ranks.verdict(r).code, static_cast<int>(ErrorCode::comm)) << ranks.verdict(r).text;
    const std::string text = ranks.verdict(r).text;
    EXPECT_EQ(text.find("rank " + std::to_string(r) + ": "), 0u) << text;
    EXPECT_NE(text.find("found in phase dispatch, call "), std::string::npos) << text;
    EXPECT_NE(text.find("rank 2 (last seen in phase rows, call 2)"), std::string::npos) << text;
    EXPECT_NE(text.find("process " + std::to_string(children[2])), std::string::npos) << text;
  }
}

TEST(Processes, APeerThatStopsEndsInATimeout) {
  Processes ranks(3);
  const auto children = ranks.start(milliseconds(500), [](CommunicatorHandle& handle) {
    exchange(*handle.impl, 3);
    if (handle.rank() == 1) raise(SIGSTOP);
    handle.impl->barrier({"dispatch", 7});
  });
  // The others first: rank 1 moves no more.
  const std::vector<int> others = Processes::wait({children[0], children[2]});
  kill(children[1], SIGCONT);
  Processes::wait({children[1]});
  for (const int r : {0, 1, 2}) {
    const std::string text = ranks.verdict(r).text;
    EXPECT_EQ(ranks.verdict(r).code, static_cast<int>(ErrorCode::timeout)) << text;
    EXPECT_NE(text.find("rank 1 (last seen in phase rows, call 2)"), std::string::npos) << text;
    EXPECT_NE(text.find("phase dispatch, call 7"), std::string::npos) << text;
  }
}

TEST(Processes, AWaitForAFlagNamesTheWholeChain) {
  Processes ranks(3);
  Processes::wait(ranks.start(milliseconds(1000), [](CommunicatorHandle& handle) {
    auto heap = handle.impl->make_heap(64, 3, {"plan: heap", 0});
    const int rank = handle.rank();
    // Rank 0 waits for rank 1, which waits for rank 2, which comes too late. Rank 0 is first.
    if (rank > 0) std::this_thread::sleep_for(milliseconds(rank == 1 ? 300 : 1600));
    const int64_t call = rank == 0 ? 7 : 5;
    heap->wait(rank, 1, (rank + 1) % 3, {"rows", call});
  }));
  for (const int r : {0, 1, 2}) {
    const std::string text = ranks.verdict(r).text;
    EXPECT_EQ(ranks.verdict(r).code, static_cast<int>(ErrorCode::timeout)) << text;
    EXPECT_NE(text.find("rank 0 waited 1000 ms for rank 1 (last seen in phase rows, call 5), which "
                        "waits for rank 2 (last seen in phase plan: heap, call 0) in phase rows, "
                        "call 7"),
              std::string::npos)
        << text;
  }
}

TEST(Processes, ARankThatGivesUpSaysWhere) {
  Processes ranks(2);
  Processes::wait(ranks.start(seconds(60), [](CommunicatorHandle& handle) {
    exchange(*handle.impl, 1);
    if (handle.rank() == 1) handle.abort("out of paper");
    handle.impl->barrier({"dispatch", 1});
  }));
  for (const int r : {0, 1}) {
    const std::string text = ranks.verdict(r).text;
    EXPECT_EQ(ranks.verdict(r).code, static_cast<int>(ErrorCode::comm)) << text;
    EXPECT_NE(text.find("rank 1 gave up: out of paper (last seen in phase rows, call 0)"),
              std::string::npos)
        << text;
  }
}

TEST(Processes, AnErrorThatAllRanksThrowAlikeKeepsItsCode) {
  for (int round = 0; round < 10; ++round) {
    Processes ranks(3);
    Processes::wait(ranks.start(seconds(60), [](CommunicatorHandle& handle) {
      Communicator& end = *handle.impl;
      try {
        exchange(end, 1);
        const Error refusal(ErrorCode::invalid_argument, "the plans differ in top_k");
        end.note_refusal(refusal);
        throw refusal;
      } catch (const Error& e) {
        handle.abort(e.what());
        throw;
      }
    }));
    for (const int r : {0, 1, 2}) {
      const std::string text = ranks.verdict(r).text;
      EXPECT_EQ(ranks.verdict(r).code, static_cast<int>(ErrorCode::invalid_argument)) << text;
      EXPECT_NE(text.find("the plans differ in top_k"), std::string::npos) << text;
    }
  }
}

TEST(Processes, ARankThatLeavesEarlyIsNamed) {
  Processes ranks(2);
  Processes::wait(ranks.start(milliseconds(300), [](CommunicatorHandle& handle) {
    exchange(*handle.impl, 1);
    if (handle.rank() == 1) return;
    handle.impl->barrier({"dispatch", 1});
  }));
  EXPECT_EQ(ranks.verdict(1).code, 0) << ranks.verdict(1).text;
  EXPECT_EQ(ranks.verdict(0).code, static_cast<int>(ErrorCode::timeout));
  EXPECT_NE(std::string(ranks.verdict(0).text).find("has left the group"), std::string::npos)
      << ranks.verdict(0).text;
}

TEST(Processes, OptionsAreChecked) {
  Bootstrap alone;
  EXPECT_THROW(make_process_ranks(alone), Error);  // no allgather
  alone.allgather = [](const void* send, void* recv, int64_t bytes) {
    std::memcpy(recv, send, static_cast<size_t>(bytes));
  };
  EXPECT_EQ(make_process_ranks(alone).size(), 1);
  EXPECT_THROW(make_process_ranks(alone, {seconds(0), 0}), Error);
  EXPECT_THROW(make_process_ranks(alone, {seconds(1), 2}), Error);
  alone.rank = 1;
  EXPECT_THROW(make_process_ranks(alone), Error);
  EXPECT_THROW(make_mpi_ranks(nullptr), Error);
}

TEST(Processes, ABootstrapThatFailsSaysSo) {
  Bootstrap broken;
  broken.size = 2;
  broken.allgather = [](const void*, void*, int64_t) {
    throw Error(ErrorCode::comm, "the socket is closed");
  };
  try {
    make_process_ranks(broken);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "the socket is closed");
  }
  // An allgather that loses the peer's bytes.
  broken.allgather = [](const void* send, void* recv, int64_t bytes) {
    std::memset(recv, 0, static_cast<size_t>(2 * bytes));
    std::memcpy(recv, send, static_cast<size_t>(bytes));
  };
  EXPECT_THROW(make_process_ranks(broken), Error);
}

}  // namespace
}  // namespace moekit::comm
