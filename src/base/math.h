// Integer arithmetic shared by host code: divisions that round up, alignment, products that may not
// overflow.
#pragma once

#include <cstdint>

#include "base/check.h"

namespace moekit {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// a * b, or Error{code} naming `what` when the product leaves int64.
inline int64_t checked_mul(int64_t a, int64_t b, const char* what,
                           ErrorCode code = ErrorCode::invalid_argument) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) {
    fail(code, "{}: {} * {} does not fit into 64 bits", what, a, b);
  }
  return product;
}

}  // namespace moekit
