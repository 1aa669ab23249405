// experts/cpu against a double-precision evaluation, on every ISA of this machine; and the bits
// that must not change.
#include "experts/cpu/cpu.h"

#include <gtest/gtest.h>

#include "cpu/experts/layers.h"
#include "experts/experts.h"
#include "linear/mlp.h"

namespace moekit::experts {
namespace {

using testing::bound_of;
using testing::expect_same_bits_alone;
using testing::LayerOptions;
using testing::random_values;
using testing::Routing;
using testing::run_cpu;
using testing::RunOptions;
using testing::TestLayer;
using testing::worst_row_error;

std::string describe(CpuIsa isa, const LayerOptions& o) {
  return std::string(to_string(isa)) + " " + testing::name_of(o.weights) + " x " +
         to_string(o.gate_up_input.format) + "/" + to_string(o.down_input.format) + " H" +
         std::to_string(o.hidden) + " I" + std::to_string(o.inter);
}

TEST(CpuExperts, EveryFormatPairOnEveryIsa) {
  for (const WeightScheme& weights : testing::all_weight_schemes()) {
    for (const ActivationScheme& input : testing::all_activation_schemes()) {
      LayerOptions o;
      o.weights = weights;
      o.gate_up_input = o.down_input = input;
      o.hidden = 96;
      o.inter = 176;
      const TestLayer t(o);
      for (const int64_t rows : {1, 33}) {
        const auto x = random_values(rows, o.hidden, 77);
        const Routing routing(rows, o.top_k, o.experts, 5);
        const auto expected = testing::evaluate(t, x, rows, routing);
        for (CpuIsa isa : available_cpu_isas()) {
          const auto out = run_cpu(t, x, rows, routing, {.isa = isa});
          EXPECT_LT(worst_row_error(expected, o.hidden, out), bound_of(input))
              << describe(isa, o) << " rows " << rows;
        }
      }
    }
  }
}

TEST(CpuExperts, OddShapesAndBiases) {
  for (const auto& [hidden, inter] :
       {std::pair{33, 33}, {160, 96}, {64, 2880}, {300, 72}, {1, 1}}) {
    for (const WeightFormat format :
         {WeightFormat::bf16, WeightFormat::fp8_block, WeightFormat::mxfp4}) {
      LayerOptions o;
      o.hidden = hidden;
      o.inter = inter;
      o.weights = {format};
      o.gate_up_input = o.down_input = {ActivationFormat::f32};
      o.bias = true;
      const TestLayer t(o);
      const auto x = random_values(5, hidden, 3);
      const Routing routing(5, o.top_k, o.experts, 6, 0);
      for (CpuIsa isa : available_cpu_isas()) {
        const auto out = run_cpu(t, x, 5, routing, {.isa = isa});
        EXPECT_LT(worst_row_error(t, x, 5, routing, out), 2e-5) << describe(isa, o);
      }
    }
  }
}

TEST(CpuExperts, EveryActivationFunction) {
  using K = ActivationKind;
  for (const K kind : {K::silu, K::gelu, K::gelu_tanh, K::swiglu_oai, K::relu2}) {
    for (const bool gated : {true, false}) {
      if (kind == K::swiglu_oai && !gated) continue;
      for (const float limit : {std::numeric_limits<float>::infinity(), 0.4f}) {
        LayerOptions o;
        o.activation = {.kind = kind, .gated = gated, .limit = limit};
        o.gate_up_input = o.down_input = {ActivationFormat::f32};
        o.weights = {WeightFormat::f32};
        const TestLayer t(o);
        const auto x = random_values(6, o.hidden, 4, 3.0f);
        const Routing routing(6, o.top_k, o.experts, 7, 0);
        for (CpuIsa isa : available_cpu_isas()) {
          const auto out = run_cpu(t, x, 6, routing, {.isa = isa});
          EXPECT_LT(worst_row_error(t, x, 6, routing, out), 5e-6)
              << to_string(isa) << " kind " << static_cast<int>(kind) << " gated " << gated;
        }
      }
    }
  }
}

TEST(CpuExperts, StaticInputScalesOfExpertsAndHalvesDiffer) {
  for (const ActivationScheme& input :
       {ActivationScheme{ActivationFormat::fp8_tensor, true},
        ActivationScheme{ActivationFormat::nvfp4, true, ScaleSense::divisor},
        ActivationScheme{ActivationFormat::nvfp4, true}}) {
    LayerOptions o;
    o.weights = {WeightFormat::fp8_channel};
    o.gate_up_input = o.down_input = input;
    o.unlike_input_scales = true;
    const TestLayer t(o);
    const auto x = random_values(20, o.hidden, 8);
    const Routing routing(20, o.top_k, o.experts, 9);
    for (CpuIsa isa : available_cpu_isas()) {
      const auto out = run_cpu(t, x, 20, routing, {.isa = isa});
      EXPECT_LT(worst_row_error(t, x, 20, routing, out), bound_of(input)) << describe(isa, o);
    }
  }
}

TEST(CpuExperts, BitsDoNotDependOnThreadsBatchOrKnobs) {
  const int64_t rows = 150;
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::fp8_channel,
                                    WeightFormat::mxfp4, WeightFormat::nvfp4, WeightFormat::f16}) {
    for (const ActivationFormat input :
         {ActivationFormat::bf16, ActivationFormat::f32, ActivationFormat::fp8_block}) {
      LayerOptions o;
      o.weights = {format};
      o.gate_up_input = o.down_input = {input};
      const TestLayer t(o);
      const auto x = random_values(rows, o.hidden, 10);
      const Routing routing(rows, o.top_k, o.experts, 11);
      for (CpuIsa isa : available_cpu_isas()) {
        expect_same_bits_alone(t, x, rows, routing, isa, describe(isa, o));
      }
    }
  }
}

/// The weighted sum of slot rows is the summed output, bit for bit.
TEST(CpuExperts, SummedEqualsSlotRowsSummedInSlotOrder) {
  LayerOptions o;
  o.top_k = 3;
  const TestLayer t(o);
  const int64_t rows = 12;
  const auto x = random_values(rows, o.hidden, 12);
  const Routing routing(rows, o.top_k, o.experts, 13, 3);
  const CpuIsa isa = available_cpu_isas().back();
  const auto summed = run_cpu(t, x, rows, routing, {.isa = isa});
  const auto slots = run_cpu(t, x, rows, routing, {.isa = isa, .summed = false});
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < o.hidden; ++i) {
      float sum = 0;
      bool first = true;
      for (int64_t j = 0; j < o.top_k; ++j) {
        const size_t slot = static_cast<size_t>(r * o.top_k + j);
        const float value = slots[slot * static_cast<size_t>(o.hidden) + static_cast<size_t>(i)];
        if (routing.ids[slot] == LocalExpert::none) {
          EXPECT_TRUE(std::isnan(value)) << "a slot without expert was written";
          continue;
        }
        const float product = routing.weights[slot] * value;
        sum = first ? product : sum + product;
        first = false;
      }
      EXPECT_EQ(summed[static_cast<size_t>(r * o.hidden + i)], sum);
    }
  }
}

TEST(CpuExperts, EmptyIdleDuplicateAndCrowded) {
  LayerOptions o;
  o.experts = 16;
  o.top_k = 4;
  o.gate_up_input = o.down_input = {ActivationFormat::f32};
  const TestLayer t(o);
  for (CpuIsa isa : available_cpu_isas()) {
    const RunOptions run{.isa = isa};
    // No rows at all.
    EXPECT_TRUE(run_cpu(t, {}, 0, Routing(0, 4, 16, 1), run).empty());
    // Nothing but slots without a local expert: exact zeros.
    Routing none(3, 4, 16, 1, 10);
    for (float v : run_cpu(t, random_values(3, o.hidden, 1), 3, none, run)) EXPECT_EQ(v, 0.0f);
    // The same expert more than once in a row, beside idle experts.
    for (const int64_t rows : {8, 257}) {
      Routing twice(rows, 4, 16, 2, 0);
      for (int64_t r = 0; r < rows; ++r) {
        const int ids[4] = {5, 9, 9, 2};
        for (int j = 0; j < 4; ++j) twice.ids[r * 4 + j] = static_cast<LocalExpert>(ids[j]);
      }
      const auto x = random_values(rows, o.hidden, 15);
      EXPECT_LT(worst_row_error(t, x, rows, twice, run_cpu(t, x, rows, twice, run)), 5e-6);
    }
    // All slots of all rows to expert 0.
    Routing crowd(30, 4, 16, 3, 0);
    crowd.ids.assign(crowd.ids.size(), static_cast<LocalExpert>(0));
    const auto x = random_values(30, o.hidden, 16);
    EXPECT_LT(worst_row_error(t, x, 30, crowd, run_cpu(t, x, 30, crowd, run)), 5e-6);
  }
}

TEST(CpuExperts, WeightOnInput) {
  for (const ActivationFormat input : {ActivationFormat::f32, ActivationFormat::fp8_token}) {
    LayerOptions o;
    o.top_k = 1;
    o.weight_on_input = true;
    o.gate_up_input = o.down_input = {input};
    const TestLayer t(o);
    const auto x = random_values(10, o.hidden, 17);
    const Routing routing(10, 1, o.experts, 18);
    for (CpuIsa isa : available_cpu_isas()) {
      const auto out = run_cpu(t, x, 10, routing, {.isa = isa, .weight_input = true});
      EXPECT_LT(worst_row_error(t, x, 10, routing, out, true), bound_of({input}));
    }
  }
}

/// limit 7, alpha 1.702, shift 1: gate 20 and up -30 give about -42.0; silu clamped alike -48.96.
TEST(CpuExperts, ClampsAreHonoured) {
  for (const auto& [kind, expected] : {std::pair{ActivationKind::swiglu_oai, -41.999718f},
                                       std::pair{ActivationKind::silu, -48.955363f}}) {
    LayerOptions o;
    o.experts = 1;
    o.top_k = 1;
    o.hidden = o.inter = 32;
    o.activation = {.kind = kind, .limit = 7.0f};
    o.weights = {WeightFormat::f32};
    o.gate_up_input = o.down_input = {ActivationFormat::f32};
    TestLayer t(o);
    std::vector<float> gate(32 * 32, 0.0f);
    std::vector<float> up = gate;
    std::vector<float> identity = gate;
    for (int i = 0; i < 32; ++i) {
      gate[i * 33] = 20.0f;
      up[i * 33] = -30.0f;
      identity[i * 33] = 1.0f;
    }
    const auto point = [](StoredMatrix& m, const std::vector<float>& w) {
      m.codes.data = reinterpret_cast<const std::byte*>(w.data());
    };
    point(t.layer.experts[0].gate, gate);
    point(t.layer.experts[0].up, up);
    point(t.layer.experts[0].down, identity);
    Routing routing(1, 1, 1, 1, 0);
    routing.weights[0] = 1.0f;
    for (CpuIsa isa : available_cpu_isas()) {
      const auto out = run_cpu(t, std::vector<float>(32, 1.0f), 1, routing, {.isa = isa});
      for (float v : out) EXPECT_NEAR(v, expected, 2e-5f) << to_string(isa);
    }
  }
}

TEST(CpuExperts, NonFiniteRowsStayInTheirRow) {
  LayerOptions o;
  o.inter = 33;  // padded columns must not turn infinity into NaN of other columns
  const TestLayer t(o);
  auto x = random_values(4, o.hidden, 19);
  x[static_cast<size_t>(o.hidden) + 5] = std::numeric_limits<float>::quiet_NaN();
  x[static_cast<size_t>(o.hidden) * 2 + 7] = std::numeric_limits<float>::infinity();
  const Routing routing(4, o.top_k, o.experts, 20, 0);
  auto clean = x;
  for (int64_t i = o.hidden; i < 3 * o.hidden; ++i) clean[i] = 0.0f;
  for (CpuIsa isa : available_cpu_isas()) {
    const auto out = run_cpu(t, x, 4, routing, {.isa = isa});
    const auto expected = run_cpu(t, clean, 4, routing, {.isa = isa});
    for (int64_t i = 0; i < o.hidden; ++i) {
      EXPECT_EQ(out[i], expected[i]);
      EXPECT_EQ(out[3 * o.hidden + i], expected[3 * o.hidden + i]);
      EXPECT_TRUE(std::isnan(out[o.hidden + i]));
      EXPECT_FALSE(std::isfinite(out[2 * o.hidden + i]));
    }
  }
}

/// Rows that arrive quantized give the bits of rows quantized inside.
void expect_records_like_rows(ActivationFormat format, CpuIsa isa) {
  LayerOptions o;
  o.gate_up_input = o.down_input = {format};
  const TestLayer t(o);
  const int64_t rows = 7;
  auto x = random_values(rows, o.hidden, 21);
  // A row of zeros, a tiny one, huge values, ties, and blocks that are not finite.
  for (int64_t i = 0; i < o.hidden; ++i) {
    x[i] = 0.0f;
    x[o.hidden + i] *= 0x1p-120f;
    x[2 * o.hidden + i] *= 0x1p100f;
    x[3 * o.hidden + i] = static_cast<float>(i % 29) * 0.25f - 3.5f;
  }
  x[4 * o.hidden + 3] = std::numeric_limits<float>::infinity();
  x[5 * o.hidden + 40] = std::numeric_limits<float>::quiet_NaN();
  const Routing routing(rows, o.top_k, o.experts, 22);
  const RowFormat record = RowFormat::of(format, o.hidden);
  std::vector<std::byte> records(static_cast<size_t>(rows * record.record_bytes));
  for (int64_t r = 0; r < rows; ++r) {
    quant::encode_row(o.gate_up_input, 1.0f, x.data() + r * o.hidden, o.hidden,
                      records.data() + r * record.record_bytes);
  }
  const CpuExperts member(RowsLayout::standard, isa);
  ThreadPool pool(2);
  const WeightLayout layout = member.weight_layout(t.layer, t.local);
  Buffer blob(layout.total_bytes());
  member.pack(t.layer, t.local, layout, blob.data(), pool);
  Buffer workspace(member.workspace_bytes(t.problem, layout, rows, 2));
  std::vector<float> out(static_cast<size_t>(rows * o.hidden));
  Args a;
  a.problem = &t.problem;
  a.layout = &layout;
  a.blob = blob.data();
  a.local_experts = t.local;
  a.duty = {Weigher::experts, Summer::experts};
  a.in.format = record;
  a.in.records = records.data();
  a.in.record_stride = record.record_bytes;
  a.in.num_rows = rows;
  a.in.top_k = o.top_k;
  a.in.ids = routing.ids.data();
  a.in.weights = routing.weights.data();
  a.out = {out.data(), o.hidden};
  a.workspace = workspace.data();
  a.threads = &pool;
  member.run(a, "");
  const auto inside = run_cpu(t, x, rows, routing, {.isa = isa});
  for (size_t i = 0; i < out.size(); ++i) {
    const bool same = out[i] == inside[i] || (std::isnan(out[i]) && std::isnan(inside[i]));
    ASSERT_TRUE(same) << to_string(isa) << " " << to_string(format) << " row "
                      << i / static_cast<size_t>(o.hidden) << ": " << out[i] << " and "
                      << inside[i];
  }
}

TEST(CpuExperts, QuantizedRecords) {
  for (CpuIsa isa : available_cpu_isas()) {
    for (const ActivationFormat format :
         {ActivationFormat::fp8_token, ActivationFormat::fp8_block, ActivationFormat::mxfp8,
          ActivationFormat::mxfp4, ActivationFormat::nvfp4, ActivationFormat::bf16}) {
      expect_records_like_rows(format, isa);
    }
  }
}

TEST(CpuExperts, BatchedRowsHaveTheBitsOfStandardRows) {
  LayerOptions o;
  o.top_k = 1;
  const TestLayer t(o);
  const int64_t capacity = 9;
  const std::vector<int32_t> counts = {3, 0, 9, 1};
  const auto x = random_values(4 * capacity, o.hidden, 23);
  const CpuIsa isa = available_cpu_isas().back();
  const CpuExperts member(RowsLayout::batched, isa);
  ThreadPool pool(2);
  const WeightLayout layout = member.weight_layout(t.layer, t.local);
  Buffer blob(layout.total_bytes());
  member.pack(t.layer, t.local, layout, blob.data(), pool);
  Buffer workspace(member.workspace_bytes(t.problem, layout, capacity, 2));
  std::vector<float> out(x.size(), -1.0f);
  Args a;
  a.problem = &t.problem;
  a.layout = &layout;
  a.blob = blob.data();
  a.local_experts = t.local;
  a.in.layout = RowsLayout::batched;
  a.in.format = RowFormat::of(ActivationFormat::f32, o.hidden);
  a.in.records = reinterpret_cast<const std::byte*>(x.data());
  a.in.record_stride = o.hidden * 4;
  a.in.rows_per_expert = capacity;
  a.in.expert_num_rows = counts.data();
  a.in.top_k = 1;
  a.out = {out.data(), o.hidden};
  a.workspace = workspace.data();
  a.threads = &pool;
  member.run(a, "");
  for (int64_t e = 0; e < 4; ++e) {
    for (int64_t r = 0; r < capacity; ++r) {
      const auto at = static_cast<size_t>((e * capacity + r) * o.hidden);
      const std::vector<float> got(out.begin() + static_cast<int64_t>(at),
                                   out.begin() + static_cast<int64_t>(at) + o.hidden);
      if (r >= counts[static_cast<size_t>(e)]) {
        EXPECT_EQ(got, std::vector<float>(static_cast<size_t>(o.hidden), -1.0f));
        continue;
      }
      const std::vector<float> row(x.begin() + static_cast<int64_t>(at),
                                   x.begin() + static_cast<int64_t>(at) + o.hidden);
      Routing one(1, 1, 4, 1, 0);
      one.ids[0] = static_cast<LocalExpert>(e);
      EXPECT_EQ(got, run_cpu(t, row, 1, one, {.isa = isa, .summed = false}));
    }
  }
}

TEST(CpuExperts, NoLocalExperts) {
  LayerOptions o;
  TestLayer t(o);
  t.local.clear();
  const auto x = random_values(3, o.hidden, 24);
  const Routing none(3, o.top_k, o.experts, 25, 10);
  for (float v : run_cpu(t, x, 3, none, {.isa = available_cpu_isas().back()})) EXPECT_EQ(v, 0.0f);
}

TEST(Mlp, IsOneExpertOfALayer) {
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::int4_group}) {
    LayerOptions o;
    o.experts = 1;
    o.top_k = 1;
    o.weights = {format, format == WeightFormat::int4_group ? 32 : 0};
    const TestLayer t(o);
    const int64_t rows = 20;
    const auto x = random_values(rows, o.hidden, 26);
    const linear::Mlp mlp(t.layer.experts[0], o.activation, o.gate_up_input, o.down_input);
    ASSERT_TRUE(mlp.supports());
    ThreadPool pool(2);
    Buffer blob(mlp.packed_bytes());
    mlp.pack(blob.data(), pool);
    Buffer workspace(mlp.workspace_bytes(rows, 2));
    std::vector<float> y(static_cast<size_t>(rows * o.hidden));
    mlp.run({.blob = blob.data(),
             .x = x.data(),
             .x_stride = o.hidden,
             .num_rows = rows,
             .y = y.data(),
             .workspace = workspace.data(),
             .threads = &pool});
    Routing routing(rows, 1, 1, 1, 0);
    routing.weights.assign(routing.weights.size(), 1.0f);
    EXPECT_LT(worst_row_error(t, x, rows, routing, y), 4e-3);
  }
}

TEST(Registry, ReferenceIsLast) {
  const auto members = registry();
  ASSERT_GE(members.size(), 4u);
  EXPECT_EQ(members.front()->name(), "cpu");
  EXPECT_EQ(members[1]->name(), "cpu_batched");
}

}  // namespace
}  // namespace moekit::experts
