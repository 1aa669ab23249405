// Many cheap calls on ranks that dawdle at random: two workspaces in flight, empty ranks, faulty
// calls. Values are whole numbers, so that every sum is exact and each rank knows its own result.
// MOEKIT_STRESS_ROUNDS sets the number of calls (default 2000).
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "moekit/error.h"
#include "prepare/members.h"

namespace moekit::prepare {
namespace {

constexpr int64_t kExperts = 5, kTopK = 2, kWidth = 8, kMaxTokens = 4;

int64_t stress_rounds() {
  const char* text = std::getenv("MOEKIT_STRESS_ROUNDS");
  return text != nullptr ? std::atoll(text) : 2000;
}

/// Dawdles now and then.
class Delays {
 public:
  explicit Delays(unsigned seed) : random_(seed) {}
  void maybe() {
    const unsigned roll = static_cast<unsigned>(random_());
    if (roll % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(roll / 64 % 100));
    if (roll % 4 == 1) std::this_thread::yield();
  }

 private:
  std::mt19937 random_;
};

/// One call at a time of one rank on one workspace.
class Caller {
 public:
  Caller(const PrepareFinalize& member, const Problem& problem, comm::Communicator& comm)
      : member_(member),
        problem_(problem),
        comm_(comm),
        wire_(RowFormat::of(ActivationFormat::f32, kWidth)) {
    workspace_ = Buffer(member.workspace_bytes(problem, wire_, QuantDuty::none));
    const HeapNeed need = member.heap_need(problem, wire_, QuantDuty::none);
    if (need.any()) heap_ = comm.make_heap(need.bytes, need.num_flags, {"plan: heap", 0});
  }

  /// `shared` is in the same state on all ranks.
  void send(int64_t call, std::mt19937& shared) {
    spoiled_ = shared() % 64 == 0 ? static_cast<int>(shared() % problem_.num_ranks) : -1;
    for (int r = 0; r < problem_.num_ranks; ++r) {
      const int64_t tokens = shared() % 3 == 0 ? 0 : shared() % (kMaxTokens + 1);
      const unsigned salt = static_cast<unsigned>(shared());
      if (r == problem_.rank) draw(tokens, salt);
    }
    if (spoiled_ == problem_.rank && tokens_ == 0) draw(1, 1);
    if (spoiled_ == problem_.rank) ids_[0] = GlobalExpert{77};
    failed_ = false;
    args_ = {.problem = &problem_,
             .hidden = TensorView::contiguous(hidden_, DType::f32, {tokens_, kWidth}),
             .routing = {tokens_, kTopK, ids_, weights_},
             .quant_duty = QuantDuty::none,
             .wire = wire_,
             .workspace = workspace_.data(),
             .threads = &pool_,
             .comm = &comm_,
             .heap = heap_.get(),
             .call = call};
    guard([&] { member_.prepare_send(args_); });
  }

  void serve() {
    guard([&] {
      while (poll_ && !member_.prepare_ready(args_)) std::this_thread::yield();
      rows_ = member_.prepare_receive(args_);
    });
    EXPECT_EQ(failed_, spoiled_ >= 0) << member_.name() << ", call " << args_.call;
    if (failed_) return;
    run_experts();
    float* results = member_.results(args_);
    if (results == nullptr) results = out_.data();
    if (results != out_.data()) std::copy(out_.begin(), out_.end(), results);
    final_ = {.problem = &problem_,
              .routing = args_.routing,
              .reduce_duty = {},
              .rows = rows_,
              .experts = {results, kWidth},
              .sum = sum_,
              .workspace = workspace_.data(),
              .threads = &pool_,
              .comm = &comm_,
              .heap = heap_.get(),
              .call = args_.call};
    member_.finalize_send(final_);
  }

  void finish() {
    if (failed_) return;
    while (poll_ && !member_.finalize_ready(final_)) std::this_thread::yield();
    poll_ = !poll_;
    member_.finalize_receive(final_);
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t i = 0; i < kWidth; ++i) {
        float expected = 0.0f;
        for (int64_t j = 0; j < kTopK; ++j) {
          const int32_t id = index_of(ids_[t * kTopK + j]);
          if (id >= 0)
            expected +=
                weights_[t * kTopK + j] * hidden_[t * kWidth + i] * static_cast<float>(id + 1);
        }
        ASSERT_EQ(sum_[t * kWidth + i], expected) << member_.name() << ", rank " << problem_.rank
                                                  << ", call " << args_.call << ", token " << t;
      }
    }
  }

 private:
  void draw(int64_t tokens, unsigned salt) {
    tokens_ = tokens;
    for (int64_t i = 0; i < tokens * kWidth; ++i)
      hidden_[i] = static_cast<float>((salt + 7 * i) % 61);
    for (int64_t i = 0; i < tokens * kTopK; ++i) {
      ids_[i] = GlobalExpert{
          static_cast<int32_t>((salt / 7 + 3 * i * (salt % 5 + 1)) % (kExperts + 1)) - 1};
      weights_[i] = static_cast<float>(1 + (salt + i) % 3);
    }
  }

  template <typename Body>
  void guard(Body body) {
    if (failed_) return;
    try {
      body();
    } catch (const Error& e) {
      failed_ = true;
      ASSERT_EQ(e.code(), ErrorCode::invalid_argument) << e.what();
    }
  }

  /// y = x * (expert + 1).
  void run_experts() {
    const std::vector<int32_t>& mine = problem_.placement->experts_of(problem_.rank);
    const auto apply = [&](int64_t row, int64_t place, int32_t expert) {
      const auto* x = reinterpret_cast<const float*>(rows_.record(row));
      for (int64_t i = 0; i < kWidth; ++i) {
        out_[static_cast<size_t>(place * kWidth + i)] = x[i] * static_cast<float>(expert + 1);
      }
    };
    if (rows_.layout == RowsLayout::batched) {
      out_.resize(mine.size() * static_cast<size_t>(rows_.rows_per_expert * kWidth));
      for (size_t e = 0; e < mine.size(); ++e) {
        for (int64_t p = 0; p < rows_.expert_num_rows[e]; ++p) {
          const int64_t row = static_cast<int64_t>(e) * rows_.rows_per_expert + p;
          apply(row, row, mine[e]);
        }
      }
      return;
    }
    out_.resize(static_cast<size_t>(rows_.num_rows * kTopK * kWidth));
    for (int64_t i = 0; i < rows_.num_rows * kTopK; ++i) {
      if (rows_.ids[i] != LocalExpert::none) {
        apply(i / kTopK, i, mine[static_cast<size_t>(index_of(rows_.ids[i]))]);
      }
    }
  }

  const PrepareFinalize& member_;
  const Problem& problem_;
  comm::Communicator& comm_;
  const RowFormat wire_;
  ThreadPool pool_{1};
  Buffer workspace_;
  std::unique_ptr<comm::SymmetricHeap> heap_;
  int64_t tokens_ = 0;
  float hidden_[kMaxTokens * kWidth] = {}, weights_[kMaxTokens * kTopK] = {};
  float sum_[kMaxTokens * kWidth] = {};
  GlobalExpert ids_[kMaxTokens * kTopK] = {};
  int spoiled_ = -1;
  bool failed_ = false, poll_ = false;
  PrepareArgs args_;
  FinalizeArgs final_;
  ExpertRows rows_;
  std::vector<float> out_;
};

Problem problem_of(int rank, int ranks, std::shared_ptr<const ExpertPlacement> placement) {
  Problem p;
  p.config.num_experts = kExperts;
  p.config.top_k = kTopK;
  p.config.hidden = kWidth;
  p.config.inter = 8;
  p.config.gate_up_input.format = ActivationFormat::f32;
  p.max_tokens = kMaxTokens;
  p.num_ranks = ranks;
  p.nodes = NodeMap::shares(ranks, ranks > 2 ? 2 : 1);
  p.rank = rank;
  p.placement = std::move(placement);
  return p;
}

void run_rank(const PrepareFinalize& member, comm::Communicator& comm, int64_t rounds) {
  const auto placement =
      std::make_shared<const ExpertPlacement>(ExpertPlacement::round_robin(kExperts, comm.size()));
  const Problem problem = problem_of(comm.rank(), comm.size(), placement);
  Caller a(member, problem, comm), b(member, problem, comm);
  std::mt19937 shared(5);
  Delays delays(static_cast<unsigned>(100 + comm.rank()));
  for (int64_t call = 0; call < rounds && !testing::Test::HasFatalFailure(); call += 2) {
    const bool swapped = shared() % 2 == 0;
    a.send(call, shared);
    delays.maybe();
    b.send(call, shared);
    delays.maybe();
    (swapped ? b : a).serve();
    delays.maybe();
    (swapped ? a : b).serve();
    delays.maybe();
    b.finish();
    delays.maybe();
    a.finish();
  }
}

class Stress : public testing::TestWithParam<const PrepareFinalize*> {};

TEST_P(Stress, ManyCallsWithDelays) {
  const std::vector<int> sizes = {2, 3, 5};
  const int64_t rounds =
      std::max<int64_t>(20, stress_rounds() / static_cast<int64_t>(sizes.size()));
  for (int ranks : sizes) {
    auto ends = comm::make_thread_group(ranks, std::chrono::seconds(120));
    std::vector<std::string> errors(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        try {
          run_rank(*GetParam(), *ends[r], rounds);
        } catch (const std::exception& e) {
          errors[r] = e.what();
          ends[r]->abort(e.what());
        }
      });
    }
    for (std::thread& t : threads) t.join();
    for (const std::string& error : errors) EXPECT_EQ(error, "") << ranks << " ranks";
  }
}

INSTANTIATE_TEST_SUITE_P(Members, Stress,
                         testing::Values(&all2all_member(), &push_member(), &low_latency_member(),
                                         &hierarchical_member()),
                         [](const auto& info) { return std::string(info.param->name()); });

}  // namespace
}  // namespace moekit::prepare
