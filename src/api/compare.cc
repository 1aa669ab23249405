// Comparison of outputs: row by row, in fp64.
#include <algorithm>
#include <cmath>
#include <limits>

#include "moekit/tools.h"

namespace moekit {
namespace {

struct RowSums {
  double difference = 0;  ///< sum (y - r)^2 over finite pairs
  double reference = 0;   ///< sum r^2
  double max_abs = 0;
  int64_t mismatches = 0;
};

/// Neither or both NaN, or the same infinity.
bool same_nonfinite(float y, float r) { return (std::isnan(y) && std::isnan(r)) || y == r; }

RowSums sum_row(const float* y, const float* r, int64_t width) {
  RowSums sums;
  for (int64_t i = 0; i < width; ++i) {
    if (!std::isfinite(y[i]) || !std::isfinite(r[i])) {
      if (!same_nonfinite(y[i], r[i])) ++sums.mismatches;
      continue;
    }
    const double d = static_cast<double>(y[i]) - static_cast<double>(r[i]);
    sums.difference += d * d;
    sums.reference += static_cast<double>(r[i]) * static_cast<double>(r[i]);
    sums.max_abs = std::max(sums.max_abs, std::abs(d));
  }
  return sums;
}

double relative(double difference, double reference) {
  if (difference == 0) return 0;
  if (reference == 0) return std::numeric_limits<double>::infinity();
  return std::sqrt(difference) / std::sqrt(reference);
}

}  // namespace

Errors compare(const float* y, const float* reference, int64_t num_rows, int64_t width) {
  Errors errors;
  double difference = 0, total = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const RowSums sums = sum_row(y + row * width, reference + row * width, width);
    const double row_rms = relative(sums.difference, sums.reference);
    if (errors.worst_row < 0 || row_rms > errors.worst_row_rms) {
      errors.worst_row_rms = row_rms;
      errors.worst_row = row;
    }
    errors.max_abs = std::max(errors.max_abs, sums.max_abs);
    if (errors.nonfinite_mismatches == 0 && sums.mismatches > 0) errors.nonfinite_row = row;
    errors.nonfinite_mismatches += sums.mismatches;
    difference += sums.difference;
    total += sums.reference;
  }
  errors.rel_rms = relative(difference, total);
  return errors;
}

OutputStats stats_of(const std::vector<float>& output) {
  OutputStats stats;
  double sum = 0;
  int64_t finite = 0;
  for (float value : output) {
    if (std::isnan(value)) {
      ++stats.nan_count;
    } else if (std::isinf(value)) {
      ++stats.inf_count;
    } else {
      sum += static_cast<double>(value) * static_cast<double>(value);
      stats.max_abs = std::max(stats.max_abs, std::abs(static_cast<double>(value)));
      ++finite;
    }
  }
  if (finite > 0) stats.rms = std::sqrt(sum / static_cast<double>(finite));
  return stats;
}

}  // namespace moekit
