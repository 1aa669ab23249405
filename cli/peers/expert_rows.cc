#include "peers/expert_rows.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#define MOEKIT_ROWS_X86 1
#else
#define MOEKIT_ROWS_X86 0
#endif
// Loops are written once and inlined into a function for each instruction set.
#define MOEKIT_ROWS_INLINE inline __attribute__((always_inline))

namespace moekit::cli {
namespace {

MOEKIT_ROWS_INLINE uint32_t bits(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
MOEKIT_ROWS_INLINE float from_bits(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}
MOEKIT_ROWS_INLINE float load(float x) { return x; }
MOEKIT_ROWS_INLINE float load(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }
MOEKIT_ROWS_INLINE void store(float x, float& to) { to = x; }
MOEKIT_ROWS_INLINE void store(float x, uint16_t& to) {
  const uint32_t b = bits(x);
  to = static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

/// 2^(x log2 e) with the fraction's power by its Taylor polynomial (next term 1.2e-7).
MOEKIT_ROWS_INLINE float exp_near(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  float t = x * 1.44269504f;
  t = std::min(std::max(t, -126.0f), 126.0f);
  const float shifted = t + kRound;
  const float f = t - (shifted - kRound);
  float p = 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return from_bits(bits(p) + (bits(shifted) << 23));
}
MOEKIT_ROWS_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_near(-x)); }

/// Abramowitz and Stegun 7.1.26, within 1.5e-7.
MOEKIT_ROWS_INLINE float erf_near(float x) {
  const float a = x < 0 ? -x : x;
  const float t = 1.0f / (1.0f + 0.3275911f * a);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float y = 1.0f - p * t * exp_near(-a * a);
  return x < 0 ? -y : y;
}

template <ActivationKind kKind>
MOEKIT_ROWS_INLINE float act(float x, float alpha) {
  if constexpr (kKind == ActivationKind::silu) return x * sigmoid(x);
  if constexpr (kKind == ActivationKind::swiglu_oai) return x * sigmoid(alpha * x);
  if constexpr (kKind == ActivationKind::gelu) return 0.5f * x * (1.0f + erf_near(x * 0.70710678f));
  if constexpr (kKind == ActivationKind::gelu_tanh)
    return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
  const float positive = x < 0 ? 0 : x;
  return positive * positive;
}

template <typename T, ActivationKind kKind>
MOEKIT_ROWS_INLINE void activate_loop(const ActivationSpec& spec, const T* gate_up, int64_t rows,
                                      int64_t inter, T* h) {
  const float limit = spec.limit, alpha = spec.alpha;
  const float shift = spec.kind == ActivationKind::swiglu_oai ? spec.beta : 0.0f;
  for (int64_t r = 0; r < rows; ++r) {
    T* out = h + r * inter;
    if (!spec.gated) {
      const T* up = gate_up + r * inter;
      for (int64_t i = 0; i < inter; ++i) store(act<kKind>(load(up[i]), alpha), out[i]);
      continue;
    }
    const T* gate = gate_up + r * 2 * inter;
    const T* up = gate + inter;
    for (int64_t i = 0; i < inter; ++i) {
      const float g = std::min(load(gate[i]), limit);
      const float u = std::min(std::max(load(up[i]), -limit), limit);
      store(act<kKind>(g, alpha) * (u + shift), out[i]);
    }
  }
}

template <typename T>
MOEKIT_ROWS_INLINE void activate_any(const ActivationSpec& spec, const T* gate_up, int64_t rows,
                                     int64_t inter, T* h) {
  switch (spec.kind) {
    case ActivationKind::silu:
      return activate_loop<T, ActivationKind::silu>(spec, gate_up, rows, inter, h);
    case ActivationKind::gelu:
      return activate_loop<T, ActivationKind::gelu>(spec, gate_up, rows, inter, h);
    case ActivationKind::gelu_tanh:
      return activate_loop<T, ActivationKind::gelu_tanh>(spec, gate_up, rows, inter, h);
    case ActivationKind::swiglu_oai:
      return activate_loop<T, ActivationKind::swiglu_oai>(spec, gate_up, rows, inter, h);
    case ActivationKind::relu2:
      return activate_loop<T, ActivationKind::relu2>(spec, gate_up, rows, inter, h);
  }
}

template <typename T>
MOEKIT_ROWS_INLINE void gather_loop(const uint16_t* hidden, const int32_t* rows, int64_t first,
                                    int64_t last, int64_t width, T* out) {
  for (int64_t i = first; i < last; ++i) {
    const uint16_t* from = hidden + rows[i] * width;
    T* to = out + i * width;
    if constexpr (sizeof(T) == 2) {
      std::memcpy(to, from, static_cast<size_t>(width) * 2);
    } else {
      for (int64_t c = 0; c < width; ++c) to[c] = load(from[c]);
    }
  }
}

template <typename T>
MOEKIT_ROWS_INLINE void combine_loop(const T* y, const int32_t* positions, const float* weights,
                                     int64_t top_k, int64_t first, int64_t last, int64_t width,
                                     float* out) {
  for (int64_t t = first; t < last; ++t) {
    float* sum = out + t * width;
    std::fill_n(sum, width, 0.0f);
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t at = positions[t * top_k + j];
      if (at < 0) continue;
      const T* row = y + at * width;
      const float w = weights[t * top_k + j];
      for (int64_t c = 0; c < width; ++c) sum[c] += w * load(row[c]);
    }
  }
}

template <typename T>
struct Loops {
  void (*gather)(const uint16_t*, const int32_t*, int64_t, int64_t, int64_t, T*);
  void (*activate)(const ActivationSpec&, const T*, int64_t, int64_t, T*);
  void (*combine)(const T*, const int32_t*, const float*, int64_t, int64_t, int64_t, int64_t,
                  float*);
};

// A set of loops for one instruction set, `attribute` naming it.
#define MOEKIT_ROWS_FOR(name, attribute)                                                     \
  template <typename T>                                                                      \
  attribute void gather_##name(const uint16_t* hidden, const int32_t* rows, int64_t first,   \
                               int64_t last, int64_t width, T* out) {                        \
    gather_loop(hidden, rows, first, last, width, out);                                      \
  }                                                                                          \
  template <typename T>                                                                      \
  attribute void activate_##name(const ActivationSpec& spec, const T* gate_up, int64_t rows, \
                                 int64_t inter, T* h) {                                      \
    activate_any(spec, gate_up, rows, inter, h);                                             \
  }                                                                                          \
  template <typename T>                                                                      \
  attribute void combine_##name(const T* y, const int32_t* positions, const float* weights,  \
                                int64_t top_k, int64_t first, int64_t last, int64_t width,   \
                                float* out) {                                                \
    combine_loop(y, positions, weights, top_k, first, last, width, out);                     \
  }

MOEKIT_ROWS_FOR(plain, )
#if MOEKIT_ROWS_X86
MOEKIT_ROWS_FOR(avx2, __attribute__((target("avx2,fma"))))
MOEKIT_ROWS_FOR(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma"))))
#endif

template <typename T>
const Loops<T>& loops() {
  static const Loops<T> chosen = [] {
#if MOEKIT_ROWS_X86
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
      return Loops<T>{gather_avx512<T>, activate_avx512<T>, combine_avx512<T>};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      return Loops<T>{gather_avx2<T>, activate_avx2<T>, combine_avx2<T>};
#endif
    return Loops<T>{gather_plain<T>, activate_plain<T>, combine_plain<T>};
  }();
  return chosen;
}

}  // namespace

void gather_rows(const uint16_t* hidden, const int32_t* rows, int64_t first, int64_t last,
                 int64_t width, RowType type, void* out) {
  if (type == RowType::f32)
    return loops<float>().gather(hidden, rows, first, last, width, static_cast<float*>(out));
  loops<uint16_t>().gather(hidden, rows, first, last, width, static_cast<uint16_t*>(out));
}

void activate_rows(const ActivationSpec& spec, const void* gate_up, int64_t rows, int64_t inter,
                   RowType type, void* h) {
  if (type == RowType::f32) {
    return loops<float>().activate(spec, static_cast<const float*>(gate_up), rows, inter,
                                   static_cast<float*>(h));
  }
  loops<uint16_t>().activate(spec, static_cast<const uint16_t*>(gate_up), rows, inter,
                             static_cast<uint16_t*>(h));
}

void combine_rows(const void* y, const int32_t* positions, const float* weights, int64_t top_k,
                  int64_t first, int64_t last, int64_t width, RowType type, float* out) {
  if (type == RowType::f32) {
    return loops<float>().combine(static_cast<const float*>(y), positions, weights, top_k, first,
                                  last, width, out);
  }
  loops<uint16_t>().combine(static_cast<const uint16_t*>(y), positions, weights, top_k, first, last,
                            width, out);
}

uint16_t bf16_of(float x) {
  uint16_t b;
  store(x, b);
  return b;
}

}  // namespace moekit::cli
