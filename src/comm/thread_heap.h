// The symmetric heap of ranks that are threads: every part lies in this process, so a put is a copy
// and a flag is one word that its owner watches.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "comm/symmetric_heap.h"
#include "comm/thread_group.h"

namespace moekit::comm {

/// What a rank asks for.
struct HeapSize {
  int64_t bytes = 0;
  int64_t num_flags = 0;
  friend bool operator==(const HeapSize&, const HeapSize&) = default;
};

/// Zeroed pages that take memory when they are first touched: a heap is planned for the worst case.
class ZeroPages {
 public:
  ZeroPages() = default;
  /// Throws out_of_memory.
  explicit ZeroPages(int64_t bytes);
  ZeroPages(ZeroPages&& other) noexcept { swap(other); }
  ZeroPages& operator=(ZeroPages&& other) noexcept {
    ZeroPages moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~ZeroPages();

  std::byte* data() const { return data_; }

 private:
  void swap(ZeroPages& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(mapped_, other.mapped_);
  }
  std::byte* data_ = nullptr;
  size_t mapped_ = 0;
};

/// The parts of all ranks. Owned by the ends together: a late put finds its memory.
struct ThreadHeapMemory {
  struct Part {
    ZeroPages bytes;
    Buffer flags;  ///< uint64, a cache line each: flags of different ranks change independently
  };
  explicit ThreadHeapMemory(int num_ranks) : parts(static_cast<size_t>(num_ranks)) {}
  /// Called by the rank itself, whose first touch places the pages.
  void make_part(int rank, HeapSize size);

  std::vector<Part> parts;
};

/// Throws where ranks ask for different sizes, or all for a negative one.
void check_heap_sizes(const std::vector<HeapSize>& all, CallSite site);

/// The end of `rank`, once all parts are made.
std::unique_ptr<SymmetricHeap> make_thread_heap(std::shared_ptr<ThreadGroup> group,
                                                std::shared_ptr<ThreadHeapMemory> memory,
                                                HeapSize size, int rank);

}  // namespace moekit::comm
