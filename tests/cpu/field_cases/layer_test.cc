// Inputs on which engines of this kind have failed elsewhere, through the public path and on every
// back-end that takes them. Buffers of the layer start as NaN.
#include "moekit/layer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <thread>

#include "base/buffer.h"
#include "engine/synthetic.h"
#include "moekit/error.h"
#include "problem/error_bound.h"
#include "support/run_layer.h"

namespace moekit::test {
namespace {

/// Memory whose every float is NaN until it is written.
class PoisonAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    void* data = default_allocator().allocate(bytes, alignment);
    if (data != nullptr) std::memset(data, 0xff, bytes);
    return data;
  }
  void deallocate(void* data, size_t bytes) noexcept override {
    default_allocator().deallocate(data, bytes);
  }
};

Allocator& poison() {
  static PoisonAllocator allocator;
  return allocator;
}

const std::vector<std::string>& backends() {
  static const std::vector<std::string> names = {"cpu", "cpu_batched", "ref"};
  return names;
}

PlanOptions poisoned(const std::string& backend, int64_t max_tokens) {
  PlanOptions options = options_for(backend);
  options.max_tokens = max_tokens;
  options.allocator = &poison();
  return options;
}

/// Rows of one rank with a routing of its own, and an output between guards.
struct Call {
  int64_t tokens, hidden, top_k;
  std::vector<float> rows, weights, memory;
  std::vector<int32_t> ids;

  Call(const MoeConfig& config, std::vector<int32_t> given_ids, std::vector<float> given_weights,
       uint64_t seed)
      : tokens(static_cast<int64_t>(given_ids.size()) / config.top_k),
        hidden(config.hidden),
        top_k(config.top_k),
        rows(engine::make_hidden(tokens, config.hidden, seed)),
        weights(std::move(given_weights)),
        memory(static_cast<size_t>((tokens + 2) * config.hidden), NAN),
        ids(std::move(given_ids)) {}
  float* output() { return memory.data() + hidden; }
  LayerArgs args() {
    LayerArgs a;
    a.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, hidden});
    a.output = TensorView::contiguous(output(), DType::f32, {tokens, hidden});
    a.topk_ids = TensorView::contiguous(ids.data(), DType::i32, {tokens, top_k});
    a.topk_weights = TensorView::contiguous(weights.data(), DType::f32, {tokens, top_k});
    return a;
  }
  std::vector<float> result() { return {output(), output() + tokens * hidden}; }
  /// Rows are written whole, and nothing beside them is.
  void expect_written() {
    for (int64_t i = 0; i < tokens * hidden; ++i) ASSERT_TRUE(std::isfinite(output()[i])) << i;
    for (int64_t i = 0; i < hidden; ++i) {
      ASSERT_TRUE(std::isnan(memory[static_cast<size_t>(i)]));
      ASSERT_TRUE(std::isnan(output()[tokens * hidden + i]));
    }
  }
};

/// body(layer, rank) on a thread a rank; fails the test for what one throws.
void on_ranks(const LayerSource& source, PlanOptions options, int ranks,
              const std::function<void(const Layer&, int)>& body) {
  auto ends = make_thread_ranks(ranks, std::chrono::seconds(60));
  std::vector<std::string> errors(ends.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        PlanOptions mine = options;
        if (ranks > 1) mine.comm = ends[static_cast<size_t>(r)];
        body(Layer::from_canonical(source.canonical, mine), r);
      } catch (const Error& e) {
        errors[static_cast<size_t>(r)] = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

std::vector<float> alone(const LayerSource& source, Call call) {
  const Layer layer = Layer::from_canonical(source.canonical, poisoned("ref", call.tokens + 1));
  layer.run(call.args());
  return call.result();
}

TEST(LayerFieldCases, MinusOneNeverWrapsToTheLastExpert) {  // F11, F12
  const LayerSource source = make_layer("E=8,k=2,H=64,I=32,weights=f32,activations=f32,tokens=2");
  const std::vector<float> weights = {0.9f, 0.1f, 0.5f, 0.5f};
  for (const char* prepare : {"all2all", "allgather", "low_latency"}) {
    PlanOptions options = poisoned("", 4);
    options.prepare = prepare;
    on_ranks(source, options, 4, [&](const Layer& layer, int rank) {
      Call call(source.config, {-1, 7, -1, -1}, weights, 5 + static_cast<uint64_t>(rank));
      Call seven(source.config, {7, -1, -1, -1}, {0.1f, 0, 0, 0}, 5 + static_cast<uint64_t>(rank));
      const std::vector<float> expected = alone(source, seven);
      layer.run(call.args());
      call.expect_written();
      EXPECT_LT(worst_row(call.result(), expected, 64), 1e-5);
      for (int64_t i = 64; i < 128; ++i) EXPECT_EQ(call.output()[i], 0.0f);
    });
  }
}

TEST(LayerFieldCases, RanksWithoutAnyRowOfTheirOwnExperts) {  // F10, F12
  // Every id lives on rank 2: ranks 0, 1 and 3 serve nothing, all get their results.
  const LayerSource source = make_layer("E=8,k=2,H=64,I=32,weights=f32,activations=f32,tokens=3");
  for (const char* prepare : {"all2all", "allgather", "low_latency"}) {
    PlanOptions options = poisoned("", 4);
    options.prepare = prepare;
    on_ranks(source, options, 4, [&](const Layer& layer, int rank) {
      Call call(source.config, {4, 5, 5, 4, 4, -1}, {0.3f, 0.7f, 0.4f, 0.6f, 1.0f, 9.0f},
                20 + static_cast<uint64_t>(rank));
      layer.run(call.args());
      call.expect_written();
      EXPECT_LT(worst_row(call.result(), alone(source, call), 64), 1e-5);
    });
  }
}

TEST(LayerFieldCases, MoreThanAThousandExperts) {  // F17, F18
  for (const int64_t experts : {1024, 1025, 2048}) {
    const LayerSource source = make_layer("E=" + std::to_string(experts) +
                                          ",k=2,H=16,I=16,weights=bf16,activations=f32,tokens=2");
    const auto last = static_cast<int32_t>(experts - 1);
    for (const int ranks : {1, 2, 3}) {
      for (const char* prepare : {"", "allgather", "low_latency"}) {
        if (ranks == 1 && *prepare != '\0') continue;
        PlanOptions options = poisoned("", 4);
        options.prepare = prepare;
        on_ranks(source, options, ranks, [&](const Layer& layer, int rank) {
          Call call(source.config, {0, 1023, std::min(1024, last), last}, {0.4f, 0.6f, 0.7f, 0.3f},
                    static_cast<uint64_t>(rank));
          layer.run(call.args());
          call.expect_written();
          EXPECT_LT(worst_row(call.result(), alone(source, call), 16), 1e-5) << experts;
        });
      }
    }
  }
}

TEST(LayerFieldCases, PaddedWidthsNeverShow) {  // F19, F20, F21, F23
  for (const char* shape : {"H=96,I=96,weights=mxfp4", "H=300,I=704,weights=mxfp4",
                            "H=64,I=72,weights=fp8_block", "H=160,I=128,weights=nvfp4",
                            "H=2880,I=96,weights=nvfp4", "H=300,I=176,weights=int4_g128"}) {
    const LayerSource source = make_layer(std::string("E=4,k=2,tokens=3,") + shape);
    const std::vector<int32_t> ids = {0, 3, 1, 2, 3, 3};
    const std::vector<float> weights = {0.5f, 0.5f, 0.25f, 0.75f, 0.1f, 0.9f};
    const std::vector<float> expected = alone(source, Call(source.config, ids, weights, 1));
    for (const std::string& backend : backends()) {
      for (const int ranks : {1, 2}) {
        on_ranks(source, poisoned(backend, 4), ranks, [&](const Layer& layer, int) {
          std::vector<float> first;
          for (int run = 0; run < 20; ++run) {
            Call call(source.config, ids, weights, 1);
            layer.run(call.args());
            call.expect_written();
            if (run == 0) first = call.result();
            ASSERT_EQ(call.result(), first) << "run " << run;
          }
          EXPECT_LE(worst_row(first, expected, source.config.hidden),
                    row_error_bound(source.config))
              << shape << ", " << backend << ", " << ranks << " ranks";
        });
      }
    }
  }
}

/// One expert with identity-like matrices: gate `g` times identity, up `u` times identity.
struct Diagonal {
  int64_t size;
  std::vector<float> gate_up, down;

  Diagonal(int64_t n, float g, float u, StackedOrder order)
      : size(n), gate_up(static_cast<size_t>(2 * n * n)), down(static_cast<size_t>(n * n)) {
    for (int64_t i = 0; i < n; ++i) {
      const bool interleaved = order == StackedOrder::interleaved;
      const int64_t half = order == StackedOrder::gate_up ? 0 : n;
      const int64_t gate_row = interleaved ? 2 * i : half + i;
      const int64_t up_row = interleaved ? 2 * i + 1 : n - half + i;
      gate_up[static_cast<size_t>(gate_row * n + i)] = g;
      gate_up[static_cast<size_t>(up_row * n + i)] = u;
      down[static_cast<size_t>(i * n + i)] = 1.0f;
    }
  }
};

MoeConfig diagonal_config(int64_t size) {
  MoeConfig config;
  config.num_experts = config.top_k = 1;
  config.hidden = config.inter = size;
  config.gate_up_weights = config.down_weights = {WeightFormat::f32};
  config.gate_up_input = config.down_input = {ActivationFormat::f32};
  return config;
}

/// Output of x on the diagonal expert with router weight `w`.
std::vector<float> run_diagonal(const MoeConfig& config, Diagonal d, StackedOrder order,
                                std::vector<float> x, float w, const std::string& backend) {
  LayerTensors tensors;
  const int64_t n = d.size;
  tensors.gate_up_stacked.codes =
      TensorView::contiguous(d.gate_up.data(), DType::f32, {1, 2 * n, n});
  tensors.down_stacked.codes = TensorView::contiguous(d.down.data(), DType::f32, {1, n, n});
  tensors.stacked_order = order;
  const Layer layer = Layer::create(config, tensors, poisoned(backend, 1));
  Call call(config, {0}, {w}, 1);
  call.rows = std::move(x);
  layer.run(call.args());
  call.expect_written();
  return call.result();
}

TEST(LayerFieldCases, TheOrderOfGateAndUpIsDeclared) {  // F33
  for (const std::string& backend : backends()) {
    for (const StackedOrder order :
         {StackedOrder::gate_up, StackedOrder::up_gate, StackedOrder::interleaved}) {
      const auto y = run_diagonal(diagonal_config(2), Diagonal(2, 1, -2, order), order,
                                  {1.0f, 3.0f}, 1.0f, backend);
      EXPECT_NEAR(y[0], -1.4621172f, 1e-5f) << backend;  // silu(1) * -2
      EXPECT_NEAR(y[1], -17.146334f, 1e-4f) << backend;  // silu(3) * -6
    }
  }
}

TEST(LayerFieldCases, ClampsAreHonouredByEveryBackEnd) {  // F34
  for (const std::string& backend : backends()) {
    MoeConfig config = diagonal_config(2);
    const Diagonal d(2, 20, -30, StackedOrder::gate_up);
    for (const auto& [kind, expected] : {std::pair{ActivationKind::swiglu_oai, -41.999718f},
                                         std::pair{ActivationKind::silu, -48.955363f}}) {
      config.activation = {.kind = kind, .limit = 7.0f};
      const auto y = run_diagonal(config, d, StackedOrder::gate_up, {1.0f, 1.0f}, 1.0f, backend);
      EXPECT_NEAR(y[0], expected, 2e-5f) << backend;
      EXPECT_NEAR(y[1], expected, 2e-5f) << backend;
    }
  }
}

TEST(LayerFieldCases, TheRouterWeightOnTheInputIsNotOnTheOutput) {  // F35
  for (const char* backend : {"cpu", "ref"}) {
    MoeConfig config = diagonal_config(2);
    config.weight_on_input = true;
    const auto y = run_diagonal(config, Diagonal(2, 1, 1, StackedOrder::gate_up),
                                StackedOrder::gate_up, {2.0f, 2.0f}, 0.5f, backend);
    EXPECT_NEAR(y[0], 0.7310586f, 1e-5f) << backend;  // silu(1) * 1; on the output: 1.76
  }
}

TEST(LayerFieldCases, SquareMatricesAreTransposedByDeclarationOnly) {  // F54
  // 2 I = H makes gate_up square, I = H makes down square.
  for (const auto& [hidden, inter] : {std::pair<int64_t, int64_t>{64, 32}, {64, 64}, {48, 32}}) {
    const std::vector<float> up = engine::make_hidden(2 * 2 * inter, hidden, 3);
    const std::vector<float> down = engine::make_hidden(2 * hidden, inter, 4);
    const auto transpose = [](const std::vector<float>& m, int64_t rows, int64_t cols) {
      std::vector<float> t(m.size());
      for (int64_t e = 0; e < 2; ++e) {
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < cols; ++j) {
            t[static_cast<size_t>((e * cols + j) * rows + i)] =
                m[static_cast<size_t>((e * rows + i) * cols + j)];
          }
        }
      }
      return t;
    };
    const auto up_t = transpose(up, 2 * inter, hidden), down_t = transpose(down, hidden, inter);
    MoeConfig config = diagonal_config(hidden);
    config.inter = inter;
    config.num_experts = 2;
    std::vector<std::vector<float>> results;
    for (const bool transposed : {false, true}) {
      LayerTensors t;
      t.transposed = transposed;
      t.gate_up_stacked.codes =
          transposed ? TensorView::contiguous(up_t.data(), DType::f32, {2, hidden, 2 * inter})
                     : TensorView::contiguous(up.data(), DType::f32, {2, 2 * inter, hidden});
      t.down_stacked.codes =
          transposed ? TensorView::contiguous(down_t.data(), DType::f32, {2, inter, hidden})
                     : TensorView::contiguous(down.data(), DType::f32, {2, hidden, inter});
      for (const char* backend : {"cpu", "ref"}) {
        const Layer layer = Layer::create(config, t, poisoned(backend, 2));
        Call call(config, {1, 0}, {1.0f, 1.0f}, 9);
        layer.run(call.args());
        call.expect_written();
        results.push_back(call.result());
      }
    }
    EXPECT_EQ(results[2], results[0]);
    EXPECT_EQ(results[3], results[1]);
    EXPECT_LT(worst_row(results[0], results[1], hidden), 1e-5);
  }
}

TEST(LayerFieldCases, RowsFarApartInTheCallersTensor) {  // F24
  const LayerSource source = make_layer("E=4,k=2,H=64,I=32,weights=bf16,tokens=3");
  const int64_t stride = int64_t{1} << 30;  // row 2 begins beyond 2^31 elements
  Buffer sparse((2 * stride + 64) * 2);     // only the rows' own pages are ever touched
  Call call(source.config, {0, 1, 2, 3, 3, 0}, {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f}, 1);
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 64; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &call.rows[static_cast<size_t>(t * 64 + i)], 4);
      sparse.as<uint16_t>()[t * stride + i] = static_cast<uint16_t>(bits >> 16);
    }
  }
  const std::vector<float> expected = alone(source, call);
  for (const std::string& backend : backends()) {
    const Layer layer = Layer::from_canonical(source.canonical, poisoned(backend, 4));
    LayerArgs args = call.args();
    args.hidden = TensorView::contiguous(sparse.data(), DType::bf16, {3, 64});
    args.hidden.strides[0] = stride;
    layer.run(args);
    EXPECT_LE(worst_row(call.result(), expected, 64), row_error_bound(source.config)) << backend;
  }
}

const Candidate& candidate(const Explanation& explanation, const std::string& name) {
  for (const Candidate& c : explanation.candidates) {
    if (c.name == name) return c;
  }
  throw Error(ErrorCode::internal, "no candidate " + name);
}

TEST(LayerFieldCases, SizesThatNoTileDividesTakeNoOtherPath) {  // F55
  // 176 is no multiple of 32, 192 is: one member serves both in one layout, padded where it must
  // be.
  const auto plan_of = [](const char* inter) {
    return explain_plan(make_layer(std::string("E=128,k=8,H=64,tokens=4,I=") + inter),
                        options_for(""), 1, 4);
  };
  const Explanation odd = plan_of("176"), even = plan_of("192");
  for (const Explanation* e : {&odd, &even}) {
    ASSERT_TRUE(e->chosen);
    EXPECT_EQ(e->plan.backend, "cpu");
    EXPECT_TRUE(candidate(*e, "cpu").reasons.empty());
    for (const Candidate& c : e->candidates) {
      EXPECT_EQ(c.supported, c.reasons.empty()) << c.name << " was passed over in silence";
    }
  }
  EXPECT_EQ(odd.plan.weight_layout, even.plan.weight_layout);
  EXPECT_EQ(odd.plan.prepare, even.plan.prepare);
  EXPECT_EQ(odd.plan.buckets.size(), even.plan.buckets.size());
  EXPECT_EQ(candidate(odd, "cpu").note, candidate(even, "cpu").note);
}

TEST(LayerFieldCases, WhatIsNotCoveredIsRefusedWhenTheLayerIsMade) {  // F56, F57
  const auto refusal = [](const LayerSource& source, const PlanOptions& options, int ranks) {
    std::vector<std::string> texts(static_cast<size_t>(ranks));
    auto ends = make_thread_ranks(ranks, std::chrono::seconds(60));
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        PlanOptions mine = options;
        if (ranks > 1) mine.comm = ends[static_cast<size_t>(r)];
        try {
          Layer::from_canonical(source.canonical, mine);
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), ErrorCode::unsupported) << e.what();
          texts[static_cast<size_t>(r)] = e.what();
        }
      });
    }
    for (std::thread& t : threads) t.join();
    return texts;
  };
  // More slots a token than the exchange holds: named with both figures, on every rank.
  const LayerSource many = make_layer("E=300,k=260,H=16,I=16,tokens=1");
  PlanOptions options = options_for("");
  options.max_tokens = 1;
  for (const std::string& text : refusal(many, options, 2)) {
    EXPECT_NE(text.find("top_k is 260, at most 256 fit"), std::string::npos) << text;
  }
  // A member asked for by name says why it can't, and is not replaced.
  const LayerSource small = make_layer("E=4,k=2,H=64,I=32,tokens=1");
  options.prepare = "local";
  for (const std::string& text : refusal(small, options, 2)) {
    EXPECT_NE(text.find("local"), std::string::npos) << text;
  }
  options = options_for("cpu");
  options.max_tokens = 1;
  options.device = {DeviceType::cuda, 3};
  for (const std::string& text : refusal(small, options, 1)) {
    EXPECT_NE(text.find("runs on the CPU, the plan asks for CUDA device 3"), std::string::npos)
        << text;
  }
}

TEST(LayerFieldCases, TheSameCallHasTheSameBits) {  // F59
  const LayerSource source = make_layer("E=16,k=8,H=96,I=64,tokens=64,shared_I=64");
  const std::vector<float> rows = make_rows(source, 64);
  for (const char* backend : {"cpu", "cpu_batched"}) {
    const std::vector<float> first = run_layer(source, options_for(backend, 3), 1, rows);
    for (int run = 0; run < 20; ++run) {
      ASSERT_EQ(run_layer(source, options_for(backend, 3), 1, rows), first) << "run " << run;
    }
  }
}

}  // namespace
}  // namespace moekit::test
