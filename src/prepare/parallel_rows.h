// Row loops over the pool in at most kMaxTasks tasks, so that scratch can be counted in tasks
// without knowing the number of threads at plan time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/math.h"
#include "base/thread_pool.h"

namespace moekit::prepare {

inline constexpr int64_t kMaxTasks = 64;

/// Bytes that make a task worth handing out: about 10 µs of copying at 6 GB/s and core, a hundred
/// times what the hand-out costs.
inline constexpr int64_t kTaskBytes = 64 << 10;

/// Runs body(begin, end, task) over [0, num_rows) in pieces; task < kMaxTasks. threads may be null.
/// body must not throw.
template <typename Body>
void parallel_rows(ThreadPool* threads, int64_t num_rows, int64_t bytes_per_row, Body body) {
  if (num_rows <= 0) return;
  const int64_t least_rows = ceil_div(kTaskBytes, std::max<int64_t>(bytes_per_row, 1));
  const int64_t rows = std::max(least_rows, ceil_div(num_rows, kMaxTasks));
  const int64_t num_tasks = ceil_div(num_rows, rows);
  if (threads == nullptr || num_tasks == 1) {
    body(int64_t{0}, num_rows, int64_t{0});
    return;
  }
  auto piece = [&](int64_t task, int /*thread*/) {
    body(task * rows, std::min(num_rows, (task + 1) * rows), task);
  };
  threads->parallel_for(num_tasks, piece);
}

}  // namespace moekit::prepare
