// Allocator: where long-lived memory of moekit comes from (packed weights, workspaces, symmetric
// heaps).
#pragma once

#include <cstddef>

#include "moekit/export.h"

namespace moekit {

/// Called at plan time only, never by run(). Must be thread-safe and outlive everything made with
/// it.
class MOEKIT_API Allocator {
 public:
  virtual ~Allocator() = default;
  /// Returns `bytes` (> 0) aligned to `alignment` (a power of two), or nullptr when there is none.
  virtual void* allocate(size_t bytes, size_t alignment) = 0;
  virtual void deallocate(void* data, size_t bytes) noexcept = 0;
};

/// Host memory from the C++ heap; large blocks are advised to use huge pages. Never destroyed.
MOEKIT_API Allocator& default_allocator();

}  // namespace moekit
