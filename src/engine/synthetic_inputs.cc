// Hidden rows and routings for synthetic layers. Only operations that round alike everywhere.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "engine/synthetic.h"
#include "tensor/float_formats.h"
#include "tensor/rng.h"

namespace moekit::engine {
namespace {

constexpr uint64_t kHiddenStream = uint64_t{1} << 50;
constexpr uint64_t kChoiceStream = uint64_t{1} << 51;
constexpr uint64_t kWeightStream = uint64_t{1} << 52;
constexpr uint64_t kOrderStream = uint64_t{1} << 53;

/// Draws for one slot before the next free expert is taken: bounds the search where few experts
/// hold nearly all of the probability.
constexpr uint64_t kMaxDraws = 64;

/// ln(x), x > 0, without libm: the areatangent series on the mantissa.
double natural_log(double x) {
  int exponent;
  const double m = std::frexp(x, &exponent);  // exact
  const double t = (m - 1) / (m + 1);
  double sum = 0;
  for (int n = 59; n >= 1; n -= 2) sum = sum * t * t + 1.0 / n;
  return 2 * t * sum + exponent * 0.69314718055994530942;
}

/// e^x for x <= 0, without libm.
double exponential(double x) {
  const double halvings = std::floor(x / 0.69314718055994530942);
  const double r = x - halvings * 0.69314718055994530942;
  double sum = 1;
  for (int n = 20; n >= 1; --n) sum = 1 + sum * r / n;
  return std::ldexp(sum, static_cast<int>(halvings));
}

/// Experts in the order of their popularity, and its running sum in 2^32 shares.
struct Popularity {
  std::vector<int32_t> expert;
  std::vector<uint64_t> upto;
};

Popularity zipf(int64_t num_experts, double exponent, uint64_t seed) {
  Popularity p;
  for (int64_t e = 0; e < num_experts; ++e) p.expert.push_back(static_cast<int32_t>(e));
  const Rng rng(seed, kOrderStream);
  for (int64_t i = num_experts - 1; i > 0; --i) {
    const auto j =
        static_cast<int64_t>(rng.below(static_cast<uint64_t>(i), static_cast<uint64_t>(i) + 1));
    std::swap(p.expert[static_cast<size_t>(i)], p.expert[static_cast<size_t>(j)]);
  }
  std::vector<double> share;
  double total = 0;
  for (int64_t r = 0; r < num_experts; ++r) {
    share.push_back(exponential(-exponent * natural_log(static_cast<double>(r + 1))));
    total += share.back();
  }
  double sum = 0;
  for (double s : share) {
    sum += s;
    p.upto.push_back(static_cast<uint64_t>(sum / total * 0x1p32));
  }
  p.upto.back() = uint64_t{1} << 32;
  return p;
}

/// Chooses experts for the slots of one token.
class Chooser {
 public:
  Chooser(const RoutingPattern& pattern, int64_t num_experts, uint64_t seed,
          std::span<const int32_t> first_rank)
      : pattern_(pattern),
        num_experts_(num_experts),
        rng_(seed, kChoiceStream),
        preferred_(first_rank.begin(), first_rank.end()),
        taken_(static_cast<size_t>(num_experts), -1) {
    if (pattern.kind == RoutingKind::zipf) popularity_ = zipf(num_experts, pattern.exponent, seed);
  }

  void choose(int64_t token, int64_t top_k, int32_t* ids) {
    for (int64_t slot = 0; slot < top_k; ++slot) {
      int32_t id = -1;
      for (uint64_t draw = 0; draw < kMaxDraws; ++draw) {
        const int32_t candidate = propose(token, slot, top_k, draw);
        if (taken_[static_cast<size_t>(candidate)] == token) continue;
        id = candidate;
        break;
      }
      if (id < 0) id = next_free(token, slot);
      taken_[static_cast<size_t>(id)] = token;
      ids[slot] = id;
    }
  }

 private:
  int32_t propose(int64_t token, int64_t slot, int64_t top_k, uint64_t draw) const {
    const uint64_t index = (static_cast<uint64_t>(token) * static_cast<uint64_t>(top_k) +
                            static_cast<uint64_t>(slot)) *
                               kMaxDraws +
                           draw;
    switch (pattern_.kind) {
      case RoutingKind::hot:
        if (slot == 0) return 0;
        break;
      case RoutingKind::one_rank:
        if (slot < static_cast<int64_t>(preferred_.size())) {
          return preferred_[rng_.below(index, preferred_.size())];
        }
        break;
      case RoutingKind::zipf: {
        const uint64_t u = rng_.bits(index) >> 32;
        const auto at = std::upper_bound(popularity_.upto.begin(), popularity_.upto.end(), u);
        return popularity_.expert[static_cast<size_t>(at - popularity_.upto.begin())];
      }
      case RoutingKind::uniform:
      case RoutingKind::holes: break;
    }
    return static_cast<int32_t>(rng_.below(index, static_cast<uint64_t>(num_experts_)));
  }

  int32_t next_free(int64_t token, int64_t slot) const {
    // Where experts are preferred, the free ones among them come first.
    const std::vector<int32_t>& order =
        pattern_.kind == RoutingKind::one_rank && slot < static_cast<int64_t>(preferred_.size())
            ? preferred_
            : popularity_.expert;
    for (int32_t e : order) {
      if (taken_[static_cast<size_t>(e)] != token) return e;
    }
    for (int32_t e = 0; e < num_experts_; ++e) {
      if (taken_[static_cast<size_t>(e)] != token) return e;
    }
    return 0;  // not reached: top_k <= num_experts
  }

  RoutingPattern pattern_;
  int64_t num_experts_;
  Rng rng_;
  std::vector<int32_t> preferred_;
  Popularity popularity_;
  std::vector<int64_t> taken_;  // last token that took each expert
};

/// Takes experts away: all of every fifth token, a slot of every third one, and every fourth one
/// names its first expert twice.
void punch_holes(int64_t token, int64_t top_k, int32_t* ids) {
  if (token % 4 == 1 && top_k > 1) ids[top_k - 1] = ids[0];
  if (token % 3 == 2) ids[token / 3 % top_k] = -1;
  if (token % 5 == 3) std::fill_n(ids, top_k, -1);
}

}  // namespace

std::vector<float> make_hidden(int64_t num_tokens, int64_t hidden, uint64_t seed,
                               int64_t first_token) {
  MOEKIT_CHECK(num_tokens >= 0 && hidden > 0, "hidden rows need sizes, got [{}, {}]", num_tokens,
               hidden);
  std::vector<float> x(static_cast<size_t>(num_tokens * hidden));
  const Rng rng(seed, kHiddenStream);
  const int64_t first = first_token * hidden;
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = bf16_to_f32(f32_to_bf16(rng.normal(static_cast<uint64_t>(first) + i)));
  }
  return x;
}

SyntheticRouting make_routing(const RoutingPattern& pattern, int64_t num_tokens,
                              int64_t num_experts, int64_t top_k, uint64_t seed,
                              std::span<const int32_t> first_rank, int64_t first_token) {
  MOEKIT_CHECK(num_tokens >= 0 && top_k >= 1 && top_k <= num_experts,
               "routing needs 1 <= k <= E, got {} tokens, k = {}, E = {}", num_tokens, top_k,
               num_experts);
  SyntheticRouting r;
  r.ids.resize(static_cast<size_t>(num_tokens * top_k));
  r.weights.resize(r.ids.size());
  Chooser chooser(pattern, num_experts, seed, first_rank);
  const Rng rng(seed, kWeightStream);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int64_t token = first_token + t;
    int32_t* ids = r.ids.data() + t * top_k;
    chooser.choose(token, top_k, ids);
    if (pattern.kind == RoutingKind::holes) punch_holes(token, top_k, ids);
    float* w = r.weights.data() + t * top_k;
    float sum = 0;
    for (int64_t s = 0; s < top_k; ++s) {
      w[s] = 0.25f + rng.uniform(static_cast<uint64_t>(token * top_k + s));
      sum += w[s];
    }
    std::sort(w, w + top_k, std::greater<>());
    for (int64_t s = 0; s < top_k; ++s) w[s] /= sum;
  }
  return r;
}

}  // namespace moekit::engine
