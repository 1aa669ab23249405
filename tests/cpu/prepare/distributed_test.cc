// Members over several ranks: the definition's bits whatever moves the rows, every edge of the
// routing, capacity, and faults that all ranks must learn of.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cpu/prepare/world.h"
#include "prepare/members.h"
#include "prepare/node_relays.h"
#include "prepare/replica_turn.h"

namespace moekit::prepare {
namespace {

std::vector<int64_t> uneven_tokens(int ranks) {
  std::vector<int64_t> tokens;
  for (int r = 0; r < ranks; ++r) tokens.push_back(r % 3 == 1 ? 0 : (r * 5 + 4) % 11);
  return tokens;
}

std::vector<std::shared_ptr<const ExpertPlacement>> placements(int64_t experts, int ranks) {
  std::vector<ExpertPlacement> all = {ExpertPlacement::linear(experts, ranks),
                                      ExpertPlacement::round_robin(experts, ranks)};
  // Reversed shares, and the even experts once more on the next rank.
  std::vector<std::vector<int32_t>> lists(static_cast<size_t>(ranks));
  for (int64_t e = experts - 1; e >= 0; --e) {
    lists[e % ranks].push_back(static_cast<int32_t>(e));
    if (ranks > 1 && e % 2 == 0) lists[(e + 1) % ranks].push_back(static_cast<int32_t>(e));
  }
  all.push_back(ExpertPlacement::from_lists(experts, lists));
  std::vector<std::shared_ptr<const ExpertPlacement>> shared;
  for (auto& p : all) shared.push_back(std::make_shared<const ExpertPlacement>(std::move(p)));
  return shared;
}

class DistributedMember : public testing::TestWithParam<const PrepareFinalize*> {
 protected:
  World world(int ranks) const {
    World w;
    w.member = GetParam();
    w.ranks = ranks;
    w.nodes = 1 + ranks / 3;
    w.tokens = uneven_tokens(ranks);
    w.top_k = 3;
    w.experts = 10;
    return w;
  }
  bool batched() const {
    return GetParam() == &low_latency_member() || GetParam() == &all2all_batched_member();
  }
  bool gathers() const { return GetParam() == &allgather_member(); }
  /// Nothing meets before rows move: every source has an equal share of a bounded capacity.
  bool pushes() const {
    return GetParam() == &push_member() || GetParam() == &low_latency_member();
  }
};

TEST_P(DistributedMember, SlotsHaveTheBitsOfTheDefinition) {
  for (int ranks : {1, 2, 3, 4, 7}) {
    for (const auto& placement : placements(10, ranks)) {
      for (DType combine_dtype : {DType::f32, DType::bf16}) {
        World w = world(ranks);
        w.placement = placement;
        w.combine_dtype = combine_dtype;
        w.calls = 2;
        w.threads = ranks == 2 ? 2 : 1;
        expect_exact(w);
      }
    }
  }
}

TEST_P(DistributedMember, RankSumsHaveTheBitsOfTheDefinition) {
  for (int ranks : {1, 2, 4, 7}) {
    for (const auto& placement : placements(10, ranks)) {
      for (Summer summer : {Summer::combine, Summer::reduce, Summer::experts}) {
        World w = world(ranks);
        w.placement = placement;
        w.combine = Combine::rank_sums;
        w.combine_dtype = ranks == 4 ? DType::bf16 : DType::f32;
        w.duty.summer = summer;
        w.duty.weigher = summer == Summer::experts ? Weigher::experts : Weigher::combine;
        expect_exact(w);
      }
    }
  }
}

TEST_P(DistributedMember, ManyRanks) {  // F08
  for (int ranks : {130, 257}) {
    World w = world(ranks);
    w.experts = 2 * ranks;
    w.width = 16;
    expect_exact(w);
    w.experts = 40;  // most ranks own nothing
    w.combine = Combine::rank_sums;
    expect_exact(w);
  }
}

TEST_P(DistributedMember, SameBitsForEveryRankCount) {
  World one;
  one.member = &local_member();
  one.one_stream = true;
  one.tokens = {23};
  one.top_k = 4;
  one.experts = 10;
  const auto alone = expect_exact(one)[0].out;
  for (int ranks : {1, 2, 3, 5}) {
    for (const auto& placement : placements(10, ranks)) {
      World w = one;
      w.member = GetParam();
      w.ranks = ranks;
      w.placement = placement;
      w.tokens.assign(static_cast<size_t>(ranks), 0);
      for (int64_t t = 0; t < 23; ++t) ++w.tokens[(t * t) % ranks];
      std::vector<float> together;
      for (const RankResult& r : expect_exact(w)) {
        together.insert(together.end(), r.out.begin(), r.out.end());
      }
      ASSERT_EQ(together.size(), alone.size());
      EXPECT_EQ(std::memcmp(together.data(), alone.data(), alone.size() * sizeof(float)), 0);
    }
  }
}

TEST_P(DistributedMember, RowsOfEveryTypeAndFormat) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    World w = world(3);
    w.hidden_dtype = dtype;
    w.row_gap = 5;
    w.element_step = 2;
    expect_exact(w);
    w.width = 160;
    w.element_step = 1;
    for (ActivationFormat format :
         {ActivationFormat::bf16, ActivationFormat::fp8_tensor, ActivationFormat::fp8_token,
          ActivationFormat::fp8_block, ActivationFormat::mxfp8, ActivationFormat::mxfp4,
          ActivationFormat::nvfp4}) {
      w.input = w.wire = format;
      for (QuantDuty duty : {QuantDuty::source, QuantDuty::destination}) {
        w.quant_duty = format == ActivationFormat::bf16 ? QuantDuty::none : duty;
        w.pass_records = false;
        expect_exact(w);
      }
      w.quant_duty = QuantDuty::source;
      w.pass_records = format != ActivationFormat::bf16;
      expect_exact(w);
    }
  }
}

TEST_P(DistributedMember, WeightOnInput) {
  World w = world(3);
  w.top_k = 1;
  w.duty.weigher = Weigher::input;
  expect_exact(w);
  w.combine = Combine::rank_sums;
  expect_exact(w);
}

TEST_P(DistributedMember, EmptyRanksAndEmptyCalls) {  // F01, F02
  World w = world(4);
  w.tokens = {0, 0, 0, 0};
  expect_exact(w);
  w.tokens = {0, 6, 0, 0};
  expect_exact(w);
  w.tokens = {5, 6, 1, 2};
  w.id = [](int, int64_t, int64_t) { return -1; };
  for (const RankResult& r : expect_exact(w)) {
    EXPECT_EQ(r.dropped, 0);
    for (float v : r.out) EXPECT_EQ(v, 0.0f);
  }
}

TEST_P(DistributedMember, CountMatricesWithEmptyRowsAndColumns) {  // F05
  World two = world(2);
  two.tokens = {2, 0};
  two.id = [](int, int64_t t, int64_t) { return t == 0 ? 0 : 9; };
  expect_exact(two);
  World four = world(4);
  four.tokens = {3, 0, 2, 5};
  four.id = [](int, int64_t t, int64_t j) { return static_cast<int32_t>((t + j) % 5); };
  expect_exact(four);
}

TEST_P(DistributedMember, EverythingToOneRankOrExpert) {  // F07
  World w = world(4);
  w.experts = 16;
  w.top_k = 4;
  w.tokens = {64, 64, 64, 64};
  w.id = [](int, int64_t t, int64_t j) { return static_cast<int32_t>((t + j) % 4); };
  expect_exact(w);
  w.combine = Combine::rank_sums;
  expect_exact(w);
  w.id = [](int, int64_t, int64_t) { return 13; };
  expect_exact(w);
}

TEST_P(DistributedMember, ExpertsThatRanksDoNotDivide) {  // F09
  for (const auto& [experts, ranks] :
       std::vector<std::pair<int64_t, int>>{{30, 8}, {5, 2}, {2, 4}}) {
    World w = world(ranks);
    w.experts = experts;
    w.top_k = 2;
    expect_exact(w);
    w.combine = Combine::rank_sums;
    expect_exact(w);
  }
}

TEST_P(DistributedMember, RankOneServesItsOwnExpertsOnly) {  // F10
  World w = world(4);
  w.experts = 8;
  w.top_k = 6;
  w.tokens = {0, 1, 0, 0};
  w.id = [](int, int64_t, int64_t j) { return std::vector<int32_t>{2, 3, 0, 5, 2, 7}[j]; };
  std::map<int64_t, int32_t> local;
  w.look = [&](int rank, const ExpertRows& rows) {
    if (rank != 1) return;
    ASSERT_EQ(rows.num_rows, 1);
    for (int64_t j = 0; j < 6; ++j) {
      if (rows.ids[j] != LocalExpert::none) local[j] = index_of(rows.ids[j]);
    }
  };
  expect_exact(w);
  EXPECT_EQ(local, (std::map<int64_t, int32_t>{{0, 0}, {1, 1}, {4, 0}}));
}

TEST_P(DistributedMember, DuplicateIdsCountEach) {  // F14
  World w = world(3);
  w.experts = 16;
  w.top_k = 4;
  w.tokens = {8, 57, 0};
  w.id = [](int, int64_t, int64_t j) { return std::vector<int32_t>{5, 9, 9, 2}[j]; };
  expect_exact(w);
  w.combine = Combine::rank_sums;
  expect_exact(w);
}

TEST_P(DistributedMember, OneRowForARankThatIsNeededTwice) {
  World w = world(2);
  w.experts = 4;
  w.tokens = {5, 7};
  w.id = [](int, int64_t, int64_t j) { return static_cast<int32_t>(j == 2 ? 3 : j); };
  std::vector<int64_t> rows(2);
  w.look = [&](int rank, const ExpertRows& r) { rows[rank] = r.num_rows; };
  expect_exact(w);
  EXPECT_EQ(rows, (std::vector<int64_t>{12, 12}));
}

TEST_P(DistributedMember, OneRanksBadIdIsEverybodysError) {  // F13
  World w = world(3);
  w.tokens = {4, 4, 4};
  w.spoiled_rank = 2;
  w.calls = 2;
  w.go_on = true;
  const auto results = run_world(w);
  const auto expected = expected_outputs(w);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(results[r].errors, 1);
    EXPECT_NE(results[r].error.find("rank 2: row 0, slot 0"), std::string::npos)
        << results[r].error;
    EXPECT_EQ(results[r].error, results[0].error);
    EXPECT_EQ(results[r].out, expected[r]);  // the group serves the next call
  }
}

TEST_P(DistributedMember, BadIdsAreDroppedAndCountedWhenUnchecked) {  // F13
  World w = world(3);
  w.checked = false;
  w.tokens = {4, 0, 5};
  w.id = [](int rank, int64_t t, int64_t j) {
    if (rank == 2 && t < 2) return j == 0 ? 2147483647 : j == 1 ? -5 : 10;
    return static_cast<int32_t>(t + j);
  };
  const auto results = expect_exact(w);
  EXPECT_EQ(results[0].dropped, 0);
  EXPECT_EQ(results[1].dropped, 0);
  EXPECT_EQ(results[2].dropped, 6);
}

/// Which slots a bounded capacity keeps: lower ranks and tokens first, or with `shares` the lower
/// tokens of each rank.
std::set<std::tuple<int, int64_t, int64_t>> kept_slots(const World& w, bool gathers, bool batched,
                                                       bool shares) {
  const Problem problem = problem_of(w, 0);
  std::map<std::pair<int, int>, int64_t> used;  // (rank, expert or 0)
  std::set<std::tuple<int, int64_t, int64_t>> kept;
  int64_t gathered = 0;
  const int64_t bound = shares ? w.capacity.max_rows / w.ranks : w.capacity.max_rows;
  for (int r = 0; r < w.ranks; ++r) {
    if (shares) used.clear();
    for (int64_t t = 0; t < w.tokens[r]; ++t, ++gathered) {
      std::map<std::pair<int, int>, bool> here;
      std::vector<float> weights;
      for (int64_t j = 0; j < w.top_k; ++j) weights.push_back(weight_of(w, r, t, j));
      for (int64_t j = 0; j < w.top_k; ++j) {
        const int32_t id = id_of(w, r, t, j);
        if (id < 0) continue;
        const int64_t turn = replica_turn(problem, r, t, weights.data());
        const ExpertHome home = problem.placement->home(id, turn);
        const std::pair<int, int> unit{home.rank, batched ? home.slot : 0};
        if (here.count(unit) == 0) here[unit] = used[unit]++ < bound;
        if (gathers ? gathered < bound : here[unit]) kept.insert({r, t, j});
      }
    }
  }
  return kept;
}

TEST_P(DistributedMember, CapacityRefusesOnAllRanksOrDrops) {
  World w = world(3);
  w.tokens = {7, 0, 6};
  w.capacity = {CapacityPolicy::drop, 3};
  if (!GetParam()->supports(problem_of(w, 0)).ok()) GTEST_SKIP() << "takes the worst case only";
  const int64_t bound = pushes() ? 6 : 3;
  w.capacity = {CapacityPolicy::refuse, bound};
  auto results = run_world(w);
  for (const RankResult& r : results) {
    EXPECT_EQ(r.code, ErrorCode::invalid_argument) << r.error;
    EXPECT_EQ(r.error, results[0].error);
    EXPECT_NE(r.error.find(pushes() ? "its share of the capacity of 6 is 2" : "its capacity is 3"),
              std::string::npos)
        << r.error;
  }
  w.capacity = {CapacityPolicy::refuse, 1000};
  expect_exact(w);

  for (const Combine combine : {Combine::slots, Combine::rank_sums}) {
    w.combine = combine;
    w.capacity = {CapacityPolicy::drop, bound};
    const auto kept = kept_slots(w, gathers(), batched(), pushes());
    results = run_world(w);
    World masked = w;
    masked.id = [&](int r, int64_t t, int64_t j) {
      return kept.count({r, t, j}) != 0 ? id_of(w, r, t, j) : -1;
    };
    const auto expected = expected_outputs(masked);
    for (int r = 0; r < 3; ++r) {
      ASSERT_EQ(results[r].code, ErrorCode::ok) << results[r].error;
      EXPECT_EQ(results[r].out, expected[r]);
      int64_t dropped = 0;
      for (int64_t i = 0; i < w.tokens[r] * w.top_k; ++i) {
        const int64_t t = i / w.top_k, j = i % w.top_k;
        dropped += id_of(w, r, t, j) >= 0 && kept.count({r, t, j}) == 0 ? 1 : 0;
      }
      EXPECT_EQ(results[r].dropped, dropped);
    }
    EXPECT_GT(results[2].dropped, 0);
  }
}

TEST_P(DistributedMember, PlansThatDifferAreNamed) {
  World w = world(2);
  w.tokens = {3, 3};
  for (const bool by_hash : {false, true}) {
    if (pushes() && !by_hash) continue;  // such plans ask for different heaps, see below
    auto ends = comm::make_thread_group(2, std::chrono::seconds(30));
    std::vector<std::string> errors(2);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        Problem problem = problem_of(w, r);
        problem.max_tokens += by_hash ? 0 : r;
        const RowFormat wire = RowFormat::of(ActivationFormat::f32, w.width);
        std::vector<std::byte> room(static_cast<size_t>(w.member->workspace_bytes(problem, wire)) +
                                    128);
        auto address = reinterpret_cast<uintptr_t>(room.data());
        PrepareArgs args;
        args.problem = &problem;
        args.routing.top_k = w.top_k;
        args.wire = wire;
        args.workspace = room.data() + ((address + 127) / 128 * 128 - address);
        args.comm = ends[r].get();
        args.plan = static_cast<uint64_t>(by_hash ? r : 0);  // e.g. another placement
        try {
          const HeapNeed need = w.member->heap_need(problem, wire, args.quant_duty);
          std::unique_ptr<comm::SymmetricHeap> heap;
          if (need.any()) heap = ends[r]->make_heap(need.bytes, need.num_flags, {"heap", 0});
          args.heap = heap.get();
          w.member->prepare_send(args);
          w.member->prepare_receive(args);
        } catch (const Error& e) {
          errors[r] = e.what();
        }
      });
    }
    for (auto& t : threads) t.join();
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("ranks 0 and 1 run different plans"), std::string::npos) << error;
    }
  }
}

TEST_P(DistributedMember, ARankThatFailsElsewhereReleasesItsPeers) {
  for (int step : {1, 2, 3}) {
    World w = world(3);
    w.calls = 2;  // a rank that has pushed all its results is missed in the next call
    w.before = [step](int rank, int now) {
      if (rank == 1 && now == step) throw std::runtime_error("out of paper");
    };
    const auto results = run_world(w);
    for (int r : {0, 2}) {
      EXPECT_EQ(results[r].code, ErrorCode::comm) << results[r].error;
      EXPECT_NE(results[r].error.find("rank 1 gave up: out of paper"), std::string::npos);
    }
  }
}

TEST_P(DistributedMember, ARankThatStallsEndsInATimeoutOnAll) {
  World w = world(3);
  w.deadline = std::chrono::milliseconds(100);
  w.before = [](int rank, int step) {
    if (rank == 1 && step == 2) std::this_thread::sleep_for(std::chrono::milliseconds(400));
  };
  for (const RankResult& r : run_world(w)) {
    EXPECT_EQ(r.code, ErrorCode::timeout) << r.error;
    EXPECT_NE(r.error.find("for rank 1 (last seen in phase dispatch rows, call 0)"),
              std::string::npos)
        << r.error;
    EXPECT_NE(r.error.find("phase combine rows, call 0"), std::string::npos) << r.error;
  }
}

INSTANTIATE_TEST_SUITE_P(Members, DistributedMember,
                         testing::Values(&allgather_member(), &all2all_member(),
                                         &all2all_batched_member(), &push_member(),
                                         &low_latency_member(), &hierarchical_member()),
                         [](const auto& info) { return std::string(info.param->name()); });

class BatchedMember : public testing::TestWithParam<const PrepareFinalize*> {};

INSTANTIATE_TEST_SUITE_P(Members, BatchedMember,
                         testing::Values(&all2all_batched_member(), &low_latency_member()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST(PushedMembers, PeersWithoutAnAddress) {
  for (const PrepareFinalize* member : {&push_member(), &low_latency_member()}) {
    for (Combine combine : {Combine::slots, Combine::rank_sums}) {
      for (DType dtype : {DType::f32, DType::bf16}) {
        World w;
        w.member = member;
        w.far_peers = true;
        w.ranks = 5;
        w.top_k = 3;
        w.experts = 10;
        w.calls = 3;
        w.combine = combine;
        w.combine_dtype = dtype;
        w.tokens = uneven_tokens(5);
        for (int nodes : {1, 2, 5}) {
          w.nodes = nodes;
          w.wire = w.input = ActivationFormat::f32;
          w.quant_duty = QuantDuty::none;
          expect_exact(w);
          w.wire = w.input = ActivationFormat::fp8_token;
          w.quant_duty = QuantDuty::source;
          expect_exact(w);
        }
      }
    }
  }
}

TEST(Hierarchical, NodesNeedNotBeContiguousNorEqual) {
  const std::vector<std::vector<int>> spreads = {{0, 1, 0, 1, 0, 1, 0}, {5, 5, 5, 5, 5, 5, 2},
                                                 {3, 1, 1, 1, 3, 1, 1}, {6, 5, 4, 3, 2, 1, 0},
                                                 {0, 0, 1, 0, 2, 1, 0}, {9, 9, 9, 9, 9, 9, 9}};
  for (const std::vector<int>& nodes : spreads) {
    for (const auto& placement : placements(10, 7)) {
      for (Combine combine : {Combine::slots, Combine::rank_sums}) {
        World w;
        w.member = &hierarchical_member();
        w.ranks = 7;
        w.node_of = nodes;
        w.top_k = 3;
        w.experts = 10;
        w.placement = placement;
        w.combine = combine;
        w.combine_dtype = combine == Combine::slots ? DType::f32 : DType::bf16;
        w.tokens = uneven_tokens(7);
        w.calls = 2;
        expect_exact(w);
      }
    }
  }
}

TEST(Hierarchical, ARowCrossesToANodeOnceAndStaysWithinItsOwn) {
  Problem problem;
  problem.num_ranks = 7;
  const std::vector<int> labels = {4, 2, 4, 2, 2, 9, 4};
  problem.nodes = NodeMap(labels);
  EXPECT_EQ(problem.nodes.num_nodes(), 3);
  EXPECT_EQ(max_relayed_sources(problem), 1 + 3 + 3);  // rank 5 is its node's only one
  for (int source = 0; source < 7; ++source) {
    for (int server = 0; server < 7; ++server) {
      const int relay = relay_of(problem, source, server);
      EXPECT_EQ(labels[relay], labels[server]);
      EXPECT_TRUE(labels[source] != labels[server] || relay == source);
      for (int other = 0; other < 7; ++other) {
        EXPECT_EQ(labels[other] == labels[server], relay_of(problem, source, other) == relay);
      }
    }
  }
  EXPECT_EQ(relay_of(problem, 2, 1), 3);  // the second of node 4 meets the second of node 2
}

TEST(PushedMembers, HeapsOfPlansThatDifferAreRefused) {
  World w;
  w.member = &push_member();
  w.ranks = 2;
  w.tokens = {3, 3};
  auto ends = comm::make_thread_group(2, std::chrono::seconds(30));
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      Problem problem = problem_of(w, r);
      problem.max_tokens += r;
      const HeapNeed need = w.member->heap_need(
          problem, RowFormat::of(ActivationFormat::f32, w.width), QuantDuty::none);
      try {
        ends[r]->make_heap(need.bytes, need.num_flags, {"plan: symmetric heap", 0});
      } catch (const Error& e) {
        errors[r] = e.what();
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_NE(errors[0].find("ranks disagree about a heap"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[0], errors[1]);
}

TEST(PushedMembers, ACallThatARankSkipsIsNamed) {
  World w;
  w.member = &push_member();
  w.ranks = 2;
  w.tokens = {3, 3};
  w.calls = 2;
  w.first_call = [](int rank) { return rank == 1 ? 1 : 0; };
  for (const RankResult& r : run_world(w)) {
    EXPECT_EQ(r.code, ErrorCode::comm) << r.error;
    EXPECT_NE(r.error.find("rank 0 is in call 0, rank 1 in call 1"), std::string::npos) << r.error;
  }
}

TEST_P(BatchedMember, OriginsSayWhereRowsComeFrom) {
  World w;
  w.member = GetParam();
  w.ranks = 3;
  w.top_k = 3;
  w.tokens = uneven_tokens(3);
  const Problem problem = problem_of(w, 0);
  w.look = [&](int rank, const ExpertRows& rows) {
    const auto& mine = problem.placement->experts_of(rank);
    for (size_t e = 0; e < mine.size(); ++e) {
      for (int64_t p = 0; p < rows.expert_num_rows[e]; ++p) {
        const RowOrigin& from = rows.origins[static_cast<int64_t>(e) * rows.rows_per_expert + p];
        EXPECT_EQ(id_of(w, from.rank, from.token, from.slot), mine[e]);
        EXPECT_EQ(from.weight, weight_of(w, from.rank, from.token, from.slot));
      }
    }
  };
  expect_exact(w);
}

TEST(Registry, NamesAndPromises) {
  std::set<std::string_view> names;
  World w;
  w.ranks = 4;
  w.tokens = {8, 8, 8, 8};
  const Problem problem = problem_of(w, 1);
  const RowFormat wire = RowFormat::of(ActivationFormat::f32, w.width);
  for (const PrepareFinalize* member : registry()) {
    EXPECT_TRUE(names.insert(member->name()).second);
    const Traits traits = member->traits(problem);
    if (!traits.moves_rows) continue;
    EXPECT_TRUE(member->supports(problem).ok());
    EXPECT_EQ(traits.max_rows, 32);
    // Two slots a token come back; the row itself goes to two ranks, or to all three peers.
    const int64_t row = member == &allgather_member() ? 3 * (160 + 32) : 2 * (160 + 32);
    EXPECT_EQ(member->wire_bytes(problem, wire), 8 * (row + 2 * 160));
  }
  EXPECT_EQ(names,
            (std::set<std::string_view>{"local", "local_batched", "all2all", "all2all_batched",
                                        "push", "allgather", "low_latency", "hierarchical"}));
}

TEST(Stress, RandomWorldsWithDelays) {
  const char* text = std::getenv("MOEKIT_STRESS_ROUNDS");
  const int64_t worlds = std::max<int64_t>(1, (text != nullptr ? std::atoll(text) : 2000) / 20);
  std::mt19937 random(11);
  const auto below = [&](unsigned n) { return static_cast<int>(random() % n); };
  for (int64_t i = 0; i < worlds; ++i) {
    World w;
    w.ranks = 1 + below(6);
    w.member = std::vector<const PrepareFinalize*>{
        &allgather_member(), &all2all_member(), &all2all_batched_member(),
        &push_member(),      &push_member(),    &low_latency_member()}[below(6)];
    w.experts = 1 + below(12);
    w.top_k = 1 + below(5);
    w.width = 1 + below(70);
    w.seed = i;
    w.calls = 20;
    w.combine = below(2) == 0 ? Combine::slots : Combine::rank_sums;
    w.combine_dtype = below(3) == 0 ? DType::bf16 : DType::f32;
    w.placement = placements(w.experts, w.ranks)[below(3)];
    if (below(3) == 0) {
      w.wire = w.input = ActivationFormat::fp8_token;
      w.quant_duty = below(2) == 0 ? QuantDuty::source : QuantDuty::destination;
    }
    for (int r = 0; r < w.ranks; ++r) w.tokens.push_back(below(2) == 0 ? below(20) : 0);
    w.before = [](int rank, int step) {
      thread_local std::mt19937 own(static_cast<unsigned>(rank * 31 + step));
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 150));
      if (own() % 4 == 0) std::this_thread::yield();
    };
    expect_exact(w);
    ASSERT_FALSE(testing::Test::HasFailure()) << "world " << i;
  }
}

}  // namespace
}  // namespace moekit::prepare
