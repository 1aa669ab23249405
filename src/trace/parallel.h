// ThreadPool::parallel_for with a span for each thread that takes part.
#pragma once

#include <atomic>

#include "base/thread_pool.h"
#include "trace/span.h"

namespace moekit::trace {

/// body(task, thread) for every task in [0, num_tasks), as ThreadPool::parallel_for does it; each
/// thread's share shows as one span of `stage` when the calling thread is being recorded.
template <typename Body>
void parallel_for(Stage stage, ThreadPool& pool, int64_t num_tasks, Body& body) {
  const Context* context = current();
  if (context == nullptr) {
    pool.parallel_for(num_tasks, body);
    return;
  }
  std::atomic<int64_t> next{0};
  auto drain = [&](int thread) {
    const Span span(stage, context, thread);
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
      body(task, thread);
    }
  };
  if (num_tasks <= 1) {
    drain(0);
  } else {
    pool.run_awake(drain);
  }
}

}  // namespace moekit::trace
