// struct Isa of AVX-512 with VBMI and BF16: rows are bf16 pairs, a word of weights is a bf16 pair,
// products are vdpbf16ps (fp32 accumulation; it takes subnormal inputs as zero, which codes and
// scales here never produce except for inputs below 2^-126). Included by that ISA's file and by
// AMX's, each inside its own namespace.
struct Isa {
  static constexpr int kLanes = 16;
  static constexpr int kPerDot = 2;
  static constexpr int kMaxRows = 12;  // 24 accumulators; 28 were slower on Zen 5
  static constexpr Code kScratchCode = Code::bf16;
  static constexpr int kWideRows = 12;
  static constexpr bool kStepwise = false;
  static constexpr float kE4m3Factor = 1.0f;
  using V = __m512;
  using W = __m512i;
  using X = uint32_t;

  /// No decoder here reads subnormals.
  struct DenormalGuard {};

  static V zero() { return _mm512_setzero_ps(); }
  static V splat(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static void store_weight(std::byte* p, W w) { _mm512_storeu_si512(p, w); }
  static W broadcast(const X* x) { return _mm512_set1_epi32(static_cast<int>(*x)); }
  static V dot(W w, W x, V acc) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
  }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }

  static __m512i bits(const std::byte* p) { return _mm512_loadu_si512(p); }

  /// The one word of a bf16 unit.
  static W word(const std::byte* p) { return bits(p); }

  /// f(j, w) for the unit's K pairs in ascending order.
  template <Code C, typename F>
  [[gnu::always_inline]] static inline void decode(const std::byte* p, F&& f) {
    if constexpr (C == Code::e4m3 || C == Code::e5m2) {
      decode_f8<C>(p, f);
    } else if constexpr (C == Code::int8) {
      const __m512i v = bits(p);
      f(0, pair_of(_mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24),
                   _mm512_srai_epi32(_mm512_slli_epi32(v, 16), 24)));
      f(1, pair_of(_mm512_srai_epi32(_mm512_slli_epi32(v, 8), 24), _mm512_srai_epi32(v, 24)));
    } else {
      static_assert(C == Code::e2m1 || C == Code::int4);
      const __m512i table = nibble_table<C>();
      const __m512i v = bits(p);
      f(0, _mm512_permutexvar_epi16(v, table));
      f(1, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table));
      f(2, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table));
      f(3, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table));
    }
  }

  /// Integers of at most 8 bits are exact in the high half of their f32.
  static __m512i pair_of(__m512i even, __m512i odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16);
    return _mm512_or_si512(low, _mm512_castps_si512(_mm512_cvtepi32_ps(odd)));
  }

  /// Tables over the seven magnitude bits give the two bytes of a bf16, the sign is put back into
  /// the high one; the interleave leaves each pair of K on its column (see pack_words).
  template <Code C, typename F>
  [[gnu::always_inline]] static inline void decode_f8(const std::byte* p, F&& f) {
    const F8Tables& t = kF8Tables[C == Code::e5m2];
    const __m512i v = bits(p);
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_loadu_si512(t.low), v, _mm512_loadu_si512(t.low + 64));
    const __m512i magnitude =
        _mm512_permutex2var_epi8(_mm512_loadu_si512(t.high), v, _mm512_loadu_si512(t.high + 64));
    // high = magnitude | (v & 0x80)
    const __m512i high =
        _mm512_ternarylogic_epi32(magnitude, v, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    f(0, _mm512_unpacklo_epi8(low, high));
    f(1, _mm512_unpackhi_epi8(low, high));
  }

  struct F8Tables {
    uint8_t low[128];
    uint8_t high[128];
  };
  /// Bytes of the bf16 values of codes [0, 128) of a format with `exponent_bits`.
  static constexpr F8Tables f8_tables(int exponent_bits, bool specials) {
    F8Tables t{};
    const int mantissa_bits = 7 - exponent_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> mantissa_bits;
      int mantissa = code & ((1 << mantissa_bits) - 1);
      int field = exponent + 127 - bias;
      if (specials && exponent == (1 << exponent_bits) - 1) field = 255;
      if (exponent == 0) {
        field = 0;
        if (mantissa != 0) {
          field = 128 - bias;
          while (mantissa >> mantissa_bits == 0) {
            mantissa <<= 1;
            --field;
          }
          mantissa &= (1 << mantissa_bits) - 1;
        }
      }
      const int bf16 = field << 7 | mantissa << (7 - mantissa_bits);
      t.low[code] = static_cast<uint8_t>(bf16 & 255);
      t.high[code] = static_cast<uint8_t>(bf16 >> 8);
    }
    return t;
  }
  static const F8Tables kF8Tables[2];

#include "linear/avx512_common-inl.h"
#include "linear/nibble_tables-inl.h"
};

alignas(64) constexpr Isa::F8Tables Isa::kF8Tables[2] = {Isa::f8_tables(4, false),
                                                         Isa::f8_tables(5, true)};
