// The scalar arithmetic of the router, shared by all its members: exp, log1p, the scoring
// functions, the order of sums. Every function is a fixed sequence of IEEE operations without
// branches and without libm, so a compiler may vectorize a loop over it and still give the bits of
// the scalar code. That is what makes the chosen ids of all members equal by construction.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "tensor/host_device.h"

namespace moekit::router {

/// exp(x) for x <= 0, within 2 ulp, underflowing gradually to 0. exp(0) is exactly 1; NaN stays
/// NaN.
MOEKIT_HOST_DEVICE inline float exp_nonpositive(float x) {
  // e^-104 is below half of the least subnormal; the clamp also takes -infinity.
  const float y = x < -104.0f ? -104.0f : x;
  // Adding 1.5 * 2^23 leaves the integer nearest to y * log2(e) in the low mantissa bits.
  const float kRound = 12582912.0f;
  const float shifted = y * 1.44269504f + kRound;
  const float n = shifted - kRound;
  // ln 2 in two parts; the first has 9 significant bits, so that n * kLn2High is exact.
  const float kLn2High = 0.693359375f;
  const float kLn2Low = -2.12194440e-4f;
  const float r = (y - n * kLn2High) - n * kLn2Low;
  // The Taylor series: |r| <= ln(2)/2, so the first term left out is below 5.3e-9 (r^8 / 8!).
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = (p * r) * r + r;
  p = p + 1.0f;
  // 2^n as two normal factors, because n reaches -150 and one factor would be subnormal. n is read
  // from the bits (a conversion of NaN would be undefined); NaN survives in p.
  const int32_t k = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const int32_t half = k >> 1;
  const float scale = std::bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  const float rest = std::bit_cast<float>(static_cast<uint32_t>(k - half + 127) << 23);
  return (p * scale) * rest;
}

/// log(1 + y) for 0 <= y <= 1, within 3 ulp.
MOEKIT_HOST_DEVICE inline float log1p_unit(float y) {
  // log(1 + y) = 2 atanh(z) with z = y / (2 + y) <= 1/3; the first term left out is z^17 / 17,
  // below 5e-10 of the value.
  const float z = y / (2.0f + y);
  const float z2 = z * z;
  float p = 1.0f / 15.0f;
  p = p * z2 + 1.0f / 13.0f;
  p = p * z2 + 1.0f / 11.0f;
  p = p * z2 + 1.0f / 9.0f;
  p = p * z2 + 1.0f / 7.0f;
  p = p * z2 + 1.0f / 5.0f;
  p = p * z2 + 1.0f / 3.0f;
  const float sum = (p * z2) * z + z;
  return sum + sum;
}

/// 1 / (1 + e^-x) without overflow: sigmoid(-inf) = 0, sigmoid(+inf) = 1, NaN stays NaN.
MOEKIT_HOST_DEVICE inline float sigmoid(float x) {
  const float e = exp_nonpositive(-std::fabs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/// sqrt(log(1 + e^x)) without overflow: 0 at -inf, +inf at +inf, NaN stays NaN. Loses digits below
/// x = -87, where e^x is subnormal.
MOEKIT_HOST_DEVICE inline float sqrt_softplus(float x) {
  const float positive = x < 0.0f ? 0.0f : x;  // NaN goes through
  return std::sqrt(positive + log1p_unit(exp_nonpositive(-std::fabs(x))));
}

/// The numerator of a softmax whose greatest logit is `max`. Logits that equal `max` have exactly
/// 1, so that infinite ones share the mass in place of giving inf - inf.
MOEKIT_HOST_DEVICE inline float softmax_numerator(float logit, float max) {
  return exp_nonpositive(logit == max ? 0.0f : logit - max);
}

/// Number of partial sums of a softmax denominator.
inline constexpr int64_t kSumLanes = 16;

/// Joins partial sums: lane i and lane i + 8, then i and i + 4, then 2, then 1. Destroys `lanes`.
MOEKIT_HOST_DEVICE inline float join_lanes(float* lanes) {
  for (int64_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

/// max over the logits that are not NaN; -infinity when there are none.
MOEKIT_HOST_DEVICE inline float softmax_max(const float* logits, int64_t count) {
  float max = -HUGE_VALF;
  for (int64_t i = 0; i < count; ++i) max = logits[i] > max ? logits[i] : max;
  return max;
}

/// softmax of `count` logits. NaN logits take no part in the maximum and in the sum: they stay NaN
/// and the others share the mass among themselves. `out` may be `logits`.
MOEKIT_HOST_DEVICE inline void softmax(const float* logits, int64_t count, float* out) {
  const float max = softmax_max(logits, count);
  float lanes[kSumLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    const float e = softmax_numerator(logits[i], max);
    out[i] = e;
    lanes[i % kSumLanes] += e == e ? e : 0.0f;
  }
  const float sum = join_lanes(lanes);
  for (int64_t i = 0; i < count; ++i) out[i] = out[i] / sum;
}

}  // namespace moekit::router
