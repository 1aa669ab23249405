#include "base/buffer.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "base/check.h"

namespace moekit {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

class HeapAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    // Blocks of several huge pages start on one, so that the kernel may back them with 2 MiB pages
    // (fewer TLB misses while weights stream).
    const bool huge = bytes >= 4 * kHugePage;
    const size_t align = huge ? kHugePage : alignment;
    const size_t size = (bytes + align - 1) / align * align;
    void* data = std::aligned_alloc(align, size);
    if (data != nullptr && huge) madvise(data, size, MADV_HUGEPAGE);
    return data;
  }
  void deallocate(void* data, size_t) noexcept override { std::free(data); }
};

}  // namespace

Allocator& default_allocator() {
  static HeapAllocator* allocator = new HeapAllocator;
  return *allocator;
}

Buffer::Buffer(int64_t bytes, Allocator* allocator)
    : size_(bytes), allocator_(allocator != nullptr ? allocator : &default_allocator()) {
  MOEKIT_CHECK(bytes >= 0, "a buffer needs a size of 0 or more, got {}", bytes);
  if (bytes == 0) return;
  data_ = static_cast<std::byte*>(allocator_->allocate(static_cast<size_t>(bytes), kAlignment));
  MOEKIT_CHECK_AS(ErrorCode::out_of_memory, data_ != nullptr,
                  "could not allocate {} bytes; lower the token capacity or free memory", bytes);
}

Buffer Buffer::zeroed(int64_t bytes, Allocator* allocator) {
  Buffer buffer(bytes, allocator);
  if (bytes > 0) std::memset(buffer.data(), 0, static_cast<size_t>(bytes));
  return buffer;
}

Buffer::~Buffer() {
  if (data_ != nullptr) allocator_->deallocate(data_, static_cast<size_t>(size_));
}

}  // namespace moekit
