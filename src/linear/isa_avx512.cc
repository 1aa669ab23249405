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
  static constexpr Code kScratchCode = Code::f32;
  static constexpr int kWideRows = 12;
  static constexpr bool kStepwise = false;
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

  /// The one word of an f32 unit.
  static W word(const std::byte* p) { return load(reinterpret_cast<const float*>(p)); }

  /// f(j, w) for the unit's K in ascending order.
  template <Code C, typename F>
  [[gnu::always_inline]] static inline void decode(const std::byte* p, F&& f) {
    if constexpr (C == Code::bf16) {
      const auto v = bits(p);
      f(0, low_half(v));
      f(1, high_half(v));
    } else if constexpr (C == Code::f16) {
      const __m512i v = bits(p);
      f(0, from_f16(_mm512_cvtepi32_epi16(v)));
      f(1, from_f16(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16))));
    } else if constexpr (C == Code::e4m3 || C == Code::e5m2) {
      decode_f8<C>(p, f);
    } else if constexpr (C == Code::int8) {
      const __m512i v = bits(p);
      f(0, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24)));
      f(1, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 16), 24)));
      f(2, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 8), 24)));
      f(3, _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 24)));
    } else {
      decode_nibbles<C>(p, f);
    }
  }

  /// See the AVX2 file: an 8-bit float in the high byte of a 16-bit lane is an f16, or nearly. The
  /// permutation brings the first pairs of all 16 columns into the low 32 bytes.
  template <Code C, typename F>
  [[gnu::always_inline]] static inline void decode_f8(const std::byte* p, F&& f) {
    const __m512i v = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bits(p));
    __m512i even = _mm512_slli_epi16(v, 8);
    __m512i odd;
    if constexpr (C == Code::e4m3) {
      const __m512i mask = _mm512_set1_epi16(static_cast<short>(0xbf80));
      even = _mm512_and_si512(_mm512_srai_epi16(even, 1), mask);
      odd = _mm512_and_si512(_mm512_srai_epi16(v, 1), mask);
    } else {
      odd = _mm512_and_si512(v, _mm512_set1_epi16(static_cast<short>(0xff00)));
    }
    f(0, from_f16(_mm512_castsi512_si256(even)));
    f(1, from_f16(_mm512_castsi512_si256(odd)));
    f(2, from_f16(_mm512_extracti64x4_epi64(even, 1)));
    f(3, from_f16(_mm512_extracti64x4_epi64(odd, 1)));
  }

  /// A 16-bit lane holds the four nibbles of (column, parity): word permutes of a table of bf16,
  /// doubled to 32 entries so that the index needs no mask.
  template <Code C, typename F>
  [[gnu::always_inline]] static inline void decode_nibbles(const std::byte* p, F&& f) {
    const __m512i table = nibble_table<C>();
    const __m512i v = bits(p);
    const __m512i pair0 = _mm512_permutexvar_epi16(v, table);
    f(0, low_half(pair0));
    f(1, high_half(pair0));
    const __m512i pair1 = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table);
    f(2, low_half(pair1));
    f(3, high_half(pair1));
    const __m512i pair2 = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table);
    f(4, low_half(pair2));
    f(5, high_half(pair2));
    const __m512i pair3 = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table);
    f(6, low_half(pair3));
    f(7, high_half(pair3));
  }

#include "linear/avx512_common-inl.h"
#include "linear/nibble_tables-inl.h"
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
