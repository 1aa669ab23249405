#include "tensor/slot_sum.h"

#include <algorithm>

#include "tensor/bf16_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "tensor/bf16_avx2-inl.h"
#endif

namespace moekit {
namespace {

// Columns kept in registers while the rows are walked: 8 vectors of 8 floats, half of AVX2's
// registers; a whole number of cache lines of the result.
constexpr int64_t kBlock = 64;
constexpr int64_t kLineFloats = 16;

template <SumRow kType>
[[gnu::always_inline]] inline float load(const void* row, int64_t i) {
  if constexpr (kType == SumRow::bf16) {
    return bf16_to_f32(static_cast<const uint16_t*>(row)[i]);
  } else if constexpr (kType == SumRow::f32_as_bf16) {
    return bf16_to_f32(round_to_bf16(static_cast<const float*>(row)[i]));
  } else {
    return static_cast<const float*>(row)[i];
  }
}

/// Columns [begin, begin + n); n is kBlock but for what is left beside whole blocks.
template <SumRow kType>
[[gnu::always_inline]] inline void sum_block(const void* const* rows, const float* weights,
                                             int64_t num_rows, int64_t begin, int64_t n,
                                             float* out) {
  float sum[kBlock];
  bool any = false;
  for (int64_t j = 0; j < num_rows; ++j) {
    if (rows[j] == nullptr) continue;
    const float w = weights != nullptr ? weights[j] : 1.0f;
    if (any) {
      for (int64_t i = 0; i < n; ++i) sum[i] += w * load<kType>(rows[j], begin + i);
    } else {
      for (int64_t i = 0; i < n; ++i) sum[i] = w * load<kType>(rows[j], begin + i);
    }
    any = true;
  }
  if (any) {
    std::copy_n(sum, n, out + begin);
  } else {
    std::fill_n(out + begin, n, 0.0f);
  }
}

template <SumRow kType>
void sum_generic(const void* const* rows, const float* weights, int64_t num_rows, int64_t width,
                 float* out) {
  int64_t c = 0;
  for (; c + kBlock <= width; c += kBlock) {
    sum_block<kType>(rows, weights, num_rows, c, kBlock, out);
  }
  if (c < width) sum_block<kType>(rows, weights, num_rows, c, width - c, out);
}

#if defined(__x86_64__)

#define MOEKIT_AVX2 [[gnu::target("avx2"), gnu::always_inline]] inline

template <SumRow kType>
MOEKIT_AVX2 __m256 load8(const void* row, int64_t i) {
  if constexpr (kType == SumRow::bf16) {
    return avx2::widen_bf16(static_cast<const uint16_t*>(row) + i);
  } else {
    const __m256 x = _mm256_loadu_ps(static_cast<const float*>(row) + i);
    if constexpr (kType == SumRow::f32) return x;
    return _mm256_castsi256_ps(_mm256_slli_epi32(avx2::round_to_bf16(x), 16));
  }
}

constexpr int kVectors = kBlock / 8;

template <SumRow kType, bool kStreamed>
MOEKIT_AVX2 void sum_block_avx2(const void* const* rows, const float* weights, int64_t num_rows,
                                int64_t begin, float* out) {
  __m256 sum[kVectors];
  int64_t j = 0;
  while (j < num_rows && rows[j] == nullptr) ++j;
  if (j == num_rows) {
#pragma GCC unroll 8
    for (__m256& s : sum) s = _mm256_setzero_ps();
  } else {
    const __m256 w = _mm256_set1_ps(weights != nullptr ? weights[j] : 1.0f);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      sum[i] = _mm256_mul_ps(w, load8<kType>(rows[j], begin + i * 8));
    }
  }
  for (++j; j < num_rows; ++j) {
    if (rows[j] == nullptr) continue;
    const __m256 w = _mm256_set1_ps(weights != nullptr ? weights[j] : 1.0f);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      sum[i] = _mm256_add_ps(sum[i], _mm256_mul_ps(w, load8<kType>(rows[j], begin + i * 8)));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    if constexpr (kStreamed) {
      _mm256_stream_ps(out + begin + i * 8, sum[i]);
    } else {
      _mm256_storeu_ps(out + begin + i * 8, sum[i]);
    }
  }
}

template <SumRow kType>
[[gnu::target("avx2")]] void sum_avx2(const void* const* rows, const float* weights,
                                      int64_t num_rows, int64_t width, float* out, SumStore store) {
  int64_t c = 0;
  if (store == SumStore::streamed) {
    // Whole lines leave the core at once: begin on one.
    const auto misfit =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) / sizeof(float)) % kLineFloats;
    c = std::min(width, (kLineFloats - misfit) % kLineFloats);
    if (c > 0) sum_block<kType>(rows, weights, num_rows, 0, c, out);
    for (; c + kBlock <= width; c += kBlock) {
      sum_block_avx2<kType, true>(rows, weights, num_rows, c, out);
    }
    _mm_sfence();  // streamed stores are not ordered by what publishes them
  } else {
    for (; c + kBlock <= width; c += kBlock) {
      sum_block_avx2<kType, false>(rows, weights, num_rows, c, out);
    }
  }
  if (c < width) sum_block<kType>(rows, weights, num_rows, c, width - c, out);
}

#undef MOEKIT_AVX2
#endif

template <SumRow kType>
void dispatch(const void* const* rows, const float* weights, int64_t num_rows, int64_t width,
              float* out, [[maybe_unused]] SumStore store) {
#if defined(__x86_64__)
  if (avx2::usable()) return sum_avx2<kType>(rows, weights, num_rows, width, out, store);
#endif
  sum_generic<kType>(rows, weights, num_rows, width, out);
}

}  // namespace

void sum_rows(SumRow type, const void* const* rows, const float* weights, int64_t num_rows,
              int64_t width, float* out, SumStore store) {
  switch (type) {
    case SumRow::f32: return dispatch<SumRow::f32>(rows, weights, num_rows, width, out, store);
    case SumRow::bf16: return dispatch<SumRow::bf16>(rows, weights, num_rows, width, out, store);
    case SumRow::f32_as_bf16:
      return dispatch<SumRow::f32_as_bf16>(rows, weights, num_rows, width, out, store);
  }
}

}  // namespace moekit
