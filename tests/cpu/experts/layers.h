// Small layers of any format for the tests of experts, and the double-precision evaluation that
// they are held to: decoded weights, round-tripped rows, plain loops.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "cpu/linear/matrices.h"
#include "experts/cpu/cpu.h"
#include "problem/canonical_layer.h"
#include "quant/row_codec.h"
#include "quant/stored_codec.h"

namespace moekit::testing {

struct LayerOptions {
  int64_t experts = 4;
  int64_t top_k = 2;
  int64_t hidden = 96;
  int64_t inter = 160;
  ActivationSpec activation{};
  WeightScheme weights{};
  ActivationScheme gate_up_input{}, down_input{};
  bool bias = false;
  bool weight_on_input = false;
  bool unlike_input_scales = false;  ///< per expert, and gate unlike up
};

/// A layer that owns its storage.
struct TestLayer {
  CanonicalLayer layer;
  Problem problem;
  std::vector<int32_t> local;
  std::deque<quant::EncodedMatrix> matrices;
  std::deque<std::vector<float>> biases;

  explicit TestLayer(const LayerOptions& o) {
    MoeConfig& c = layer.config;
    c.num_experts = o.experts;
    c.top_k = o.top_k;
    c.hidden = o.hidden;
    c.inter = o.inter;
    c.activation = o.activation;
    c.gate_up_weights = c.down_weights = o.weights;
    c.gate_up_input = o.gate_up_input;
    c.down_input = o.down_input;
    c.has_gate_up_bias = c.has_down_bias = o.bias;
    c.weight_on_input = o.weight_on_input;
    for (int64_t e = 0; e < o.experts; ++e) {
      const float step = o.unlike_input_scales ? 1.0f + 0.25f * static_cast<float>(e) : 1.0f;
      StoredExpert expert;
      if (o.activation.gated) {
        expert.gate = matrix(o.inter, o.hidden, e * 8 + 1, o.weights, 0.7f);
        expert.gate.input_scale =
            static_scale_of(o.gate_up_input) * step * (o.unlike_input_scales ? 1.5f : 1.0f);
        if (o.weights.format == WeightFormat::nvfp4) expert.gate.global *= 1.37f;
      }
      expert.up = matrix(o.inter, o.hidden, e * 8 + 2, o.weights, 1.0f);
      expert.up.input_scale = static_scale_of(o.gate_up_input) * step;
      expert.down = matrix(o.hidden, o.inter, e * 8 + 3, o.weights, 1.0f);
      expert.down.input_scale = static_scale_of(o.down_input) * step;
      if (o.bias) {
        if (o.activation.gated) expert.gate_bias = vector(o.inter, e * 8 + 4);
        expert.up_bias = vector(o.inter, e * 8 + 5);
        expert.down_bias = vector(o.hidden, e * 8 + 6);
      }
      layer.experts.push_back(expert);
      local.push_back(static_cast<int32_t>(e));
    }
    problem.config = c;
    problem.placement = std::make_shared<ExpertPlacement>(ExpertPlacement::linear(o.experts, 1));
  }

 private:
  StoredMatrix matrix(int64_t rows, int64_t cols, int64_t seed, const WeightScheme& scheme,
                      float scale) {
    const auto w = random_values(rows, cols, static_cast<uint64_t>(seed),
                                 scale / std::sqrt(static_cast<float>(cols)));
    matrices.push_back(quant::encode_matrix(w.data(), rows, cols, scheme));
    return matrices.back().view;
  }
  StoredVector vector(int64_t size, int64_t seed) {
    biases.push_back(random_values(1, size, static_cast<uint64_t>(seed), 0.3f));
    return {reinterpret_cast<const std::byte*>(biases.back().data()), DType::f32, size, 0, 1};
  }
};

struct Routing {
  std::vector<LocalExpert> ids;
  std::vector<float> weights;

  /// Random ids; `masked` of ten slots have none.
  Routing(int64_t rows, int64_t top_k, int64_t experts, uint64_t seed, uint64_t masked = 1) {
    const Rng rng(seed, 3);
    for (int64_t i = 0; i < rows * top_k; ++i) {
      const auto at = static_cast<uint64_t>(i);
      const bool none = rng.below(at + 500000, 10) < masked;
      ids.push_back(none ? LocalExpert::none
                         : static_cast<LocalExpert>(rng.below(at, static_cast<uint64_t>(experts))));
      weights.push_back(0.1f + rng.uniform(at + 900000));
    }
  }
};

inline double activate(const ActivationSpec& s, double g, double u) {
  const auto unary = [&](double x) {
    switch (s.kind) {
      case ActivationKind::silu: return x / (1 + std::exp(-x));
      case ActivationKind::gelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
      case ActivationKind::gelu_tanh:
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      case ActivationKind::swiglu_oai: return x / (1 + std::exp(-double{s.alpha} * x));
      case ActivationKind::relu2: return x > 0 ? x * x : 0.0;
    }
    return x;
  };
  if (!s.gated) return unary(u);
  const double limit = s.limit;
  if (g > limit) g = limit;
  u = u > limit ? limit : u < -limit ? -limit : u;
  return unary(g) * (u + (s.kind == ActivationKind::swiglu_oai ? double{s.beta} : 0.0));
}

inline std::vector<double> product(const StoredMatrix& m, const StoredVector& bias,
                                   const std::vector<float>& x) {
  std::vector<double> y(static_cast<size_t>(m.rows));
  std::vector<float> w(static_cast<size_t>(m.cols));
  for (int64_t n = 0; n < m.rows; ++n) {
    quant::decode_weights(m, n, 0, m.cols, w.data());
    double sum = bias.empty() ? 0.0 : quant::element(bias, n);
    for (int64_t k = 0; k < m.cols; ++k) sum += double{w[k]} * x[k];
    y[n] = sum;
  }
  return y;
}

/// One expert on one row, chain and all.
inline std::vector<double> expert_row(const MoeConfig& c, const StoredExpert& e,
                                      std::vector<float> x, float input_weight = 1.0f) {
  for (float& v : x) v *= input_weight;
  std::vector<float> up_x = x;
  quant::round_trip_row(c.gate_up_input, e.up.input_scale, up_x.data(), e.up.cols);
  const auto u = product(e.up, e.up_bias, up_x);
  std::vector<double> g(u.size(), 0.0);
  if (c.activation.gated) {
    quant::round_trip_row(c.gate_up_input, e.gate.input_scale, x.data(), e.gate.cols);
    g = product(e.gate, e.gate_bias, x);
  }
  std::vector<float> h(u.size());
  for (size_t i = 0; i < h.size(); ++i) {
    h[i] = static_cast<float>(activate(c.activation, g[i], u[i]));
  }
  quant::round_trip_row(c.down_input, e.down.input_scale, h.data(), e.down.cols);
  return product(e.down, e.down_bias, h);
}

struct RunOptions {
  CpuIsa isa = CpuIsa::generic;
  int threads = 2;
  bool summed = true;
  bool weight_input = false;
  std::string knobs;
};

/// Runs experts/cpu on f32 rows [rows, hidden]; the output starts as NaN.
inline std::vector<float> run_cpu(const TestLayer& t, const std::vector<float>& x, int64_t rows,
                                  const Routing& routing, const RunOptions& o) {
  const experts::CpuExperts member(RowsLayout::standard, o.isa);
  ThreadPool pool(o.threads);
  const WeightLayout layout = member.weight_layout(t.layer, t.local);
  Buffer blob(layout.total_bytes());
  std::memset(blob.data(), 0xff, static_cast<size_t>(blob.size()));
  member.pack(t.layer, t.local, layout, blob.data(), pool);
  Buffer workspace(member.workspace_bytes(t.problem, layout, rows, o.threads));
  if (workspace.size() > 0) {
    std::memset(workspace.data(), 0xff, static_cast<size_t>(workspace.size()));
  }
  const int64_t k = t.layer.config.top_k;
  const int64_t width = t.layer.config.hidden;
  std::vector<float> out(static_cast<size_t>(rows * width * (o.summed ? 1 : k)), std::nanf(""));
  experts::Args a;
  a.problem = &t.problem;
  a.layout = &layout;
  a.blob = blob.data();
  a.local_experts = t.local;
  a.duty.weigher = o.weight_input ? Weigher::input : o.summed ? Weigher::experts : Weigher::combine;
  a.duty.summer = o.summed ? Summer::experts : Summer::combine;
  a.in.format = RowFormat::of(ActivationFormat::f32, width);
  a.in.records = reinterpret_cast<const std::byte*>(x.data());
  a.in.record_stride = width * 4;
  a.in.num_rows = rows;
  a.in.top_k = k;
  a.in.ids = routing.ids.data();
  a.in.weights = routing.weights.data();
  a.out = {out.data(), width};
  a.workspace = workspace.data();
  a.threads = &pool;
  member.run(a, o.knobs.empty() ? member.candidates(t.problem, rows).front() : o.knobs);
  return out;
}

/// Expects the same bits from any number of threads, any knobs, and rows alone; `what` names the
/// layer. `routing` has two slots a row.
inline void expect_same_bits_alone(const TestLayer& t, const std::vector<float>& x, int64_t rows,
                                   const Routing& routing, CpuIsa isa, const std::string& what) {
  const int64_t hidden = t.layer.config.hidden;
  const auto all = run_cpu(t, x, rows, routing, {.isa = isa, .threads = 1});
  EXPECT_EQ(all, run_cpu(t, x, rows, routing, {.isa = isa, .threads = 3})) << what;
  EXPECT_EQ(all, run_cpu(t, x, rows, routing, {.isa = isa, .knobs = "row_block=7,owner_slots=0"}))
      << what;
  for (const int64_t r : {int64_t{0}, int64_t{71}, rows - 1}) {
    const std::vector<float> row(x.begin() + r * hidden, x.begin() + (r + 1) * hidden);
    Routing one = routing;
    one.ids.assign(routing.ids.begin() + r * 2, routing.ids.begin() + r * 2 + 2);
    one.weights.assign(routing.weights.begin() + r * 2, routing.weights.begin() + r * 2 + 2);
    const std::vector<float> expected(all.begin() + r * hidden, all.begin() + (r + 1) * hidden);
    EXPECT_EQ(expected, run_cpu(t, row, 1, one, {.isa = isa, .threads = 2}))
        << what << " row " << r;
    EXPECT_EQ(expected, run_cpu(t, row, 1, one, {.isa = isa, .knobs = "owner_slots=0"}))
        << what << " row " << r;
  }
}

/// The chain is exact; two evaluations differ where fp32 sums put an intermediate value on the
/// other side of a rounding boundary of down_input: rarely, by one step of that format.
inline double bound_of(const ActivationScheme& down) {
  switch (down.format) {
    case ActivationFormat::f32: return 5e-6;
    case ActivationFormat::bf16: return 4e-3;
    case ActivationFormat::mxfp4:
    case ActivationFormat::nvfp4: return 8e-2;
    default: return 5e-2;
  }
}

/// The summed output in double precision, [rows, hidden]; NaN marks rows without any expert.
inline std::vector<double> evaluate(const TestLayer& t, const std::vector<float>& x, int64_t rows,
                                    const Routing& routing, bool weight_input = false) {
  const MoeConfig& c = t.layer.config;
  std::vector<double> sums(static_cast<size_t>(rows * c.hidden), std::nan(""));
  for (int64_t r = 0; r < rows; ++r) {
    double* sum = sums.data() + r * c.hidden;
    bool any = false;
    for (int64_t j = 0; j < c.top_k; ++j) {
      const size_t slot = static_cast<size_t>(r * c.top_k + j);
      if (routing.ids[slot] == LocalExpert::none) continue;
      if (!any) std::fill_n(sum, c.hidden, 0.0);
      any = true;
      const std::vector<float> row(x.begin() + r * c.hidden, x.begin() + (r + 1) * c.hidden);
      const float weight = routing.weights[slot];
      const auto y =
          expert_row(c, t.layer.experts[static_cast<size_t>(index_of(routing.ids[slot]))], row,
                     weight_input ? weight : 1.0f);
      for (size_t i = 0; i < y.size(); ++i) sum[i] += weight_input ? y[i] : double{weight} * y[i];
    }
  }
  return sums;
}

/// Largest relative RMS error of a row; rows without any expert must be exact zeros.
inline double worst_row_error(const std::vector<double>& expected, int64_t hidden,
                              const std::vector<float>& out) {
  double worst = 0;
  for (size_t first = 0; first < expected.size(); first += static_cast<size_t>(hidden)) {
    const bool any = !std::isnan(expected[first]);
    double error = 0;
    double norm = 0;
    for (size_t i = first; i < first + static_cast<size_t>(hidden); ++i) {
      if (!any) {
        EXPECT_EQ(out[i], 0.0f) << "a row without expert";
      }
      error += (out[i] - expected[i]) * (out[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    if (!any) continue;
    const double relative = std::sqrt(error / (norm > 0 ? norm : 1));
    // NaN must not slip through a comparison.
    worst = relative <= worst ? worst : relative;
  }
  return worst;
}

inline double worst_row_error(const TestLayer& t, const std::vector<float>& x, int64_t rows,
                              const Routing& routing, const std::vector<float>& out,
                              bool weight_input = false) {
  return worst_row_error(evaluate(t, x, rows, routing, weight_input), t.layer.config.hidden, out);
}

}  // namespace moekit::testing
