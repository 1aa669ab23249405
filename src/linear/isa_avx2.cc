// AVX2 + FMA + F16C: eight f32 lanes. Every code becomes f32 in registers; see decode() for how.
#include "linear/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace moekit::linear {
namespace {
namespace avx2 {

struct Isa {
  static constexpr int kLanes = 8;
  static constexpr int kPerDot = 1;
  static constexpr int kMaxRows = 6;   // 12 accumulators of 16 registers
  static constexpr int kWideRows = 3;  // the same 12 over 32 columns
  static constexpr int kShortRows = kWideRows;
  static constexpr bool kAsksSecondCache = false;
  static constexpr bool kTakesPanelsBeside = false;
  /// A K at a time over all vectors where chains are long for their number, and where two words are
  /// too few to be worth an order of their own.
  static constexpr bool stepwise(int rows, int vectors, int steps) {
    return rows * 4 <= steps || (steps == 2 && vectors == 2);
  }
  static constexpr int segments_at_once(int rows, int steps) {
    return rows == 1 && steps == 8 ? 2 : 1;
  }
  /// One row of fp8 lost a fifth to it, two rows of nvfp4 gained one.
  static constexpr bool loops_plainly(int rows) { return rows == 2; }
  static constexpr float kE4m3Factor = 1.0f;
  using V = __m256;
  using W = __m256;
  using X = float;

  /// Subnormal inputs count here, whatever the calling thread has set (flush to zero and denormals
  /// are zero are inherited by threads and set by some libraries). Restores the thread's mode.
  class DenormalGuard {
   public:
    DenormalGuard() : saved_(_mm_getcsr()) {
      if ((saved_ & kModes) != 0) _mm_setcsr(saved_ & ~kModes);
    }
    ~DenormalGuard() {
      if ((saved_ & kModes) != 0) _mm_setcsr(saved_);
    }
    DenormalGuard(const DenormalGuard&) = delete;
    DenormalGuard& operator=(const DenormalGuard&) = delete;

   private:
    static constexpr unsigned kModes = 0x8040;  // FTZ, DAZ
    unsigned saved_;
  };

  static V zero() { return _mm256_setzero_ps(); }
  static V splat(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static void store_weight(std::byte* p, W w) { _mm256_storeu_ps(reinterpret_cast<float*>(p), w); }
  static W broadcast(const X* x) { return _mm256_broadcast_ss(x); }
  static V dot(W w, W x, V acc) { return _mm256_fmadd_ps(w, x, acc); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }

  static __m256i bits(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static __m256 low_half(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  static __m256 high_half(__m256i v) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(-65536)));
  }
  static __m256 from_f16_low(__m256i v) { return _mm256_cvtph_ps(_mm256_castsi256_si128(v)); }
  static __m256 from_f16_high(__m256i v) { return _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)); }

  /// What the words of eight columns are made from: step<C, j>(unit) is the weights of K j. In
  /// parts, so that a product can go over several vectors of columns with one K at a time: chains
  /// of sums that depend on each other then lie far apart in the instruction stream, and its
  /// window (registers above all) holds enough of them.
  template <Code C>
  struct Unit {
    static constexpr int kParts = bits_of(C) == 4 ? 4 : bits_of(C) == 8 && C != Code::int8 ? 2 : 1;
    __m256i part[kParts];
  };

  template <Code C>
  [[gnu::always_inline]] static inline Unit<C> unit(const std::byte* p) {
    const __m256i v = bits(p);
    if constexpr (C == Code::f16) {
      // Words hold (k, k + 1) of a column; packus brings the eight even ones together.
      const __m256i mixed = _mm256_packus_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0xffff)),
                                                _mm256_srli_epi32(v, 16));
      return {{_mm256_permute4x64_epi64(mixed, 0xd8)}};
    } else if constexpr (C == Code::e4m3) {
      // The fields go to their places in a bf16, whose exponent bias is 120 larger; the product
      // with 2^120 makes the value, subnormals included (as long as DenormalGuard holds).
      // Converting through f16 instead took twice the time on Zen 3 (2026-11).
      const __m256i mask = _mm256_set1_epi16(static_cast<short>(0x87f0));
      return {{_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4), mask),
               _mm256_and_si256(_mm256_srai_epi16(v, 4), mask)}};
    } else if constexpr (C == Code::e5m2) {
      // An f16 without its low byte.
      const __m256i words = _mm256_permute4x64_epi64(v, 0xd8);
      return {{_mm256_slli_epi16(words, 8),
               _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0xff00)))}};
    } else if constexpr (bits_of(C) == 4) {
      return nibbles<C>(v);
    } else {
      return {{v}};
    }
  }

  /// Two byte tables give the halves of a bf16. The first permutation brings bytes together whose
  /// nibbles are neighbours in K, so that unpacking makes words of (k, k + 1).
  template <Code C>
  [[gnu::always_inline]] static inline Unit<C> nibbles(__m256i v) {
    const __m256i high_table = table(kNibbleHigh[C == Code::int4]);
    const __m256i low_table = table(kNibbleLow[C == Code::int4]);
    const __m256i mask = _mm256_set1_epi8(15);
    v = _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                   0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
    const __m256i a = _mm256_and_si256(v, mask);
    const __m256i b = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
    const __m256i ah = _mm256_shuffle_epi8(high_table, a);
    const __m256i al = _mm256_shuffle_epi8(low_table, a);
    const __m256i bh = _mm256_shuffle_epi8(high_table, b);
    const __m256i bl = _mm256_shuffle_epi8(low_table, b);
    return {{_mm256_unpacklo_epi8(al, ah), _mm256_unpacklo_epi8(bl, bh),
             _mm256_unpackhi_epi8(al, ah), _mm256_unpackhi_epi8(bl, bh)}};
  }

  template <Code C, int J>
  [[gnu::always_inline]] static inline W step(const Unit<C>& u) {
    if constexpr (C == Code::f32) {
      return _mm256_castsi256_ps(u.part[0]);
    } else if constexpr (C == Code::bf16 || bits_of(C) == 4) {
      return J % 2 == 0 ? low_half(u.part[J / 2]) : high_half(u.part[J / 2]);
    } else if constexpr (C == Code::f16) {
      return J == 0 ? from_f16_low(u.part[0]) : from_f16_high(u.part[0]);
    } else if constexpr (C == Code::e4m3) {
      const __m256i zeros = _mm256_setzero_si256();
      const __m256i bf16 = J < 2 ? _mm256_unpacklo_epi16(zeros, u.part[J % 2])
                                 : _mm256_unpackhi_epi16(zeros, u.part[J % 2]);
      return _mm256_mul_ps(_mm256_castsi256_ps(bf16), _mm256_set1_ps(0x1p120f));
    } else if constexpr (C == Code::e5m2) {
      return J < 2 ? from_f16_low(u.part[J % 2]) : from_f16_high(u.part[J % 2]);
    } else {
      static_assert(C == Code::int8);
      return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(u.part[0], 24 - 8 * J), 24));
    }
  }

  static __m256i table(const uint8_t* bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }

  /// Scales of kLanes columns from `column` on, in scale group `group`.
  static V scales(Scale kind, const std::byte* base, int64_t group, int column) {
    const auto at = [&](int bytes) { return base + (group * 32 + column) * bytes; };
    switch (kind) {
      case Scale::none: return splat(1.0f);
      case Scale::e8m0: {
        const __m256i e =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(1))));
        // Byte 0 is 2^-127, a subnormal. 255 never gets here: pack() moves it to the column scale.
        return _mm256_castsi256_ps(
            _mm256_max_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x00400000)));
      }
      case Scale::e4m3: {
        const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(1)));
        const __m128i h =
            _mm_and_si128(_mm_srai_epi16(_mm_unpacklo_epi8(_mm_setzero_si128(), b), 1),
                          _mm_set1_epi16(static_cast<short>(0xbf80)));
        return _mm256_mul_ps(_mm256_cvtph_ps(h), splat(256.0f));
      }
      case Scale::f32_panel:
        return _mm256_broadcast_ss(reinterpret_cast<const float*>(base) + group);
      case Scale::f32: return _mm256_loadu_ps(reinterpret_cast<const float*>(at(4)));
      case Scale::f16:
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at(2))));
      case Scale::bf16:
        return _mm256_castsi256_ps(_mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at(2)))), 16));
    }
    return zero();
  }

  static V negated_zeros(const int8_t* z) {
    const __m256i v = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(z)));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_setzero_si256(), v));
  }

#include "linear/nibble_tables-inl.h"
};

#include "linear/elementwise-inl.h"
#include "linear/tile-inl.h"
#include "linear/whole_table-inl.h"

}  // namespace avx2
}  // namespace

void fill_avx2(Kernels& k) { avx2::fill_f32<3, 5>(k, CpuIsa::avx2); }

}  // namespace moekit::linear

#else

namespace moekit::linear {
void fill_avx2(Kernels&) {}
}  // namespace moekit::linear

#endif
