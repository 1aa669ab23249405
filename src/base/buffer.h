// Buffer: owned, aligned host memory through an exchangeable Allocator, so that a test or a caller
// can count or place it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "moekit/allocator.h"

namespace moekit {

/// Move-only owner of `size` bytes aligned to kAlignment. Contents are uninitialised unless
/// `zeroed` made it.
class Buffer {
 public:
  static constexpr size_t kAlignment = 128;

  Buffer() = default;
  /// Throws out_of_memory naming the size.
  explicit Buffer(int64_t bytes, Allocator* allocator = nullptr);
  static Buffer zeroed(int64_t bytes, Allocator* allocator = nullptr);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~Buffer();

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(allocator_, other.allocator_);
  }
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  Allocator* allocator_ = nullptr;
};

}  // namespace moekit
