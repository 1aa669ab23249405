// Tensor parallelism: slices of whole blocks, sums in rank order, and what can't be sliced.
#include "engine/tensor_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <thread>

#include "moekit/error.h"
#include "moekit/layer.h"
#include "problem/rank_map.h"
#include "problem/tensor_slice.h"
#include "quant/stored_codec.h"
#include "support/problems.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

/// Slices change nothing but the order in which down's `inter` products are added, in fp32: each
/// order errs by a random walk of `inter` roundings; 8 covers the worst row.
double sum_bound(const MoeConfig& config, int tp) {
  return 8 * 0x1p-24 * (std::sqrt(static_cast<double>(config.inter)) + tp + 4);
}

PlanOptions sliced(int tp, const std::string& backend = "") {
  PlanOptions options = options_for(backend, 1);
  options.tp = tp;
  return options;
}

/// The error of a run, or its output.
struct Outcome {
  std::vector<float> output;
  ErrorCode code = ErrorCode::ok;
  std::string error;
};

Outcome try_run(const LayerSource& layer, const PlanOptions& options, int ranks,
                const std::vector<float>& rows) {
  Outcome outcome;
  try {
    outcome.output = run_layer(layer, options, ranks, rows);
  } catch (const Error& e) {
    outcome.code = e.code();
    outcome.error = e.what();
  }
  return outcome;
}

/// tp 2, 3, 4 on 1, 2 and 3 shares of the experts: near tp = 1, the same bits for every number of
/// shares, or refused because there are fewer blocks than slices.
void expect_slices(const std::string& spec, const std::string& backend) {
  SCOPED_TRACE(spec + " on " + backend);
  const LayerSource layer = make_layer(spec);
  const auto rows = make_rows(layer, 9);
  const auto whole = run_layer(layer, sliced(1, backend), 1, rows);
  const int64_t granule = slice_granule(*layer.canonical, layer.config.down_input);
  const int64_t blocks = (layer.config.inter + granule - 1) / granule;
  for (const int tp : {2, 3, 4}) {
    const Outcome one = try_run(layer, sliced(tp, backend), tp, rows);
    if (blocks < tp) {
      EXPECT_EQ(one.code, ErrorCode::unsupported) << "tp " << tp;
      EXPECT_NE(one.error.find("can't be split over"), std::string::npos) << one.error;
      continue;
    }
    ASSERT_EQ(one.error, "") << "tp " << tp;
    EXPECT_LE(worst_row(one.output, whole, layer.config.hidden), sum_bound(layer.config, tp))
        << "tp " << tp;
    for (const int ep : {2, 3}) {
      const Outcome more = try_run(layer, sliced(tp, backend), tp * ep, rows);
      EXPECT_EQ(more.error, "");
      EXPECT_EQ(more.output, one.output) << "tp " << tp << ", ep " << ep;
    }
  }
}

TEST(TensorParallel, EveryWeightFormat) {
  for (const std::string& spec : problems_of_every_weight_format()) expect_slices(spec, "cpu");
  for (const char* weights : {"fp8_block", "int4_g128_zp", "nvfp4", "mxfp4", "int4_channel_zp"}) {
    expect_slices(std::string("E=5,k=2,H=96,I=600,bias=both,tokens=9,weights=") + weights, "cpu");
  }
}

TEST(TensorParallel, TheReferenceToo) {
  for (const char* spec : {"E=5,k=2,H=64,I=170,tokens=9,weights=nvfp4,bias=both",
                           "E=5,k=2,H=64,I=300,tokens=9,weights=fp8_block,activations=fp8_block",
                           "E=8,k=4,H=96,I=96,tokens=5,act=swiglu_oai,bias=both,weights=mxfp4"}) {
    expect_slices(spec, "ref");
    expect_slices(spec, "cpu_batched");
  }
}

TEST(TensorParallel, SharedExpertsLatentWidthAndActivations) {
  for (const char* spec :
       {"E=5,k=3,H=160,I=96,tokens=7,act=silu@2", "E=8,k=2,H=64,I=40,tokens=4,act=silu_nogate",
        "E=8,k=3,H=128,I=96,shared_I=192,tokens=6,act=relu2,weights=nvfp4,"
        "activations=nvfp4_static",
        "E=8,k=3,H=128,I=64,shared_I=96@gate,latent=32,tokens=6,bias=down",
        "E=16,k=4,H=192,I=600,shared_I=64,tokens=8,router=sigmoid_bias@g4/2@x2.5,"
        "weights=fp8_block,activations=fp8_block"}) {
    expect_slices(spec, "");
  }
}

/// Formats whose scale covers a block are exact on slices; those whose scale covers a row refuse.
TEST(TensorParallel, EveryActivationFormat) {
  const std::map<std::string, bool> refuses = {
      {"f32", false},         {"bf16", false},           {"fp8_tensor", false},
      {"fp8_token", true},    {"fp8_token_ue8m0", true}, {"fp8_block", false},
      {"mxfp8", false},       {"mxfp4", false},          {"nvfp4", true},
      {"nvfp4_static", false}};
  for (const auto& [activations, refused] : refuses) {
    const std::string spec = "E=6,k=2,H=96,I=400,tokens=9,weights=bf16,activations=" + activations;
    if (!refused) {
      expect_slices(spec, "cpu");
      continue;
    }
    const LayerSource layer = make_layer(spec);
    const Outcome outcome = try_run(layer, sliced(2), 2, make_rows(layer, 4));
    EXPECT_EQ(outcome.code, ErrorCode::unsupported) << spec;
    EXPECT_NE(outcome.error.find("needs the whole intermediate row"), std::string::npos)
        << outcome.error;
  }
  // The format that counts is the one asked for, not the checkpoint's.
  const LayerSource layer = make_layer("E=6,k=2,H=96,I=400,tokens=9,weights=bf16");
  PlanOptions options = sliced(2);
  options.activations = ActivationFormat::fp8_token;
  EXPECT_EQ(try_run(layer, options, 2, make_rows(layer, 4)).code, ErrorCode::unsupported);
  options.activations = ActivationFormat::fp8_block;
  EXPECT_EQ(try_run(layer, options, 2, make_rows(layer, 4)).error, "");
}

TEST(TensorParallel, SlicesCoverTheColumnsInWholeBlocks) {
  const LayerSource layer = make_layer("E=2,k=1,H=64,I=600,tokens=4,weights=fp8_block");
  for (const int tp : {1, 2, 3, 4, 5}) {
    int64_t next = 0;
    for (int t = 0; t < tp; ++t) {
      const TensorSlice slice = tensor_slice(*layer.canonical, layer.config.down_input, tp, t);
      EXPECT_EQ(slice.first, next);
      EXPECT_EQ(slice.first % 128, 0);
      EXPECT_GT(slice.count, 0);
      next += slice.count;
    }
    EXPECT_EQ(next, 600);
  }
  EXPECT_THROW(tensor_slice(*layer.canonical, layer.config.down_input, 6, 0), Error);
}

TEST(TensorParallel, SlicesAreViewsOfTheSameWeights) {
  for (const std::string& spec : problems_of_every_weight_format()) {
    const LayerSource layer = make_layer(spec);
    const CanonicalLayer& whole = *layer.canonical;
    const int64_t granule = slice_granule(whole, layer.config.down_input);
    if (layer.config.inter <= granule) continue;
    for (int t = 0; t < 2; ++t) {
      const TensorSlice slice = tensor_slice(whole, layer.config.down_input, 2, t);
      const CanonicalLayer part = slice_layer(whole, slice, t);
      EXPECT_EQ(part.config.inter, slice.count);
      const StoredExpert& a = part.experts[1];
      const StoredExpert& b = whole.experts[1];
      std::vector<float> got(400), want(400);
      for (const int64_t n : {int64_t{0}, slice.count - 1}) {
        quant::decode_weights(a.up, n, 0, 300, got.data());
        quant::decode_weights(b.up, slice.first + n, 0, 300, want.data());
        EXPECT_EQ(got, want) << spec;
      }
      got.assign(400, 0);
      want.assign(400, 0);
      quant::decode_weights(a.down, 7, 0, slice.count, got.data());
      quant::decode_weights(b.down, 7, slice.first, slice.count, want.data());
      EXPECT_EQ(got, want) << spec;
    }
  }
}

TEST(TensorParallel, ReplicatedTokensGiveEveryRankTheWholeOutput) {
  const LayerSource layer =
      make_layer("E=8,k=3,H=128,I=96,shared_I=96@gate,latent=32,tokens=6,bias=down");
  const auto rows = make_rows(layer, 10);
  const int64_t hidden = layer.config.hidden;
  const auto ends = make_thread_ranks(6);  // ep 2, tp 3
  std::vector<std::vector<float>> outputs(6, std::vector<float>(5 * hidden));
  std::vector<std::string> errors(6);
  std::vector<std::thread> threads;
  for (int r = 0; r < 6; ++r) {
    threads.emplace_back([&, r] {
      try {
        PlanOptions options = sliced(3);
        options.comm = ends[r];
        options.max_tokens = 5;
        const Layer mine = Layer::from_canonical(layer.canonical, options);
        EXPECT_EQ(mine.config().inter, 96);
        EXPECT_EQ(mine.config().shared.inter, 96);
        EXPECT_EQ(mine.placement().experts_of_rank.size(), 2u);
        LayerArgs args;
        args.hidden =
            TensorView::contiguous(rows.data() + r / 3 * 5 * hidden, DType::f32, {5, hidden});
        args.output = TensorView::contiguous(outputs[r].data(), DType::f32, {5, hidden});
        mine.run(args);
        const LoadStatistics load = mine.gather_load_statistics();
        EXPECT_EQ(load.tokens, 10);
        EXPECT_EQ(load.per_rank[0] + load.per_rank[1], 30);
      } catch (const std::exception& e) {
        errors[r] = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (int r = 0; r < 6; ++r) {
    EXPECT_EQ(errors[r], "");
    EXPECT_EQ(outputs[r], outputs[r / 3 * 3]) << "rank " << r;
  }
  auto both = outputs[0];
  both.insert(both.end(), outputs[3].begin(), outputs[3].end());
  EXPECT_EQ(both, run_layer(layer, sliced(3), 3, rows));
}

TEST(TensorParallel, PlacementsChangeUnderSlicesToo) {
  const LayerSource layer = make_layer("E=12,k=3,H=64,I=96,weights=nvfp4,tokens=8");
  const auto rows = make_rows(layer, 12);
  PlanOptions options = sliced(2);
  const auto expected = run_layer(layer, options, 4, rows);
  options.slots_per_rank = 8;
  RankedLayer ranks(layer, options, 4, 12);
  RankedInputs inputs;
  inputs.hidden = TensorView::contiguous(rows.data(), DType::f32, {12, layer.config.hidden});
  RankedOutputs outputs;
  ranks.run(inputs, outputs);
  EXPECT_EQ(outputs.output, expected);
  EXPECT_EQ(ranks.load_statistics().tokens, 12);
  const PlacementChange change =
      ranks.set_placement({{{0, 2, 4, 6, 8, 10, 1, 3}, {1, 3, 5, 7, 9, 11}}});
  EXPECT_EQ(change.experts_packed, 2 * (3 + 3)) << "both slices of what is new to a share";
  ranks.run(inputs, outputs);
  EXPECT_EQ(outputs.output, expected);
}

TEST(TensorParallel, UnlikeTokenCountsInAGroupAreNamed) {
  const LayerSource layer = make_layer("E=4,k=2,H=64,I=96,tokens=8");
  const auto rows = make_rows(layer, 4);
  const auto ends = make_thread_ranks(2, std::chrono::seconds(5));
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      PlanOptions options = sliced(2);
      options.comm = ends[r];
      options.max_tokens = 4;
      const Layer mine = Layer::from_canonical(layer.canonical, options);
      std::vector<float> output(4 * 64);
      LayerArgs args;
      args.hidden = TensorView::contiguous(rows.data(), DType::f32, {3 + r, 64});
      args.output = TensorView::contiguous(output.data(), DType::f32, {3 + r, 64});
      try {
        mine.run(args);
      } catch (const Error& e) {
        errors[r] = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("tensor-parallel sum"), std::string::npos) << error;
  }
}

TEST(TensorParallel, RanksMustBeAMultiple) {
  const LayerSource layer = make_layer("E=4,k=2,H=64,I=96,tokens=8");
  const Outcome outcome = try_run(layer, sliced(2), 3, make_rows(layer, 3));
  EXPECT_EQ(outcome.code, ErrorCode::invalid_argument);
  EXPECT_NE(outcome.error.find("no multiple of tp = 2"), std::string::npos) << outcome.error;
  EXPECT_EQ(try_run(layer, sliced(0), 2, make_rows(layer, 3)).code, ErrorCode::invalid_argument);
}

/// dp x ep x tp ranks: each copy of the layer is a group of its own, made by split().
TEST(RankMaps, CopiesOfALayerExchangeNothing) {
  const RankMap map = RankMap::of(8, 2, 2);
  const LayerSource layer = make_layer("E=6,k=2,H=64,I=64,act=silu,weights=mxfp8,shared_I=64");
  const int64_t hidden = layer.config.hidden, share = 3;  // tokens of a share of the experts
  std::vector<std::vector<float>> rows, expected;
  for (int dp = 0; dp < map.dp_size; ++dp) {
    rows.push_back(make_rows(layer, share * map.ep_size, 50 + dp));
    expected.push_back(run_layer(layer, sliced(2), map.ep_size * map.tp_size, rows.back()));
  }
  const auto ends = make_thread_ranks(map.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < map.size(); ++r) {
    threads.emplace_back([&, r] {
      const RankCoords at = map.coords_of(r);
      PlanOptions options = sliced(2);
      options.comm = ends[r].split(at.dp, r);
      options.max_tokens = share;
      const Layer mine = Layer::from_canonical(layer.canonical, options);
      std::vector<float> output(static_cast<size_t>(share * hidden));
      LayerArgs args;
      args.hidden = TensorView::contiguous(rows[at.dp].data() + at.ep * share * hidden, DType::f32,
                                           {share, hidden});
      args.output = TensorView::contiguous(output.data(), DType::f32, {share, hidden});
      // The second copy makes more calls than the first.
      for (int call = 0; call < 1 + at.dp; ++call) mine.run(args);
      const auto* same = expected[at.dp].data() + at.ep * share * hidden;
      EXPECT_TRUE(std::equal(output.begin(), output.end(), same)) << "rank " << r;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace moekit::test
