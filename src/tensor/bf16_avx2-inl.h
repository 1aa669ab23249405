// bf16 conversions of eight values, for functions that are entered only where the CPU has AVX2.
// Bits are those of round_to_bf16 and bf16_to_f32.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace moekit::avx2 {

inline bool usable() {
  static const bool yes = __builtin_cpu_supports("avx2");
  return yes;
}

[[gnu::target("avx2"), gnu::always_inline]] inline __m256 widen_bf16(const uint16_t* in) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/// Eight bf16 values, each in the low half of its lane, upper halves zero.
[[gnu::target("avx2"), gnu::always_inline]] inline __m256i round_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i carry = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, carry), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
}

}  // namespace moekit::avx2
