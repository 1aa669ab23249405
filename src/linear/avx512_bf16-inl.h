// struct Isa of AVX-512 with VBMI and BF16: rows are bf16 pairs, a word of weights is a bf16 pair,
// products are vdpbf16ps (fp32 accumulation; it takes subnormal inputs as zero, which codes and
// scales here never produce except for inputs below 2^-126). Included by that ISA's file and by
// AMX's, each inside its own namespace.
struct Isa {
  static constexpr int kLanes = 16;
  static constexpr int kPerDot = 2;
  static constexpr int kMaxRows = 12;  // 24 accumulators; 28 were slower on Zen 5
  static constexpr int kWideRows = 12;
  static constexpr int kShortRows = 6;  // 12 sums of a short segment beside their totals
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

  /// What the words of sixteen columns are made from: step<C, J>(unit) is the K pair J.
  template <Code C>
  struct Unit {
    static constexpr int kParts = bits_of(C) == 8 ? 2 : 1;
    __m512i part[kParts];
  };

  template <Code C>
  [[gnu::always_inline]] static inline Unit<C> unit(const std::byte* p) {
    const __m512i v = bits(p);
    if constexpr (C == Code::e4m3 || C == Code::e5m2) {
      // Tables over the seven magnitude bits give the two bytes of a bf16, the sign is put back
      // into the high one; the interleave leaves each pair of K on its column (see
      // panel_shuffle.h).
      const ByteTables& t = kF8Tables[C == Code::e5m2];
      const __m512i low = lookup(t.low, v);
      const __m512i high = with_sign(lookup(t.high, v), v);
      return {{_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)}};
    } else if constexpr (C == Code::int8) {
      // The same over magnitudes. -128 has the index of 0, which its own mask clears.
      const __m512i magnitude = _mm512_abs_epi8(v);
      const __m512i low = lookup(kInt8Tables.low, magnitude);
      const __m512i high =
          with_sign(_mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(v, v),
                                                   _mm512_load_si512(kInt8Tables.high), magnitude,
                                                   _mm512_load_si512(kInt8Tables.high + 64)),
                    v);
      return {{_mm512_permutex2var_epi8(low, _mm512_load_si512(kInterleave.low), high),
               _mm512_permutex2var_epi8(low, _mm512_load_si512(kInterleave.high), high)}};
    } else {
      return {{v}};
    }
  }

  template <Code C, int J>
  [[gnu::always_inline]] static inline W step(const Unit<C>& u) {
    if constexpr (bits_of(C) == 4) {
      // A 16-bit lane holds the nibbles of (column, parity); the table is doubled, so that the
      // index needs no mask.
      return _mm512_permutexvar_epi16(_mm512_srli_epi16(u.part[0], 4 * J), nibble_table<C>());
    } else {
      return u.part[J];
    }
  }

  /// Table[index & 127] of each byte.
  [[gnu::always_inline]] static inline __m512i lookup(const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  }
  /// magnitude | (v & 0x80), bytewise.
  [[gnu::always_inline]] static inline __m512i with_sign(__m512i magnitude, __m512i v) {
    return _mm512_ternarylogic_epi32(magnitude, v, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
  }

  struct ByteTables {
    alignas(64) uint8_t low[128];
    alignas(64) uint8_t high[128];
  };
  /// Bytes of the bf16 values of codes [0, 128) of a format with `exponent_bits`.
  static constexpr ByteTables f8_tables(int exponent_bits, bool specials) {
    ByteTables t{};
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
  /// Bytes of the bf16 values of the integers [0, 128); those of 128 at index 0.
  static constexpr ByteTables int8_tables() {
    ByteTables t{};
    for (int i = 0; i < 128; ++i) {
      const int value = i == 0 ? 128 : i;
      int exponent = 0;
      while (value >> (exponent + 1) != 0) ++exponent;
      const int bf16 = (exponent + 127) << 7 | (value << (7 - exponent) & 127);
      t.low[i] = static_cast<uint8_t>(bf16 & 255);
      t.high[i] = static_cast<uint8_t>(bf16 >> 8);
    }
    return t;
  }
  /// Columns of four K in a row: their bytes (0, 1), then (2, 3), of the low and of the high halves
  /// by turns. Indices of a permutation of two vectors.
  static constexpr ByteTables interleave() {
    ByteTables t{};
    for (int i = 0; i < 64; ++i) {
      const int byte = i / 4 * 4 + i % 4 / 2 + i % 2 * 64;
      t.low[i] = static_cast<uint8_t>(byte);
      t.high[i] = static_cast<uint8_t>(byte + 2);
    }
    return t;
  }
  static const ByteTables kF8Tables[2];
  static const ByteTables kInt8Tables;
  static const ByteTables kInterleave;

  template <Code C>
  static __m512i nibble_table() {
    constexpr int kTable = C == Code::int4;
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kNibbleHigh[kTable]));
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kNibbleLow[kTable]));
    const __m256i words =
        _mm256_setr_m128i(_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high));
    return _mm512_broadcast_i64x4(words);
  }

#include "linear/avx512_common-inl.h"
#include "linear/nibble_tables-inl.h"
};

alignas(64) constexpr Isa::ByteTables Isa::kF8Tables[2] = {Isa::f8_tables(4, false),
                                                           Isa::f8_tables(5, true)};
alignas(64) constexpr Isa::ByteTables Isa::kInt8Tables = Isa::int8_tables();
alignas(64) constexpr Isa::ByteTables Isa::kInterleave = Isa::interleave();
