#include "api/covering.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "tensor/rng.h"

namespace moekit::api {
namespace {

// Tries to complete a pair into a case that can run, the first ones greedily.
constexpr int kTries = 24;
constexpr int kGreedyTries = 6;
constexpr uint64_t kCoverStream = 0x636f766572;

class Cover {
 public:
  Cover(const std::vector<int>& sizes, uint64_t seed) : sizes_(sizes), rng_(seed, kCoverStream) {
    for (int size : sizes) {
      MOEKIT_CHECK(size >= 1, "a dimension needs a value, got {}", size);
      first_.push_back(values_);
      values_ += size;
    }
    met_.assign(static_cast<size_t>(values_) * static_cast<size_t>(values_), false);
  }

  std::vector<Levels> run(const std::function<bool(const Levels&)>& accepts) {
    std::vector<Levels> cases;
    const auto dims = static_cast<int>(sizes_.size());
    if (dims == 1) {
      for (int a = 0; a < sizes_[0]; ++a) cases.push_back({a});
      return cases;
    }
    for (int d = 0; d < dims; ++d) {
      for (int e = d + 1; e < dims; ++e) {
        for (int a = 0; a < sizes_[d]; ++a) {
          for (int b = 0; b < sizes_[e]; ++b) {
            if (met(d, a, e, b)) continue;
            cases.push_back(complete(d, a, e, b, accepts));
          }
        }
      }
    }
    return cases;
  }

 private:
  std::vector<bool>::reference met(int d, int a, int e, int b) {
    const auto x = static_cast<size_t>(first_[d] + a), y = static_cast<size_t>(first_[e] + b);
    return met_[std::min(x, y) * static_cast<size_t>(values_) + std::max(x, y)];
  }

  int below(int n) { return static_cast<int>(rng_.below(draws_++, static_cast<uint64_t>(n))); }

  /// A case with the two values given, marked as met as far as it can run.
  Levels complete(int d, int a, int e, int b, const std::function<bool(const Levels&)>& accepts) {
    Levels levels;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      levels = propose(d, a, e, b, attempt < kGreedyTries);
      if (!accepts(levels)) continue;
      for (int x = 0; x < static_cast<int>(sizes_.size()); ++x) {
        for (int y = x + 1; y < static_cast<int>(sizes_.size()); ++y) {
          met(x, levels[x], y, levels[y]) = true;
        }
      }
      return levels;
    }
    met(d, a, e, b) = true;
    return levels;
  }

  Levels propose(int d, int a, int e, int b, bool greedy) {
    Levels levels(sizes_.size(), -1);
    levels[d] = a;
    levels[e] = b;
    std::vector<int> order;
    for (int x = 0; x < static_cast<int>(sizes_.size()); ++x) {
      if (levels[x] < 0) order.push_back(x);
    }
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(below(static_cast<int>(i)))]);
    }
    for (int x : order) levels[x] = greedy ? best_value(x, levels) : below(sizes_[x]);
    return levels;
  }

  /// The value that meets most of those chosen so far for the first time; among equals a random
  /// one.
  int best_value(int dimension, const Levels& levels) {
    int best = -1, most = -1, equals = 0;
    for (int value = 0; value < sizes_[dimension]; ++value) {
      int fresh = 0;
      for (int x = 0; x < static_cast<int>(sizes_.size()); ++x) {
        if (levels[x] >= 0 && !met(dimension, value, x, levels[x])) ++fresh;
      }
      if (fresh < most) continue;
      equals = fresh > most ? 1 : equals + 1;
      most = fresh;
      if (below(equals) == 0) best = value;
    }
    return best;
  }

  const std::vector<int>& sizes_;
  Rng rng_;
  uint64_t draws_ = 0;
  int values_ = 0;
  std::vector<int> first_;  // number of a dimension's value 0
  std::vector<bool> met_;   // [value, value], the lower number first
};

}  // namespace

std::vector<Levels> cover_pairs(const std::vector<int>& sizes, uint64_t seed,
                                const std::function<bool(const Levels&)>& accepts) {
  if (sizes.empty()) return {};
  return Cover(sizes, seed).run(accepts);
}

}  // namespace moekit::api
