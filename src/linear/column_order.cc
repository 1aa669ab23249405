#include "linear/column_order.h"

#include <algorithm>
#include <vector>

namespace moekit::linear {
namespace {

int32_t group_of(const StoredMatrix& m, int64_t column) {
  if (m.group_index != nullptr) return m.group_index[column];
  return m.scales.col_group > 0 ? static_cast<int32_t>(column / m.scales.col_group) : 0;
}

/// counters[group] = its columns.
void count_columns(const StoredMatrix& m, std::span<int32_t> counters) {
  std::fill(counters.begin(), counters.end(), 0);
  for (int64_t k = 0; k < m.cols; ++k) ++counters[static_cast<size_t>(group_of(m, k))];
}

/// Turns counts into each group's first place; returns where the last one ends.
int64_t place_groups(std::span<int32_t> counters, int32_t group) {
  int32_t next = 0, end = 0;
  for (int32_t& counter : counters) {
    const int32_t first = next;
    if (counter > 0) {
      end = first + counter;
      next = first + round_up(counter, group);
    }
    counter = first;
  }
  return end;
}

}  // namespace

int64_t count_groups(const StoredMatrix& m) {
  int32_t largest = 0;
  for (int64_t k = 0; k < m.cols; ++k) largest = std::max(largest, group_of(m, k));
  return int64_t{largest} + 1;
}

SortedColumns sort_columns(std::span<const StoredMatrix* const> matrices) {
  std::vector<int32_t> counters;
  const auto places_with = [&](int32_t group) {
    int64_t places = 0;
    for (const StoredMatrix* m : matrices) {
      counters.resize(static_cast<size_t>(count_groups(*m)));
      count_columns(*m, counters);
      places = std::max(places, place_groups(counters, group));
    }
    return places;
  };
  const StoredMatrix& first = *matrices[0];
  const auto stored = static_cast<int32_t>(first.scales.col_group);
  if (stored > 0 && stored % 16 == 0 && places_with(stored) == first.cols) {
    return {stored, first.cols};
  }
  const int32_t group = stored == 16 ? 16 : 32;
  return {group, places_with(group)};
}

void fill_order(const StoredMatrix& m, const SortedColumns& sorted, int32_t* order,
                int32_t* counters) {
  const std::span<int32_t> next(counters, static_cast<size_t>(count_groups(m)));
  count_columns(m, next);
  place_groups(next, sorted.group);
  std::fill_n(order, order_entries(sorted.places), static_cast<int32_t>(m.cols));
  for (int64_t k = 0; k < m.cols; ++k) {
    order[next[static_cast<size_t>(group_of(m, k))]++] = static_cast<int32_t>(k);
  }
}

}  // namespace moekit::linear
