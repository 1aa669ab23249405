// AVX-512 F, BW, DQ, VL without bf16 products: sixteen f32 lanes, every code becomes f32 in
// registers. The bf16 ISA uses this file's tables for f32 inputs.
#include "linear/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace moekit::linear {
namespace {
namespace avx512 {

struct Isa {
  static constexpr int kLanes = 16;
  static constexpr int kPerDot = 1;
  static constexpr int kMaxRows = 12;  // 24 accumulators of 32 registers
  static constexpr int kWideRows = 12;
  static constexpr int kShortRows = 6;          // 12 sums of a short segment beside their totals
  static constexpr float kE4m3Factor = 256.0f;  // read as f16 with the same fields
  using V = __m512;
  using W = __m512;
  using X = float;

  /// No decoder here reads subnormals.
  struct DenormalGuard {};

  static V zero() { return _mm512_setzero_ps(); }
  static V splat(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static void store_weight(std::byte* p, W w) { _mm512_storeu_ps(p, w); }
  static W broadcast(const X* x) { return _mm512_set1_ps(*x); }
  static V dot(W w, W x, V acc) { return _mm512_fmadd_ps(w, x, acc); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }

  static __m512i bits(const std::byte* p) { return _mm512_loadu_si512(p); }
  static __m512 low_half(__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
  static __m512 high_half(__m512i v) {
    return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(-65536)));
  }
  static __m512 from_f16(__m256i v) { return _mm512_cvtph_ps(v); }

  /// What the words of sixteen columns are made from: step<C, J>(unit) is the weights of K J.
  template <Code C>
  struct Unit {
    static constexpr int kParts = bits_of(C) == 4 ? 4 : C == Code::e4m3 || C == Code::e5m2 ? 2 : 1;
    __m512i part[kParts];
  };

  template <Code C>
  [[gnu::always_inline]] static inline Unit<C> unit(const std::byte* p) {
    if constexpr (C == Code::e4m3 || C == Code::e5m2) {
      // See the AVX2 file: an 8-bit float in the high byte of a 16-bit lane is an f16, or nearly.
      // The permutation brings the first pairs of all 16 columns into the low 32 bytes.
      const __m512i v =
          _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bits(p));
      const __m512i even = _mm512_slli_epi16(v, 8);
      if constexpr (C == Code::e4m3) {
        const __m512i mask = _mm512_set1_epi16(static_cast<short>(0xbf80));
        return {{_mm512_and_si512(_mm512_srai_epi16(even, 1), mask),
                 _mm512_and_si512(_mm512_srai_epi16(v, 1), mask)}};
      } else {
        return {{even, _mm512_and_si512(v, _mm512_set1_epi16(static_cast<short>(0xff00)))}};
      }
    } else if constexpr (bits_of(C) == 4) {
      // Part i has byte i of every word lowest: loads cost no port that products need. They reach
      // three bytes beyond the codes, where every panel has its column terms.
      return {{bits(p), bits(p + 1), bits(p + 2), bits(p + 3)}};
    } else {
      return {{bits(p)}};
    }
  }

  template <Code C, int J>
  [[gnu::always_inline]] static inline W step(const Unit<C>& u) {
    const __m512i v = u.part[0];
    if constexpr (C == Code::f32) {
      return _mm512_castsi512_ps(v);
    } else if constexpr (C == Code::bf16) {
      return J == 0 ? low_half(v) : high_half(v);
    } else if constexpr (C == Code::f16) {
      return from_f16(_mm512_cvtepi32_epi16(J == 0 ? v : _mm512_srli_epi32(v, 16)));
    } else if constexpr (C == Code::e4m3 || C == Code::e5m2) {
      return from_f16(_mm512_extracti64x4_epi64(u.part[J % 2], J / 2));
    } else if constexpr (C == Code::int8) {
      return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * J), 24));
    } else {
      // The low 16 bits hold the nibbles of even K, the high ones those of odd K. The permutation
      // looks at the lowest four bits of a word.
      const __m512i word = u.part[J % 2 * 2 + J / 4];
      return _mm512_permutexvar_ps(J / 2 % 2 == 0 ? word : _mm512_srli_epi32(word, 4),
                                   nibble_values<C>());
    }
  }

  /// The sixteen 4-bit codes as f32.
  template <Code C>
  static __m512 nibble_values() {
    if constexpr (C == Code::int4) {
      return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    } else {
      return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    }
  }

#include "linear/avx512_common-inl.h"
};

#include "linear/elementwise-inl.h"
#include "linear/tile-inl.h"
#include "linear/whole_table-inl.h"

}  // namespace avx512
}  // namespace

void fill_avx512(Kernels& k) { avx512::fill_f32<6>(k, CpuIsa::avx512); }

}  // namespace moekit::linear

#else

namespace moekit::linear {
void fill_avx512(Kernels&) {}
}  // namespace moekit::linear

#endif
