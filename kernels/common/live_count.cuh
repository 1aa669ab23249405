// How many rows of a call are real.
#pragma once

#include <cstdint>

namespace moekit::kernels {

/// `capacity`, or the device's own count where there is one, within [0, capacity]. Read from L2:
/// not every kernel waits for its predecessor first (quantize_rows()).
template <typename Count>
__device__ __forceinline__ Count live_count(Count capacity, const int32_t* live) {
  if (live == nullptr) return capacity;
  const int32_t count = __ldcg(live);
  return count < capacity ? (count < 0 ? 0 : count) : capacity;
}

}  // namespace moekit::kernels
