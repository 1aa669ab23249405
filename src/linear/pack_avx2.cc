// Packing loops in 32-byte vectors: columns c..c+3 in the low lane, c+4..c+7 in the high one.
#include "linear/pack_loops.h"
#include "linear/panel_shuffle.h"

#if defined(__AVX2__)

#include <immintrin.h>

namespace moekit::linear {
namespace {

struct Ops {
  static constexpr int kCols = 8;
  using V = __m256i;

  static V load(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static V load_lanes(const std::byte* low, const std::byte* high) {
    return _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(high),
                               reinterpret_cast<const __m128i*>(low));
  }
  /// Rows 0 and 4 of `rows`.
  static V load_rows(const std::byte* const* rows, int64_t at) {
    return load_lanes(rows[0] + at, rows[4] + at);
  }
  static void store(std::byte* p, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static void store_lanes(std::byte* low, std::byte* high, V v) {
    _mm256_storeu2_m128i(reinterpret_cast<__m128i*>(high), reinterpret_cast<__m128i*>(low), v);
  }
  static void stream(std::byte* p, V v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
  static void fence() { _mm_sfence(); }
  static V splat(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static V exclusive_or(V a, V b) { return _mm256_xor_si256(a, b); }
  static V either(V a, V b) { return _mm256_or_si256(a, b); }
  static V both(V a, V b) { return _mm256_and_si256(a, b); }
  template <int kBits>
  static V right(V x) {
    return _mm256_srli_epi32(x, kBits);
  }
  template <int kBits>
  static V left(V x) {
    return _mm256_slli_epi32(x, kBits);
  }
  static V clear(V x, V mask) { return _mm256_andnot_si256(mask, x); }
  static bool any(V x) { return _mm256_testz_si256(x, x) == 0; }
  static V nan_bytes(V x) {
    const V magnitude = _mm256_set1_epi8(0x7f);
    return _mm256_cmpeq_epi8(_mm256_and_si256(x, magnitude), magnitude);
  }

  static V lo8(V a, V b) { return _mm256_unpacklo_epi8(a, b); }
  static V hi8(V a, V b) { return _mm256_unpackhi_epi8(a, b); }
  static V lo16(V a, V b) { return _mm256_unpacklo_epi16(a, b); }
  static V hi16(V a, V b) { return _mm256_unpackhi_epi16(a, b); }
  static V lo32(V a, V b) { return _mm256_unpacklo_epi32(a, b); }
  static V hi32(V a, V b) { return _mm256_unpackhi_epi32(a, b); }
  static V lo64(V a, V b) { return _mm256_unpacklo_epi64(a, b); }
  static V hi64(V a, V b) { return _mm256_unpackhi_epi64(a, b); }
  static V swap_middle(V x) { return _mm256_shuffle_epi32(x, 0xd8); }
  /// Orders that make unpacking inside lanes give columns in order.
  static V spread32(V x) {
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  }
  static V spread64(V x) { return _mm256_permute4x64_epi64(x, 0xd8); }

  static V join_pairs(V a, V b, int32_t shift) {
    const __m128i count = _mm_cvtsi32_si128(shift);
    const V high = _mm256_slli_epi32(_mm256_srl_epi32(b, count), 16);
    return _mm256_blend_epi16(_mm256_srl_epi32(a, count), high, 0xaa);
  }
  static V every_other_byte(V x, V y, int32_t shift) {
    const __m128i count = _mm_cvtsi32_si128(shift);
    const V low = _mm256_set1_epi16(255);
    const V a = _mm256_and_si256(_mm256_srl_epi16(x, count), low);
    const V b = _mm256_and_si256(_mm256_srl_epi16(y, count), low);
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
  }
  static V shuffle_words(V x) {
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                      0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)));
  }
  /// Multiply-adds join two nibbles into a byte; packing leaves even K in the low half of a lane.
  static V shuffle_nibbles(V x) {
    const V mask = _mm256_set1_epi8(15);
    const V weights = _mm256_set1_epi16(0x1001);
    const V even = _mm256_maddubs_epi16(_mm256_and_si256(x, mask), weights);
    const V odd = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(x, 4), mask), weights);
    return _mm256_shuffle_epi8(_mm256_packus_epi16(even, odd),
                               _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                   0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)));
  }
};

#include "linear/pack_loops-inl.h"

}  // namespace

const PackLoops& avx2_pack_loops() {
  static const PackLoops loops{pack_rows,
                               pack_outer,
                               split_words,
                               locate_columns,
                               pack_columns,
                               pack_awq,
                               generic_pack_loops().scales,
                               generic_pack_loops().zero_words,
                               pack_shifted_zeros};
  return loops;
}

}  // namespace moekit::linear

#else

namespace moekit::linear {
const PackLoops& avx2_pack_loops() { return generic_pack_loops(); }
}  // namespace moekit::linear

#endif
