// What the AVX-512 ISAs share inside struct Isa: scales of 16 columns.

static constexpr bool kAsksSecondCache = true;
/// 32 registers hold sums and totals of four panels.
static constexpr bool kTakesPanelsBeside = true;
/// 32 registers hold all words and one broadcast beside the sums.
static constexpr bool stepwise(int, int, int) { return true; }
/// More chains ran faster from the second cache (4.1 in place of 5.2 cycles for 64 weights of
/// mxfp4) but a fifth slower from memory, whose prefetchers follow one place at a time (Zen 4,
/// 2026-11).
static constexpr int segments_at_once(int, int) { return 1; }
/// Whether so many rows have a loop of their own over plain scales: see run_plain_segments().
static constexpr bool loops_plainly(int rows) { return rows <= 2; }

/// Scales of 16 columns from `column` on, in scale group `group`.
static __m512 scales(Scale kind, const std::byte* base, int64_t group, int column) {
  const auto at = [&](int bytes) { return base + (group * 32 + column) * bytes; };
  switch (kind) {
    case Scale::none: return _mm512_set1_ps(1.0f);
    case Scale::e8m0: {
      const __m512i e =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at(1))));
      // Byte 0 is 2^-127, a subnormal. 255 never gets here: pack() moves it to the column scale.
      return _mm512_castsi512_ps(
          _mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x00400000)));
    }
    case Scale::e4m3: {
      const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(1)));
      const __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(b), 8);
      const __m256i h =
          _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
      return _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
    }
    case Scale::f32_panel: return _mm512_set1_ps(reinterpret_cast<const float*>(base)[group]);
    case Scale::f32: return _mm512_loadu_ps(at(4));
    case Scale::f16:
      return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(2))));
    case Scale::bf16:
      return _mm512_castsi512_ps(_mm512_slli_epi32(
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(2)))), 16));
  }
  return _mm512_setzero_ps();
}

static __m512 negated_zeros(const int8_t* z) {
  const __m512i v = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(z)));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_setzero_si512(), v));
}
