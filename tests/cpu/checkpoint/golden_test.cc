// The whole MoE block computed naively in double precision from the decoded views, against the
// output of the tool that wrote each fixture: proves names, layouts, scale conventions and router
// recipes together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "fixture_list.h"
#include "moekit/checkpoint.h"
#include "problem/canonical_layer.h"
#include "quant/stored_codec.h"
#include "tensor/float_formats.h"

namespace moekit {
namespace {

using checkpoint::SafetensorsFile;
using checkpoint::TensorEntry;
using Vec = std::vector<double>;

/// Row-relative error that fp32 accumulation of the goldens leaves.
constexpr double kBound = 1e-5;

struct Matrix {
  int64_t rows = 0, cols = 0;
  Vec values;
  double at(int64_t r, int64_t c) const { return values[static_cast<size_t>(r * cols + c)]; }
};

Matrix decode(const StoredMatrix& m) {
  Matrix out{m.rows, m.cols, Vec(static_cast<size_t>(m.rows * m.cols))};
  std::vector<float> row(static_cast<size_t>(m.cols));
  for (int64_t r = 0; r < m.rows; ++r) {
    quant::decode_weights(m, r, 0, m.cols, row.data());
    std::copy(row.begin(), row.end(), out.values.begin() + r * m.cols);
  }
  return out;
}

Vec times(const Matrix& m, const Vec& x) {
  Vec y(static_cast<size_t>(m.rows), 0.0);
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t c = 0; c < m.cols; ++c)
      y[static_cast<size_t>(r)] += m.at(r, c) * x[static_cast<size_t>(c)];
  }
  return y;
}

void add(Vec& y, const StoredVector& bias) {
  if (bias.empty()) return;
  for (size_t i = 0; i < y.size(); ++i) y[i] += quant::element(bias, static_cast<int64_t>(i));
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double activate(const ActivationSpec& a, double gate, double up) {
  const double limit = a.limit;
  switch (a.kind) {
    case ActivationKind::relu2: return std::pow(std::max(0.0, up), 2);
    case ActivationKind::silu:
      gate = std::min(gate, limit);
      return gate * sigmoid(gate) * std::clamp(up, -limit, limit);
    case ActivationKind::swiglu_oai:
      gate = std::min(gate, limit);
      return gate * sigmoid(double{a.alpha} * gate) * (std::clamp(up, -limit, limit) + a.beta);
    default: ADD_FAILURE() << "no fixture has this activation"; return 0.0;
  }
}

struct Expert {
  std::optional<Matrix> gate;
  Matrix up, down;
  const StoredExpert* stored = nullptr;

  explicit Expert(const StoredExpert& s) : up(decode(s.up)), down(decode(s.down)), stored(&s) {
    if (!s.gate.empty()) gate = decode(s.gate);
  }
  Vec apply(const ActivationSpec& a, const Vec& x) const {
    Vec u = times(up, x);
    add(u, stored->up_bias);
    Vec g(u.size(), 0.0);
    if (gate) {
      g = times(*gate, x);
      add(g, stored->gate_bias);
    }
    for (size_t i = 0; i < u.size(); ++i) u[i] = activate(a, g[i], u[i]);
    Vec y = times(down, u);
    add(y, stored->down_bias);
    return y;
  }
};

Vec scores_of(Scoring scoring, const Vec& logits) {
  Vec s = logits;
  switch (scoring) {
    case Scoring::logits: break;
    case Scoring::sigmoid:
      for (double& v : s) v = sigmoid(v);
      break;
    case Scoring::sqrt_softplus:
      for (double& v : s) v = std::sqrt(std::log1p(std::exp(v)));
      break;
    case Scoring::softmax: {
      const double top = *std::max_element(s.begin(), s.end());
      double sum = 0;
      for (double& v : s) sum += v = std::exp(v - top);
      for (double& v : s) v /= sum;
    }
  }
  return s;
}

struct Choice {
  std::vector<int64_t> ids;
  Vec weights;
};

/// Drops all experts outside the best groups.
void keep_groups(const RouterSpec& r, Vec& c) {
  if (r.num_groups <= 1) return;
  const size_t size = c.size() / static_cast<size_t>(r.num_groups);
  std::vector<std::pair<double, int>> groups;
  for (int g = 0; g < r.num_groups; ++g) {
    Vec part(c.begin() + static_cast<long>(static_cast<size_t>(g) * size),
             c.begin() + static_cast<long>((static_cast<size_t>(g) + 1) * size));
    std::sort(part.rbegin(), part.rend());
    groups.emplace_back(r.group_score == GroupScore::max ? part[0] : part[0] + part[1], g);
  }
  std::stable_sort(groups.begin(), groups.end(), [](auto a, auto b) { return a.first > b.first; });
  for (size_t i = static_cast<size_t>(r.topk_groups); i < groups.size(); ++i) {
    const size_t g = static_cast<size_t>(groups[i].second);
    std::fill_n(c.begin() + static_cast<long>(g * size), size, -1e300);
  }
}

Choice route(const CanonicalLayer& layer, const Vec& logits) {
  const RouterSpec& r = layer.config.router;
  const Vec scores = scores_of(r.scoring, logits);
  Vec c = r.select_on == SelectOn::scores ? scores : logits;
  add(c, layer.router.selection_bias);
  keep_groups(r, c);
  Choice choice;
  std::vector<int64_t> order(c.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return c[static_cast<size_t>(a)] > c[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(layer.config.top_k));
  Vec w;
  for (const int64_t id : order) {
    const size_t i = static_cast<size_t>(id);
    w.push_back(r.weight == RouterWeight::scores          ? scores[i]
                : r.weight == RouterWeight::sigmoid_logit ? sigmoid(logits[i])
                                                          : logits[i]);
  }
  if (r.weight == RouterWeight::softmax_selected) w = scores_of(Scoring::softmax, w);
  const double sum = std::accumulate(w.begin(), w.end(), 0.0);
  double norm = 1.0;
  if (r.renormalize == Renormalize::sum) norm = sum + r.epsilon;
  if (r.renormalize == Renormalize::p_norm) {
    norm = 0;
    for (const double v : w) norm += std::pow(std::abs(v), r.p);
    norm = std::pow(norm, 1.0 / r.p);
  }
  for (double& v : w) v = v / norm * r.scaling_factor;
  std::vector<size_t> rank(w.size());
  std::iota(rank.begin(), rank.end(), 0);
  std::sort(rank.begin(), rank.end(),
            [&](size_t a, size_t b) { return w[a] != w[b] ? w[a] > w[b] : order[a] < order[b]; });
  for (const size_t i : rank) {
    choice.ids.push_back(order[i]);
    choice.weights.push_back(w[i]);
  }
  return choice;
}

class Golden {
 public:
  Golden(const SafetensorsFile& file, int layer) : file_(file), layer_(layer) {}
  bool has(const std::string& name) const { return file_.find(key(name)) != nullptr; }
  /// Row t as doubles.
  Vec row(const std::string& name, int64_t t) const {
    const TensorEntry* e = file_.find(key(name));
    EXPECT_NE(e, nullptr) << key(name);
    const int64_t n = e->shape[1];
    Vec out;
    for (int64_t i = 0; i < n; ++i) {
      const std::byte* p = file_.data(*e) + (t * n + i) * bytes_of(e->dtype);
      out.push_back(load(p, e->dtype));
    }
    return out;
  }
  int64_t rows() const { return file_.find(key("input"))->shape[0]; }

 private:
  static double load(const std::byte* p, DType t) {
    if (t == DType::bf16) {
      uint16_t v;
      std::memcpy(&v, p, 2);
      return bf16_to_f32(v);
    }
    if (t == DType::i32) {
      int32_t v;
      std::memcpy(&v, p, 4);
      return v;
    }
    float v;
    std::memcpy(&v, p, 4);
    return v;
  }
  std::string key(const std::string& name) const {
    return "layer" + std::to_string(layer_) + "." + name;
  }
  const SafetensorsFile& file_;
  int layer_;
};

double row_error(const Vec& y, const Vec& r) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < r.size(); ++i) {
    difference += (y[i] - r[i]) * (y[i] - r[i]);
    size += r[i] * r[i];
  }
  if (size == 0) return std::sqrt(difference);
  return std::sqrt(difference / size);
}

class Naive {
 public:
  explicit Naive(const CanonicalLayer& layer)
      : layer_(layer), router_(decode(layer.router.weight)) {
    for (const StoredExpert& e : layer.experts) experts_.emplace_back(e);
    if (layer.config.shared.inter > 0) shared_.emplace(layer.shared);
    if (layer.config.shared.sigmoid_gate) shared_gate_ = decode(layer.shared_gate);
    if (layer.config.latent > 0) {
      latent_in_ = decode(layer.latent_in);
      latent_out_ = decode(layer.latent_out);
    }
  }
  Vec logits(const Vec& x) const {
    Vec l = times(router_, x);
    add(l, layer_.router.logit_bias);
    return l;
  }
  Vec routed(const Vec& x, const Choice& choice) const {
    const MoeConfig& c = layer_.config;
    const Vec in = latent_in_ ? times(*latent_in_, x) : x;
    Vec y(static_cast<size_t>(c.routed_width()), 0.0);
    for (size_t s = 0; s < choice.ids.size(); ++s) {
      Vec row = in;
      const double w = choice.weights[s];
      if (c.weight_on_input)
        for (double& v : row) v *= w;
      const Vec part = experts_[static_cast<size_t>(choice.ids[s])].apply(c.activation, row);
      for (size_t i = 0; i < y.size(); ++i) y[i] += part[i] * (c.weight_on_input ? 1.0 : w);
    }
    return latent_out_ ? times(*latent_out_, y) : y;
  }
  Vec shared(const Vec& x) const {
    if (!shared_) return Vec(x.size(), 0.0);
    Vec y = shared_->apply(layer_.config.activation, x);
    if (shared_gate_) {
      const double g = sigmoid(times(*shared_gate_, x)[0]);
      for (double& v : y) v *= g;
    }
    return y;
  }

 private:
  const CanonicalLayer& layer_;
  Matrix router_;
  std::vector<Expert> experts_;
  std::optional<Expert> shared_;
  std::optional<Matrix> shared_gate_, latent_in_, latent_out_;
};

class GoldenTest : public ::testing::TestWithParam<std::string> {};

void check_layer(const CanonicalLayer& layer, const Golden& golden) {
  const Naive naive(layer);
  for (int64_t t = 0; t < golden.rows(); ++t) {
    SCOPED_TRACE("row " + std::to_string(t));
    const Vec x = golden.row("input", t);
    const Vec logits = naive.logits(x);
    EXPECT_LT(row_error(logits, golden.row("router_logits", t)), kBound);
    Choice choice = route(layer, logits);
    const bool zero = std::all_of(x.begin(), x.end(), [](double v) { return v == 0; });
    // Equal logits of a zero row make the choice arbitrary; its experts' outputs are zero then.
    if (!zero || layer.config.router.has_logit_bias) {
      const Vec ids = golden.row("topk_ids", t);
      for (size_t s = 0; s < ids.size(); ++s) {
        EXPECT_EQ(choice.ids[s], static_cast<int64_t>(ids[s])) << "slot " << s;
      }
      EXPECT_LT(row_error(choice.weights, golden.row("topk_weights", t)), kBound);
    }
    Vec y = naive.routed(x, choice);
    if (golden.has("routed_output")) {
      EXPECT_LT(row_error(y, golden.row("routed_output", t)), kBound) << "routed part";
    }
    const Vec shared = naive.shared(x);
    for (size_t i = 0; i < y.size(); ++i) y[i] += shared[i];
    EXPECT_LT(row_error(y, golden.row("output", t)), kBound) << "output";
  }
}

TEST_P(GoldenTest, WholeBlockEqualsTheWritersOutput) {
  const std::string dir = std::string(MOEKIT_FIXTURES) + "/" + GetParam();
  const auto file = SafetensorsFile::open(dir + "/golden.safetensors");
  int layers = 0;
  for (const LayerInfo& info : inspect_checkpoint(dir).layers) {
    if (!info.moe) continue;
    SCOPED_TRACE("layer " + std::to_string(info.index));
    const auto layer = load_canonical(dir, info.index);
    check_layer(*layer, Golden(*file, info.index));
    ++layers;
  }
  EXPECT_GT(layers, 0);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, GoldenTest, ::testing::ValuesIn(fixture_names()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace moekit
