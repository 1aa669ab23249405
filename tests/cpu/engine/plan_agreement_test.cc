// Ranks compare their plans when a layer is made: what differs is refused on all of them by name,
// what a rank may decide alone is not compared.
#include "engine/plan_agreement.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "moekit/allocator.h"
#include "moekit/error.h"
#include "moekit/layer.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

constexpr const char* kSpec = "E=6,k=2,H=64,I=32,weights=bf16,tokens=4";

/// What one rank's Layer is made from.
struct Maker {
  std::string spec = kSpec;
  int decoder_layer = -1;
  PlanOptions options;

  Maker() {
    options.num_threads = 1;
    options.max_tokens = 8;
  }
  Layer make(const CommunicatorHandle& end) const {
    auto canonical = std::make_shared<CanonicalLayer>(*make_layer(spec).canonical);
    canonical->layer = decoder_layer;
    PlanOptions mine = options;
    mine.comm = end;
    return Layer::from_canonical(canonical, mine);
  }
};

struct Refusal {
  ErrorCode code = ErrorCode::ok;
  std::string text;
};

/// body(rank) on a thread a rank.
std::vector<Refusal> on_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<Refusal> refusals(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const Error& e) {
        refusals[static_cast<size_t>(r)] = {e.code(), e.what()};
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return refusals;
}

void run_zero_tokens(const Layer& layer) {
  float nothing = 0;
  LayerArgs args;
  args.hidden = TensorView::contiguous(&nothing, DType::f32, {0, layer.config().hidden});
  args.output = args.hidden;
  layer.run(args);
}

struct Difference {
  const char* field;
  const char* first;
  const char* other;
  std::function<void(Maker&)> change;
};

const std::vector<Difference>& differences() {
  static const std::vector<Difference> all = {
      {"combine", "slots", "rank_sums", [](Maker& m) { m.options.combine = Combine::rank_sums; }},
      {"combine_dtype", "f32", "bf16", [](Maker& m) { m.options.combine_dtype = DType::bf16; }},
      {"wire", "automatic", "bf16", [](Maker& m) { m.options.wire = Wire::bf16; }},
      {"batch_invariant", "true", "false", [](Maker& m) { m.options.batch_invariant = false; }},
      {"capacity", "exact", "drop",
       [](Maker& m) {
         m.options.capacity = CapacityMode::drop;
         m.options.capacity_rows = 5;
       }},
      {"placement, experts of rank 0", "[0,1", "[0,",
       [](Maker& m) { m.options.placement = "round_robin"; }},
      {"hidden_dtype", "f32", "bf16", [](Maker& m) { m.options.hidden_dtype = DType::bf16; }},
      {"checked", "true", "false", [](Maker& m) { m.options.checked = false; }},
      {"num_nodes", "1", "2", [](Maker& m) { m.options.num_nodes = 2; }},
      {"prepare", "all2all", "allgather", [](Maker& m) { m.options.prepare = "allgather"; }},
      {"experts", "cpu", "ref", [](Maker& m) { m.options.backend = "ref"; }},
      {"gate_up_input", "bf16", "fp8_token",
       [](Maker& m) { m.options.activations = ActivationFormat::fp8_token; }},
      {"num_experts", "6", "8",
       [](Maker& m) { m.spec = "E=8,k=2,H=64,I=32,weights=bf16,tokens=4"; }},
      {"top_k", "2", "3", [](Maker& m) { m.spec = "E=6,k=3,H=64,I=32,weights=bf16,tokens=4"; }},
      {"hidden", "64", "96", [](Maker& m) { m.spec = "E=6,k=2,H=96,I=32,weights=bf16,tokens=4"; }},
      {"inter", "32", "64", [](Maker& m) { m.spec = "E=6,k=2,H=64,I=64,weights=bf16,tokens=4"; }},
      {"gate_up_weights", "bf16", "fp8_block",
       [](Maker& m) { m.spec = "E=6,k=2,H=64,I=32,weights=fp8_block,tokens=4"; }},
      {"activation function", "0", "1",
       [](Maker& m) { m.spec = "E=6,k=2,H=64,I=32,weights=bf16,tokens=4,act=gelu"; }},
      {"shared inter", "0", "32",
       [](Maker& m) { m.spec = "E=6,k=2,H=64,I=32,weights=bf16,tokens=4,shared_I=32"; }},
      {"decoder layer", "-1", "7", [](Maker& m) { m.decoder_layer = 7; }},
  };
  return all;
}

TEST(PlanAgreement, WhatDiffersIsRefusedOnAllRanksByName) {
  for (const Difference& difference : differences()) {
    for (const int ranks : {2, 3}) {
      Maker base, odd;
      base.options.prepare = odd.options.prepare = "all2all";
      base.options.backend = odd.options.backend = "cpu";
      difference.change(odd);
      auto ends = make_thread_ranks(ranks, std::chrono::seconds(60));
      const auto refusals = on_ranks(
          ranks, [&](int r) { (r == ranks - 1 ? odd : base).make(ends[static_cast<size_t>(r)]); });
      const std::string head = "the plans of ranks 0 and " + std::to_string(ranks - 1) +
                               " differ in " + difference.field + ": rank 0 has " +
                               difference.first;
      const std::string other = "rank " + std::to_string(ranks - 1) + " has " + difference.other;
      for (const Refusal& refusal : refusals) {
        EXPECT_EQ(refusal.code, ErrorCode::invalid_argument) << refusal.text;
        EXPECT_EQ(refusal.text.rfind(head, 0), 0u) << refusal.text << "\nexpected: " << head;
        EXPECT_NE(refusal.text.find(other), std::string::npos) << refusal.text;
      }
      // The group is as good as before.
      for (const Refusal& refusal : on_ranks(
               ranks, [&](int r) { run_zero_tokens(base.make(ends[static_cast<size_t>(r)])); })) {
        EXPECT_EQ(refusal.code, ErrorCode::ok) << refusal.text;
      }
    }
  }
}

TEST(PlanAgreement, WhatARankMayDecideAloneIsNotCompared) {
  auto ends = make_thread_ranks(3, std::chrono::seconds(60));
  std::vector<std::string> hashes(3);
  const auto refusals = on_ranks(3, [&](int r) {
    Maker mine;
    mine.options.num_threads = 1 + r;
    mine.options.max_tokens = 3 + r;  // the largest is everybody's capacity
    mine.options.deadline = std::chrono::seconds(5 + r);
    mine.options.allocator = r == 1 ? &default_allocator() : nullptr;
    const Layer layer = mine.make(ends[static_cast<size_t>(r)]);
    hashes[static_cast<size_t>(r)] = layer.explanation().plan.hash;
    run_zero_tokens(layer);
  });
  for (const Refusal& refusal : refusals) EXPECT_EQ(refusal.code, ErrorCode::ok) << refusal.text;
  EXPECT_EQ(hashes[0].size(), 16u);
  EXPECT_EQ(hashes[1], hashes[0]);
  EXPECT_EQ(hashes[2], hashes[0]);
}

TEST(PlanAgreement, ARankWithoutAPlanTellsTheOthers) {
  auto ends = make_thread_ranks(3, std::chrono::seconds(60));
  const auto attempt = [&](const std::function<void(Maker&)>& spoil) {
    return on_ranks(3, [&](int r) {
      Maker mine;
      if (r == 1) spoil(mine);
      mine.make(ends[static_cast<size_t>(r)]);
    });
  };
  auto refusals = attempt([](Maker& m) { m.options.placement = "no/such/file.json"; });
  EXPECT_EQ(refusals[1].code, ErrorCode::invalid_argument);
  for (const int r : {0, 2}) {
    EXPECT_EQ(refusals[r].code, ErrorCode::comm);
    EXPECT_NE(refusals[r].text.find("rank 1 could not make its plan: "), std::string::npos);
    EXPECT_NE(refusals[r].text.find("no/such/file.json"), std::string::npos) << refusals[r].text;
  }
  refusals = attempt([](Maker&) {});
  for (const Refusal& refusal : refusals) EXPECT_EQ(refusal.code, ErrorCode::ok) << refusal.text;
}

/// A way of making a layer that fails before there is anything to plan.
struct Failure {
  const char* words;
  std::function<Layer(const PlanOptions&)> make;
};

const std::vector<Failure>& failures() {
  static const std::vector<Failure> all = {
      {"/no/such/model", [](const PlanOptions& o) { return Layer::open("/no/such/model", 0, o); }},
      {"needs weights", [](const PlanOptions& o) { return Layer::from_canonical(nullptr, o); }},
      {"must be positive",
       [](const PlanOptions& o) {
         MoeConfig config;
         config.num_experts = 2;
         config.top_k = 3;
         return Layer::create(config, {}, o);
       }},
  };
  return all;
}

TEST(PlanAgreement, ARankWithoutWeightsTellsTheOthers) {
  auto ends = make_thread_ranks(3, std::chrono::seconds(60));
  for (int round = 0; round < 10; ++round) {
    for (const Failure& failure : failures()) {
      const auto refusals = on_ranks(3, [&](int r) {
        Maker mine;
        mine.options.comm = ends[static_cast<size_t>(r)];
        if (r == 1) failure.make(mine.options);
        mine.make(ends[static_cast<size_t>(r)]);
      });
      EXPECT_EQ(refusals[1].code, ErrorCode::invalid_argument) << refusals[1].text;
      EXPECT_EQ(refusals[1].text.find("rank 1"), std::string::npos) << refusals[1].text;
      for (const int r : {0, 2}) {
        EXPECT_EQ(refusals[r].code, ErrorCode::comm) << refusals[r].text;
        EXPECT_EQ(refusals[r].text, "rank 1 could not make its plan: " + refusals[1].text);
        EXPECT_NE(refusals[r].text.find(failure.words), std::string::npos) << refusals[r].text;
      }
    }
  }
  // The group is as good as before, also where all ranks fail alike.
  for (const Failure& failure : failures()) {
    for (const Refusal& refusal : on_ranks(3, [&](int r) {
           PlanOptions options;
           options.comm = ends[static_cast<size_t>(r)];
           failure.make(options);
         })) {
      EXPECT_EQ(refusal.code, ErrorCode::invalid_argument) << refusal.text;
    }
  }
  for (const Refusal& refusal :
       on_ranks(3, [&](int r) { run_zero_tokens(Maker().make(ends[static_cast<size_t>(r)])); })) {
    EXPECT_EQ(refusal.code, ErrorCode::ok) << refusal.text;
  }
}

/// Runs body(rank); a rank that throws fails its group with the words at once, as a program that
/// ends does.
std::vector<Refusal> on_ranks_that_give_up(const std::vector<CommunicatorHandle>& ends,
                                           const std::function<void(int)>& body) {
  return on_ranks(static_cast<int>(ends.size()), [&](int r) {
    try {
      body(r);
    } catch (const Error& e) {
      ends[static_cast<size_t>(r)].abort(std::string(to_string(e.code())) + ": " + e.what());
      throw;
    }
  });
}

TEST(PlanAgreement, RanksThatGiveUpAtOnceAllHaveTheRefusal) {
  for (int round = 0; round < 10; ++round) {
    const auto ends = make_thread_ranks(3, std::chrono::seconds(60));
    const auto refusals = on_ranks_that_give_up(ends, [&](int r) {
      Maker mine;
      if (r == 2) mine.options.combine_dtype = DType::bf16;
      mine.make(ends[static_cast<size_t>(r)]);
    });
    for (const Refusal& refusal : refusals) {
      EXPECT_EQ(refusal.code, ErrorCode::invalid_argument) << refusal.text;
      EXPECT_NE(refusal.text.find("the plans of ranks 0 and 2 differ in combine_dtype"),
                std::string::npos)
          << refusal.text;
    }
  }
}

TEST(PlanAgreement, RanksThatGiveUpAtOnceAllHaveTheFullCapacity) {
  const LayerSource source = make_layer(kSpec);
  const std::vector<float> rows = make_rows(source, 8);
  for (const char* prepare : {"all2all", "push", "allgather", "low_latency"}) {
    for (int round = 0; round < 10; ++round) {
      const auto ends = make_thread_ranks(3, std::chrono::seconds(60));
      const auto refusals = on_ranks_that_give_up(ends, [&](int r) {
        Maker mine;
        mine.options.prepare = prepare;
        mine.options.capacity = CapacityMode::refuse;
        mine.options.capacity_rows = 3;
        const Layer layer = mine.make(ends[static_cast<size_t>(r)]);
        std::vector<float> in = rows, out(in.size());
        LayerArgs args;
        args.hidden = TensorView::contiguous(in.data(), DType::f32, {8, source.config.hidden});
        args.output = TensorView::contiguous(out.data(), DType::f32, {8, source.config.hidden});
        layer.run(args);
      });
      for (const Refusal& refusal : refusals) {
        EXPECT_EQ(refusal.code, ErrorCode::invalid_argument) << prepare << ": " << refusal.text;
        EXPECT_NE(refusal.text.find("policy is to refuse"), std::string::npos) << refusal.text;
      }
    }
  }
}

TEST(PlanAgreement, TheHashFollowsThePlan) {
  const auto hash = [](const std::function<void(Maker&)>& change) {
    Maker mine;
    change(mine);
    return mine.make({}).explanation().plan.hash;
  };
  const std::string base = hash([](Maker&) {});
  EXPECT_EQ(hash([](Maker&) {}), base);
  EXPECT_EQ(hash([](Maker& m) { m.options.num_threads = 2; }), base);
  EXPECT_NE(hash([](Maker& m) { m.options.max_tokens = 9; }), base);
  EXPECT_NE(hash([](Maker& m) { m.options.combine = Combine::rank_sums; }), base);
}

TEST(PlanAgreement, TheHashIsTheSameOnEveryMachine) {
  const std::vector<engine::PlanField> fields = {{"top_k", "2"}, {"combine", "slots"}};
  EXPECT_EQ(engine::hash_of(fields), 0x937141d962d2ce24ull);
  const std::vector<engine::PlanField> shifted = {{"top_k2", ""}, {"combine", "slots"}};
  EXPECT_NE(engine::hash_of(shifted), engine::hash_of(fields)) << "names and values are kept apart";
}

TEST(PlanAgreement, LongValuesAreShownAroundTheirDifference) {
  auto ends = make_thread_ranks(2, std::chrono::seconds(60));
  std::string list;
  for (int i = 0; i < 400; ++i) list += std::to_string(i) + ",";
  const auto refusals = on_ranks(2, [&](int r) {
    std::vector<engine::PlanField> fields = {{"placement", list + (r == 0 ? "A" : "B") + list}};
    engine::agree_on_plan(*ends[static_cast<size_t>(r)].impl, 0, fields, nullptr);
  });
  for (const Refusal& refusal : refusals) {
    EXPECT_EQ(refusal.code, ErrorCode::invalid_argument);
    EXPECT_NE(refusal.text.find("398,399,A0,1,2"), std::string::npos) << refusal.text;
    EXPECT_NE(refusal.text.find("398,399,B0,1,2"), std::string::npos) << refusal.text;
    EXPECT_LT(refusal.text.size(), 500u);
  }
}

}  // namespace
}  // namespace moekit::test
