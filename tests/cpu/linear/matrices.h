// Matrices for the tests of linear/ and experts/cpu: every weight scheme, random values with rows
// and blocks of unlike magnitude.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "moekit/quant.h"
#include "quant/weight_codec.h"
#include "tensor/rng.h"

namespace moekit::testing {

inline std::vector<float> random_values(int64_t rows, int64_t cols, uint64_t seed,
                                        float scale = 1.0f) {
  const Rng rng(seed, 7);
  std::vector<float> v(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const auto i = static_cast<size_t>(r * cols + c);
      v[i] = rng.normal(i) * std::ldexp(scale, static_cast<int>((r * 3 + c / 16) % 4) - 2);
    }
  }
  return v;
}

inline std::vector<WeightScheme> all_weight_schemes() {
  using F = WeightFormat;
  return {{F::bf16},
          {F::f16},
          {F::f32},
          {F::fp8_tensor},
          {F::fp8_channel},
          {F::fp8_block},
          {F::mxfp8},
          {F::mxfp8_e5m2},
          {F::mxfp4},
          {F::nvfp4},
          {F::int4_group, 32},
          {F::int4_group, 128, true},
          {F::int8_group, 64},
          {F::int8_group, 48, true},
          {F::int4_channel},
          {F::int4_channel, 0, true},
          {F::int8_channel},
          {F::int8_channel, 0, true}};
}

inline std::vector<ActivationScheme> all_activation_schemes() {
  using F = ActivationFormat;
  return {{F::f32},       {F::bf16},      {F::fp8_tensor, true},
          {F::fp8_token}, {F::fp8_block}, {F::mxfp8},
          {F::mxfp4},     {F::nvfp4},     {F::nvfp4, true, ScaleSense::divisor}};
}

/// A static input scale that suits rows of about unit size.
inline float static_scale_of(const ActivationScheme& s) {
  if (s.format == ActivationFormat::fp8_tensor) return 0.01f;
  if (!s.static_scale) return 1.0f;
  return s.sense == ScaleSense::divisor ? 900.0f : 1.0f / 900.0f;
}

inline std::string name_of(const WeightScheme& s) {
  return std::string(to_string(s.format)) + "/" + std::to_string(s.group) +
         (s.zero_points ? "z" : "");
}

}  // namespace moekit::testing
