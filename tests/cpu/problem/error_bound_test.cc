// The bound of four-bit intermediates: no flip in random layers exceeds it, and it still says
// something.
#include "problem/error_bound.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "quant/row_codec.h"
#include "tensor/rng.h"

namespace moekit {
namespace {

MoeConfig config_of(ActivationFormat format, int64_t hidden, int64_t inter) {
  MoeConfig config;
  config.num_experts = 8;
  config.top_k = 2;
  config.hidden = hidden;
  config.inter = inter;
  config.gate_up_input.format = format;
  config.down_input.format = format;
  return config;
}

/// One layer's down projection [inter, hidden] and rows of silu(gate) * up.
class DownProjection {
 public:
  DownProjection(ActivationFormat format, int64_t hidden, int64_t inter, uint64_t seed)
      : scheme_{format},
        hidden_(hidden),
        inter_(inter),
        rng_(seed, 1),
        weights_(size(hidden * inter)) {
    for (size_t i = 0; i < weights_.size(); ++i) weights_[i] = rng_.normal(i);
  }

  std::vector<float> intermediate(uint64_t row) const {
    const Rng rng(row, 2);
    std::vector<float> h(size(inter_));
    for (size_t i = 0; i < h.size(); ++i) {
      const float gate = rng.normal(2 * i);
      h[i] = gate / (1.0f + std::exp(-gate)) * rng.normal(2 * i + 1);
    }
    return h;
  }

  std::vector<float> quantized(std::vector<float> h) const {
    quant::round_trip_row(scheme_, 1.0f, h.data(), inter_);
    return h;
  }

  /// ||(a - b) W|| / ||b W||.
  double difference(const std::vector<float>& a, const std::vector<float>& b) const {
    double above = 0, below = 0;
    for (int64_t n = 0; n < hidden_; ++n) {
      double change = 0, value = 0;
      for (int64_t i = 0; i < inter_; ++i) {
        const double w = weights_[size(i * hidden_ + n)];
        change += (double{a[size(i)]} - b[size(i)]) * w;
        value += double{b[size(i)]} * w;
      }
      above += change * change;
      below += value * value;
    }
    return std::sqrt(above / below);
  }

 private:
  static size_t size(int64_t i) { return static_cast<size_t>(i); }

  ActivationScheme scheme_;
  int64_t hidden_, inter_;
  Rng rng_;
  std::vector<float> weights_;
};

/// Grows or shrinks element i until something flips; the rows just before and after, or nothing.
bool flip(const DownProjection& down, std::vector<float> h, size_t i, float factor,
          std::vector<float>& before, std::vector<float>& after) {
  const float value = h[i];
  float low = 1.0f, high = factor;
  before = down.quantized(h);
  h[i] = value * high;
  after = down.quantized(h);
  if (before == after) return false;
  while (std::nextafter(value * low, value * high) != value * high && value * low != value * high) {
    const float middle = low + (high - low) / 2;
    if (middle == low || middle == high) break;
    h[i] = value * middle;
    std::vector<float> now = down.quantized(h);
    if (now == before) {
      low = middle;
    } else {
      high = middle;
      after = std::move(now);
    }
  }
  return true;
}

TEST(ErrorBound, CoversAnyOneFlipOfFourBitIntermediates) {
  for (const auto format : {ActivationFormat::nvfp4, ActivationFormat::mxfp4}) {
    for (const auto& [hidden, inter] : {std::pair{128, 32}, {64, 64}, {128, 128}}) {
      const double bound = row_error_bound(config_of(format, hidden, inter));
      int64_t flips = 0;
      double worst = 0;
      for (uint64_t seed = 0; seed < 3; ++seed) {
        const DownProjection down(format, hidden, inter, seed);
        std::vector<float> before, after;
        for (uint64_t row = 0; row < 300; ++row) {
          const std::vector<float> h = down.intermediate(row * 3 + seed);
          const size_t i = (row * 7) % static_cast<size_t>(inter);
          if (!flip(down, h, i, row % 2 == 0 ? 1.4f : 0.7f, before, after)) continue;
          ++flips;
          worst = std::max(worst, down.difference(after, before));
        }
      }
      EXPECT_GT(flips, 300);
      EXPECT_LE(worst, bound) << static_cast<int>(format) << " " << hidden << " " << inter;
      EXPECT_GT(worst, 0.01);
    }
  }
}

TEST(ErrorBound, CoversRoundingNoise) {
  for (const auto format : {ActivationFormat::nvfp4, ActivationFormat::mxfp4}) {
    const int64_t hidden = 96, inter = 64;
    const double bound = row_error_bound(config_of(format, hidden, inter));
    // Ten times the noise that the derivation expects of fp32 sums.
    const float noise = 10.0f * 4.0f * 0x1p-24f * (std::sqrt(96.0f) + 4.0f);
    const DownProjection down(format, hidden, inter, 11);
    const Rng rng(5, 5);
    double worst = 0;
    for (uint64_t row = 0; row < 4000; ++row) {
      const std::vector<float> h = down.intermediate(row);
      std::vector<float> other = h;
      for (size_t i = 0; i < other.size(); ++i) other[i] *= 1.0f + noise * rng.normal(row * 64 + i);
      const std::vector<float> a = down.quantized(h), b = down.quantized(other);
      if (a != b) worst = std::max(worst, down.difference(b, a));
    }
    EXPECT_GT(worst, 0) << "no flip at all: the test shows nothing";
    EXPECT_LE(worst, bound);
  }
}

TEST(ErrorBound, SaysSomethingForEveryShape) {
  for (const auto format : {ActivationFormat::nvfp4, ActivationFormat::mxfp4}) {
    for (const int64_t inter : {16, 32, 64, 128, 768, 4096, 14336}) {
      MoeConfig config = config_of(format, 2048, inter);
      EXPECT_LE(row_error_bound(config), format == ActivationFormat::nvfp4 ? 0.45 : 0.65) << inter;
      config.latent = 64;
      EXPECT_LT(row_error_bound(config), 1.0) << inter;
    }
  }
  // Larger rows hide a flip better, and full precision has none.
  const auto bound = [](ActivationFormat f, int64_t inter) {
    return row_error_bound(config_of(f, 2048, inter));
  };
  EXPECT_LT(bound(ActivationFormat::nvfp4, 1024), bound(ActivationFormat::nvfp4, 64));
  EXPECT_LT(bound(ActivationFormat::nvfp4, 64), bound(ActivationFormat::mxfp4, 64));
  EXPECT_LT(bound(ActivationFormat::f32, 64), 1e-4);
}

}  // namespace
}  // namespace moekit
