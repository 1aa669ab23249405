// Small floats by value, for tests: the nearest representable number, found by scaling to the
// format's grid. Shares no code with the library.
#pragma once

#include <algorithm>
#include <cmath>

namespace moekit::test {

/// x rounded to nearest even on a grid of `mantissa_bits` with smallest normal exponent `emin`,
/// saturated at `largest`.
inline double nearest_on_grid(double x, int mantissa_bits, int emin, double largest) {
  if (x == 0 || std::isnan(x)) return x;
  if (std::isinf(x)) return std::copysign(largest, x);
  const int exponent = std::max(emin, std::ilogb(x));
  const double step = std::ldexp(1.0, exponent - mantissa_bits);
  const double rounded = std::nearbyint(x / step) * step;
  return std::fabs(rounded) > largest ? std::copysign(largest, x) : rounded;
}

inline double nearest_e4m3(double x) { return nearest_on_grid(x, 3, -6, 448); }
inline double nearest_e5m2(double x) { return nearest_on_grid(x, 2, -14, 57344); }
inline double nearest_e2m1(double x) { return nearest_on_grid(x, 1, 0, 6); }

}  // namespace moekit::test
