// What an exchange moves, told to the trace.
#pragma once

#include <cstdint>
#include <span>

#include "trace/span.h"

namespace moekit::comm {

/// Notes rows of `row_bytes` that rank `me` sends. Counted only when somebody records it.
inline void note_traffic(std::span<const int64_t> send_bytes, int me, int64_t row_bytes) {
  if (!trace::wants_notes()) return;
  int64_t total = 0;
  for (const int64_t bytes : send_bytes) total += bytes;
  const int64_t own = send_bytes[static_cast<size_t>(me)];
  trace::note_moved(total - own, own, row_bytes > 0 ? total / row_bytes : 0);
}

}  // namespace moekit::comm
