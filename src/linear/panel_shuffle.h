// The order of codes inside a 64-byte unit beyond the plain transposition.
#pragma once

#include "linear/codes.h"

namespace moekit::linear {

/// The permutations that follow the transposition, on four columns of one unit.
enum class Shuffle : uint8_t {
  none,
  words,    ///< 8-bit floats: both words of a column apart: [c0 c1 c2 c3 | c0 c1 c2 c3]
  nibbles,  ///< 4-bit codes: even K in the low word, odd K in the high one
};

constexpr Shuffle shuffle_of(Code code) {
  if (code == Code::e4m3 || code == Code::e5m2) return Shuffle::words;
  if (bits_of(code) == 4) return Shuffle::nibbles;
  return Shuffle::none;
}

}  // namespace moekit::linear
