#include "tensor/bf16_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "tensor/bf16_avx2-inl.h"
#endif

namespace moekit {
namespace {

#if defined(__x86_64__)

/// Both return how many values they have converted: the rest is less than a vector.
[[gnu::target("avx2")]] int64_t narrow_avx2(const float* in, int64_t width, uint16_t* out) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    const __m256i low = avx2::round_to_bf16(_mm256_loadu_ps(in + i));
    const __m256i high = avx2::round_to_bf16(_mm256_loadu_ps(in + i + 8));
    // The pack works in halves of the register: put its quarters in order.
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), both);
  }
  return i;
}

[[gnu::target("avx2")]] int64_t widen_avx2(const uint16_t* in, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) _mm256_storeu_ps(out + i, avx2::widen_bf16(in + i));
  return i;
}

#endif

}  // namespace

void f32_to_bf16_row(const float* in, int64_t width, uint16_t* out) {
  int64_t i = 0;
#if defined(__x86_64__)
  if (avx2::usable()) i = narrow_avx2(in, width, out);
#endif
  for (; i < width; ++i) out[i] = round_to_bf16(in[i]);
}

void bf16_to_f32_row(const uint16_t* in, int64_t width, float* out) {
  int64_t i = 0;
#if defined(__x86_64__)
  if (avx2::usable()) i = widen_avx2(in, width, out);
#endif
  for (; i < width; ++i) out[i] = bf16_to_f32(in[i]);
}

}  // namespace moekit
