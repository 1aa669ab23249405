// WorkspaceLayout: named regions of one scratch block, computed once at plan time and passed as a
// value.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/math.h"

namespace moekit {

/// A region's place in the block. Offsets are 128-byte aligned.
struct Region {
  int64_t offset = 0;
  int64_t bytes = 0;
  template <typename T>
  T* in(std::byte* base) const {
    return reinterpret_cast<T*>(base + offset);
  }
};

/// Hands out regions; total() is what must be allocated.
class WorkspaceLayout {
 public:
  /// `count` elements of `element_bytes`. Throws invalid_argument when the size overflows.
  Region add(int64_t count, int64_t element_bytes) {
    Region r{total_, checked_mul(count, element_bytes, "workspace region")};
    total_ += round_up(r.bytes, 128);
    return r;
  }
  int64_t total() const { return total_; }

 private:
  int64_t total_ = 0;
};

}  // namespace moekit
