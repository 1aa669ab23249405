// Peers of a bench: what they are fed, what they are held to, and how one that fails leaves the
// others and the layer alone.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>

#include "experts/ref/activation.h"
#include "moekit/bench.h"
#include "moekit/error.h"
#include "moekit/problems.h"

namespace moekit {
namespace {

constexpr const char* kProblem = "E=6,k=2,H=32,I=16,act=silu,bias=both,weights=bf16";

/// Computes the layer by plain loops in double; `fault` names a step that throws.
class LoopPeer : public BenchPeer {
 public:
  explicit LoopPeer(std::string name, std::string fault = {}, double factor = 1)
      : name_(std::move(name)), fault_(std::move(fault)), factor_(factor) {}

  std::string name() const override { return name_; }
  void open(const PeerLayer& layer) override {
    may_fail("open");
    layer_ = layer;
    layer.reserve(1);
    if (fault_ == "memory") layer.reserve(int64_t{1} << 60);
  }
  void add_expert(int64_t expert, const PeerExpert& w) override {
    may_fail("add_expert");
    EXPECT_EQ(expert, static_cast<int64_t>(experts_.size()));
    Expert& e = experts_.emplace_back();
    const std::pair<std::vector<double>*, std::span<const float>> parts[] = {
        {&e.gate, w.gate},           {&e.up, w.up},           {&e.down, w.down},
        {&e.gate_bias, w.gate_bias}, {&e.up_bias, w.up_bias}, {&e.down_bias, w.down_bias}};
    for (const auto& [to, from] : parts) to->assign(from.begin(), from.end());
  }
  void set_copies(int count) override {
    may_fail("set_copies");
    EXPECT_GE(count, copies_);
    copies_ = count;
  }
  void set_calls(std::span<const PeerCall> calls) override {
    may_fail("set_calls");
    calls_.assign(calls.begin(), calls.end());
    ++points;
  }
  void run(std::span<float> output) override {
    may_fail("run");
    const PeerCall& call = calls_.front();
    const auto* ids = static_cast<const int32_t*>(call.topk_ids.data);
    const auto* weights = static_cast<const float*>(call.topk_weights.data);
    const int64_t k = layer_.config.top_k, width = layer_.config.hidden;
    std::fill(output.begin(), output.end(), 0.0f);
    for (int64_t i = 0; i < call.hidden.shape[0] * k; ++i) {
      const std::vector<double> row =
          expert_row(experts_[static_cast<size_t>(ids[i])], call, i / k);
      for (int64_t n = 0; n < width; ++n)
        output[static_cast<size_t>(i / k * width + n)] +=
            static_cast<float>(factor_ * weights[i] * row[static_cast<size_t>(n)]);
    }
  }
  std::vector<double> time(std::span<const PeerTurn> turns) override {
    may_fail("time");
    for (const PeerTurn& turn : turns) {
      EXPECT_LT(turn.copy, copies_);
      EXPECT_LT(turn.call, static_cast<int>(calls_.size()));
      copies_used.insert(turn.copy);
    }
    return std::vector<double>(turns.size(), 50.0);
  }
  PeerIdentity identity() const override { return {"1.0", "f32", "loops"}; }

  int points = 0;
  std::set<int> copies_used;

 private:
  struct Expert {
    std::vector<double> gate, up, down, gate_bias, up_bias, down_bias;
  };

  void may_fail(const char* step) const {
    if (fault_ == step) throw Error(ErrorCode::unsupported, "no luck in " + fault_);
  }

  static double element(const TensorView& hidden, int64_t row, int64_t col) {
    const uint16_t code = static_cast<const uint16_t*>(hidden.data)[row * hidden.shape[1] + col];
    return std::bit_cast<float>(static_cast<uint32_t>(code) << 16);
  }

  std::vector<double> expert_row(const Expert& e, const PeerCall& call, int64_t token) const {
    const MoeConfig& c = layer_.config;
    std::vector<double> h, y;
    for (int64_t i = 0; i < c.inter; ++i) {
      const auto at = static_cast<size_t>(i);
      double gate = e.gate_bias[at], up = e.up_bias[at];
      for (int64_t k = 0; k < c.hidden; ++k) {
        const double x = element(call.hidden, token, k);
        gate += x * e.gate[static_cast<size_t>(i * c.hidden + k)];
        up += x * e.up[static_cast<size_t>(i * c.hidden + k)];
      }
      h.push_back(experts::ref::activate<double>(c.activation, gate, up));
    }
    for (int64_t n = 0; n < c.hidden; ++n) {
      double sum = e.down_bias[static_cast<size_t>(n)];
      for (int64_t i = 0; i < c.inter; ++i)
        sum += h[static_cast<size_t>(i)] * e.down[static_cast<size_t>(n * c.inter + i)];
      y.push_back(sum);
    }
    return y;
  }

  std::string name_, fault_;
  double factor_;
  PeerLayer layer_;
  std::vector<Expert> experts_;
  int copies_ = 1;
  std::vector<PeerCall> calls_;
};

std::vector<BenchPoint> run_with(const std::vector<std::shared_ptr<BenchPeer>>& peers,
                                 int ranks = 1) {
  BenchRequest request;
  request.source = synthetic_source(parse_problem(kProblem), 5, 1);
  request.options.num_threads = 1;
  request.options.hidden_dtype = DType::bf16;
  request.num_ranks = ranks;
  request.tokens = {1, 12};
  request.min_seconds = 0;
  request.peers = peers;
  std::vector<BenchPoint> points;
  run_bench(request, [&](const BenchPoint& p) { points.push_back(p); });
  return points;
}

TEST(BenchPeers, ComputeTheSameRowsAndAreTimed) {
  const auto peer = std::make_shared<LoopPeer>("loops");
  const std::vector<BenchPoint> points = run_with({peer});
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(peer->points, 2);
  for (const BenchPoint& point : points) {
    ASSERT_EQ(point.peers.size(), 1u);
    const PeerTime& time = point.peers.front();
    EXPECT_EQ(time.name, "loops");
    EXPECT_EQ(time.reason, "");
    EXPECT_GE(time.rel_rms, 0);
    EXPECT_LT(time.rel_rms, 1e-6);
    EXPECT_GE(time.repeat, 3);
    EXPECT_EQ(time.median_us, 50.0);
    EXPECT_EQ(time.identity.implementation, "loops");
  }
  // The layer is smaller than any cache: calls go round through copies of it.
  EXPECT_GT(peer->copies_used.size(), 1u);
}

TEST(BenchPeers, WhoComputesSomethingElseIsNotTimed) {
  for (const double factor : {1.01, 0.0, static_cast<double>(NAN)}) {
    const auto peer = std::make_shared<LoopPeer>("off", "", factor);
    for (const BenchPoint& point : run_with({peer})) {
      EXPECT_NE(point.peers.front().reason.find("computes something else"), std::string::npos);
      EXPECT_EQ(point.peers.front().repeat, 0);
    }
    EXPECT_TRUE(peer->copies_used.empty());
  }
}

TEST(BenchPeers, WhoFailsLeavesTheOthersAlone) {
  for (const char* step : {"open", "add_expert", "set_copies", "set_calls", "run", "time"}) {
    const std::vector<BenchPoint> points =
        run_with({std::make_shared<LoopPeer>("broken", step), std::make_shared<LoopPeer>("whole")});
    for (const BenchPoint& point : points) {
      EXPECT_GE(point.repeat, 5) << step;
      ASSERT_EQ(point.peers.size(), 2u) << step;
      EXPECT_EQ(point.peers[0].reason, std::string("no luck in ") + step);
      EXPECT_EQ(point.peers[1].reason, "") << step;
    }
  }
}

TEST(BenchPeers, WhoNeedsMoreMemoryThanThereIsSaysSo) {
  const std::vector<BenchPoint> points =
      run_with({std::make_shared<LoopPeer>("big", "memory"), std::make_shared<LoopPeer>("small")});
  for (const BenchPoint& point : points) {
    EXPECT_NE(point.peers[0].reason.find("bytes of memory"), std::string::npos);
    EXPECT_EQ(point.peers[1].reason, "");
  }
}

TEST(BenchPeers, RunOnOneRankOnly) {
  const auto peer = std::make_shared<LoopPeer>("loops");
  for (const BenchPoint& point : run_with({peer}, 2))
    EXPECT_NE(point.peers.front().reason.find("one rank"), std::string::npos);
  EXPECT_EQ(peer->points, 0);
}

}  // namespace
}  // namespace moekit
