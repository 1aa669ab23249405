#include "comm/thread_heap.h"

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "comm/wait_word.h"
#include "kernels/common/ep_protocol.h"

namespace moekit::comm {
namespace {

constexpr int64_t kWordsPerFlag = 64 / sizeof(uint64_t);

class ThreadHeap final : public SymmetricHeap {
 public:
  ThreadHeap(std::shared_ptr<ThreadGroup> group, std::shared_ptr<ThreadHeapMemory> memory,
             HeapSize size, int rank)
      : group_(std::move(group)), memory_(std::move(memory)), size_(size), rank_(rank) {}

  std::byte* base() const override { return peer(rank_); }
  int64_t bytes() const override { return size_.bytes; }
  int64_t num_flags() const override { return size_.num_flags; }
  std::byte* peer(int rank) const override {
    return memory_->parts[static_cast<size_t>(rank)].bytes.data();
  }
  bool failed() const override { return group_->failed(); }

  void put(int rank, int64_t offset, const void* source, int64_t bytes) override {
    MOEKIT_DCHECK(offset >= 0 && bytes >= 0 && offset + bytes <= size_.bytes,
                  "a put of {} bytes at {} leaves a heap of {} bytes", bytes, offset, size_.bytes);
    if (bytes > 0) std::memcpy(peer(rank) + offset, source, static_cast<size_t>(bytes));
  }

  void signal(int rank, int64_t flag, uint64_t value) override {
    ep::store_release(word(rank, flag), value);  // publishes the puts of this rank
    if (rank != rank_) group_->ring(rank);
  }

  uint64_t flag(int64_t flag) const override { return ep::load_acquire(word(rank_, flag)); }

  void wait(int64_t flag, uint64_t value, int peer, CallSite site) override {
    group_->check(rank_);
    group_->note(rank_, site);
    for (int spin = 0; this->flag(flag) < value; ++spin) {
      if (spin >= group_->spins()) return sleep_until(flag, value, peer, site);
      spin_pause();
    }
  }

 private:
  uint64_t& word(int rank, int64_t flag) const {
    MOEKIT_DCHECK(flag >= 0 && flag < size_.num_flags, "flag {} is not in a heap of {} flags", flag,
                  size_.num_flags);
    return memory_->parts[static_cast<size_t>(rank)].flags.as<uint64_t>()[flag * kWordsPerFlag];
  }

  void sleep_until(int64_t flag, uint64_t value, int peer, CallSite site) {
    ThreadGroup::Bell& bell = group_->bell(rank_);
    std::atomic<int>& waits_for = group_->progress(rank_).waits_for;
    waits_for.store(peer, std::memory_order_relaxed);
    const auto until = std::chrono::steady_clock::now() + group_->deadline();
    for (;;) {
      bell.sleeping.store(true, std::memory_order_relaxed);
      // See ThreadGroup::ring: a change of the word orders this rank's sleep against the signal.
      const uint32_t seen = bell.word.fetch_add(1, std::memory_order_acq_rel) + 1;
      const uint64_t now = this->flag(flag);
      const bool over = now >= value || group_->failed();
      if (!over && std::chrono::steady_clock::now() < until) {
        sleep_on(bell.word, seen, until);
        continue;
      }
      bell.sleeping.store(false, std::memory_order_relaxed);
      if (over) waits_for.store(-1, std::memory_order_relaxed);
      if (!over) group_->poison(ErrorCode::timeout, describe_wait(flag, value, now, peer, site));
      group_->check(rank_);
      return;
    }
  }

  std::string describe_wait(int64_t flag, uint64_t value, uint64_t seen, int peer,
                            CallSite site) const {
    const auto deadline = std::chrono::duration_cast<std::chrono::milliseconds>(group_->deadline());
    return fmt::format(
        "rank {} waited {} ms for {} in {} (heap flag {}): expected {}, seen {}; every rank must "
        "make the same calls, one with zero tokens included, or raise the deadline",
        rank_, deadline.count(), group_->describe_chain(peer), to_string(site), flag, value, seen);
  }

  std::shared_ptr<ThreadGroup> group_;
  std::shared_ptr<ThreadHeapMemory> memory_;
  const HeapSize size_;
  const int rank_;
};

}  // namespace

ZeroPages::ZeroPages(int64_t bytes) {
  if (bytes == 0) return;
  const auto size = static_cast<size_t>(bytes);
  void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  MOEKIT_CHECK_AS(ErrorCode::out_of_memory, pages != MAP_FAILED,
                  "could not map {} bytes for a heap; lower the token capacity or free memory",
                  bytes);
  data_ = static_cast<std::byte*>(pages);
  mapped_ = size;
  madvise(pages, size, MADV_HUGEPAGE);  // advice: fewer TLB misses where rows are many
}

ZeroPages::~ZeroPages() {
  if (data_ != nullptr) munmap(data_, mapped_);
}

void ThreadHeapMemory::make_part(int rank, HeapSize size) {
  Part& part = parts[static_cast<size_t>(rank)];
  part.bytes = ZeroPages(size.bytes);
  part.flags = Buffer::zeroed(
      checked_mul(size.num_flags, kWordsPerFlag * int64_t{sizeof(uint64_t)}, "heap flags"));
}

void check_heap_sizes(const std::vector<HeapSize>& all, CallSite site) {
  for (size_t r = 1; r < all.size(); ++r) {
    MOEKIT_CHECK_AS(
        ErrorCode::comm, all[r] == all[0],
        "ranks disagree about a heap in {}: rank 0 asks for {} bytes and {} flags, rank "
        "{} for {} bytes and {} flags",
        to_string(site), all[0].bytes, all[0].num_flags, r, all[r].bytes, all[r].num_flags);
  }
  MOEKIT_CHECK(all[0].bytes >= 0 && all[0].num_flags >= 0,
               "a heap has 0 or more bytes and flags, got {} and {}", all[0].bytes,
               all[0].num_flags);
}

std::unique_ptr<SymmetricHeap> make_thread_heap(std::shared_ptr<ThreadGroup> group,
                                                std::shared_ptr<ThreadHeapMemory> memory,
                                                HeapSize size, int rank) {
  return std::make_unique<ThreadHeap>(std::move(group), std::move(memory), size, rank);
}

}  // namespace moekit::comm
