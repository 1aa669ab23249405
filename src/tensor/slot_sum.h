// The ordered sum of rows: the definition that combine, reduce and experts share. One loop, widened
// where the CPU can, which can't change bits.
#pragma once

#include <cstdint>

namespace moekit {

/// What a row pointer of sum_rows() points to.
enum class SumRow : uint8_t {
  f32,
  bf16,
  f32_as_bf16,  ///< f32 values that count as if they had travelled as bf16
};

/// How sums go to memory.
enum class SumStore : uint8_t {
  cached,
  streamed,  ///< past the caches, for results that no cache would keep until they are read
};

/// The store for `bytes` of results that are written in one go.
inline SumStore sum_store_for(int64_t bytes) {
  // A core's share of the last-level cache is a few MiB; below it the reader may still find them.
  constexpr int64_t kStreamedBytes = int64_t{16} << 20;
  return bytes >= kStreamedBytes ? SumStore::streamed : SumStore::cached;
}

/// out = s0 + s1 + ... over rows [num_rows], with s_j = weights[j] * rows[j] rounded to fp32, added
/// left to right from the first present row's product, no fused multiply-add. A null row is
/// skipped; without any row out is exact zeros. weights may be null: rows count as they are. Bits
/// do not depend on how a caller splits `width`. `out` may be one of the rows.
void sum_rows(SumRow type, const void* const* rows, const float* weights, int64_t num_rows,
              int64_t width, float* out, SumStore store = SumStore::cached);

}  // namespace moekit
