#include "comm/process_heap.h"

#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/check.h"
#include "base/math.h"

namespace moekit::comm {
namespace {

constexpr int64_t kFlagBytes = 64;  // a cache line each: ranks set them independently
constexpr int64_t kPartAlignment = 128;

class ProcessHeap final : public SymmetricHeap, public HeapTarget {
 public:
  /// `memory` holds a part for each member of the island, `alone` this rank's where it is alone.
  ProcessHeap(std::shared_ptr<ProcessEngine> engine, SharedMemory memory, Buffer alone,
              HeapSize size)
      : engine_(std::move(engine)),
        memory_(std::move(memory)),
        alone_(std::move(alone)),
        size_(size),
        number_(engine_->add_heap(this)) {}
  ~ProcessHeap() override { engine_->remove_heap(number_); }

  static int64_t part_bytes(HeapSize size) {
    const int64_t flags = checked_mul(size.num_flags, kFlagBytes, "heap flags");
    return std::max(round_up(size.bytes, kPartAlignment) + round_up(flags, kPartAlignment),
                    kPartAlignment);
  }

  std::byte* base() const override { return part(engine_->rank()); }
  int64_t bytes() const override { return size_.bytes; }
  int64_t num_flags() const override { return size_.num_flags; }
  std::byte* peer(int rank) const override { return is_near(rank) ? part(rank) : nullptr; }
  bool failed() const override { return engine_->failed(); }

  void put(int rank, int64_t offset, const void* source, int64_t bytes) override {
    check_range(offset, bytes);
    if (bytes == 0) return;
    if (is_near(rank)) {
      std::memcpy(part(rank) + offset, source, static_cast<size_t>(bytes));
      return;
    }
    FrameHeader header;
    header.kind = FrameKind::put;
    header.operation = number_;
    header.sends = offset;
    engine_->send(rank, header, source, bytes);
  }

  void signal(int rank, int64_t flag, uint64_t value) override {
    if (is_near(rank)) {
      // Release publishes the puts of this rank.
      std::atomic_ref<uint64_t>(word(rank, flag)).store(value, std::memory_order_release);
      engine_->ring(rank);
      return;
    }
    FrameHeader header;
    header.kind = FrameKind::signal;
    header.operation = number_;
    header.sends = flag;
    header.value = value;
    engine_->send(rank, header, nullptr, 0);
  }

  uint64_t flag(int64_t flag) const override {
    if (engine_->group().messages) engine_->pump();
    return load(flag);
  }

  void wait(int64_t flag, uint64_t value, int peer, CallSite site) override {
    auto done = [&] { return load(flag) >= value; };
    auto describe = [&] {
      return fmt::format(
          "rank {} waited {} ms for {} in {} (heap flag {}): expected {}, seen {}; every rank must "
          "make the same calls, one with zero tokens included, or raise the deadline",
          engine_->rank(), engine_->deadline_ms(), engine_->describe_chain(peer), to_string(site),
          flag, value, load(flag));
    };
    engine_->note(site);
    engine_->note_wait(peer);
    engine_->wait_until(done, nullptr, describe);
    engine_->note_wait(-1);
  }

  void take_put(int64_t offset, const void* payload, int64_t bytes) override {
    check_range(offset, bytes);
    std::memcpy(base() + offset, payload, static_cast<size_t>(bytes));
  }
  void take_signal(int64_t flag, uint64_t value) override {
    std::atomic_ref<uint64_t>(word(engine_->rank(), flag)).store(value, std::memory_order_release);
  }

 private:
  bool is_near(int rank) const { return engine_->group().members[static_cast<size_t>(rank)] >= 0; }

  std::byte* part(int rank) const {
    const int64_t member = engine_->group().members[static_cast<size_t>(rank)];
    return memory_.data() == nullptr ? alone_.data() : memory_.data() + member * part_bytes(size_);
  }

  uint64_t& word(int rank, int64_t flag) const {
    MOEKIT_CHECK(flag >= 0 && flag < size_.num_flags, "flag {} is not in a heap of {} flags", flag,
                 size_.num_flags);
    return *reinterpret_cast<uint64_t*>(part(rank) + round_up(size_.bytes, kPartAlignment) +
                                        flag * kFlagBytes);
  }

  uint64_t load(int64_t flag) const {
    return std::atomic_ref<uint64_t>(word(engine_->rank(), flag)).load(std::memory_order_acquire);
  }

  // Offsets come from other processes too.
  void check_range(int64_t offset, int64_t bytes) const {
    MOEKIT_CHECK(offset >= 0 && bytes >= 0 && bytes <= size_.bytes && offset <= size_.bytes - bytes,
                 "a put of {} bytes at {} leaves a heap of {} bytes", bytes, offset, size_.bytes);
  }

  std::shared_ptr<ProcessEngine> engine_;
  SharedMemory memory_;
  Buffer alone_;
  const HeapSize size_;
  const int64_t number_;
};

}  // namespace

std::unique_ptr<SymmetricHeap> make_process_heap(std::shared_ptr<ProcessEngine> engine,
                                                 const Rendezvous& rendezvous, HeapSize size) {
  std::vector<int> members;
  for (int r = 0; r < engine->size(); ++r) {
    if (engine->group().members[static_cast<size_t>(r)] >= 0) members.push_back(r);
  }
  const int64_t part = ProcessHeap::part_bytes(size);
  const auto num_members = static_cast<int64_t>(members.size());
  SharedMemory memory =
      share_memory(rendezvous, members, checked_mul(part, num_members, "symmetric heap"));
  Buffer alone;
  if (num_members == 1) alone = Buffer::zeroed(part);
  return std::make_unique<ProcessHeap>(std::move(engine), std::move(memory), std::move(alone),
                                       size);
}

}  // namespace moekit::comm
