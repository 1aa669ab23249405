// run() never allocates and never reads the environment: operator new and the layer's Allocator
// count.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "engine/synthetic.h"
#include "moekit/layer.h"
#include "support/run_layer.h"

namespace {

std::atomic<int64_t> allocations{0};

void* counted(size_t bytes, size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* p = alignment > alignof(std::max_align_t)
                ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                : std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(size_t bytes) { return counted(bytes, 0); }
void* operator new[](size_t bytes) { return counted(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t a) {
  return counted(bytes, static_cast<size_t>(a));
}
void* operator new[](size_t bytes, std::align_val_t a) {
  return counted(bytes, static_cast<size_t>(a));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace moekit::test {
namespace {

class CountingAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    ++calls;
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  void deallocate(void* p, size_t) noexcept override { std::free(p); }
  std::atomic<int64_t> calls{0};
};

/// One rank's layer, its tensors and a call.
struct Rank {
  Layer layer;
  std::vector<float> rows, output;
  Rank(std::shared_ptr<const CanonicalLayer> canonical, const PlanOptions& options, int64_t tokens)
      : layer(Layer::from_canonical(std::move(canonical), options)) {
    rows = engine::make_hidden(tokens, layer.config().hidden, 5 + options.comm.rank());
    output.resize(rows.size());
  }
  void run(int64_t tokens) {
    LayerArgs args;
    const int64_t hidden = layer.config().hidden;
    args.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, hidden});
    args.output = TensorView::contiguous(output.data(), DType::f32, {tokens, hidden});
    layer.run(args);
  }
};

class AllocationTest : public testing::TestWithParam<const char*> {};

TEST_P(AllocationTest, RunDoesNotAllocateOnOneRank) {
  CountingAllocator allocator;
  PlanOptions options = options_for("");
  options.max_tokens = 9;
  options.allocator = &allocator;
  Rank rank(make_layer(GetParam()).canonical, options, 9);
  rank.run(9);
  EXPECT_GT(allocator.calls.load(), 0) << "the caller's allocator is used at plan time";
  setenv("MOEKIT_CPU_ISA", "no such instruction set", 1);  // run() must not look
  const int64_t news = allocations.load(), calls = allocator.calls.load();
  for (int64_t tokens : {9, 1, 0, 4}) rank.run(tokens);
  EXPECT_EQ(allocations.load() - news, 0);
  EXPECT_EQ(allocator.calls.load() - calls, 0);
  unsetenv("MOEKIT_CPU_ISA");
}

TEST_P(AllocationTest, RecordingDoesNotAllocateInACall) {
  Trace trace(64);
  PlanOptions options = options_for("");
  options.max_tokens = 9;
  options.trace = trace;
  Rank rank(make_layer(GetParam()).canonical, options, 9);
  rank.run(9);
  trace.start();
  const int64_t news = allocations.load();
  for (int64_t tokens : {9, 1, 0, 4}) rank.run(tokens);
  EXPECT_EQ(allocations.load() - news, 0);
  trace.stop();
  EXPECT_FALSE(trace.summary().empty());
}

/// Ends over shared memory, as processes have them, for threads of this one.
std::vector<CommunicatorHandle> make_shared_memory_ranks(int ranks) {
  std::vector<CommunicatorHandle> ends(static_cast<size_t>(ranks));
  std::vector<std::byte> board(size_t{1} << 16);
  std::barrier meet(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Bootstrap bootstrap;
      bootstrap.rank = r;
      bootstrap.size = ranks;
      bootstrap.allgather = [&, r](const void* send, void* recv, int64_t bytes) {
        std::memcpy(board.data() + r * bytes, send, static_cast<size_t>(bytes));
        meet.arrive_and_wait();
        std::memcpy(recv, board.data(), static_cast<size_t>(bytes * ranks));
        meet.arrive_and_wait();
      };
      ends[static_cast<size_t>(r)] = make_process_ranks(bootstrap);
    });
  }
  for (std::thread& t : threads) t.join();
  return ends;
}

/// What new has been called by calls on these ends, once each rank has made one.
int64_t allocations_of_calls(const std::vector<CommunicatorHandle>& comms,
                             const std::shared_ptr<const CanonicalLayer>& canonical,
                             Combine combine) {
  const int ranks = static_cast<int>(comms.size());
  std::atomic<int> arrived{0};
  std::atomic<int64_t> before{0}, after{0};
  // Ranks meet before and after the counted calls without allocating.
  const auto meet = [&](int goal) {
    arrived.fetch_add(1);
    while (arrived.load() < goal) std::this_thread::yield();
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      PlanOptions options = options_for("", 1);
      options.max_tokens = 6;
      options.comm = comms[static_cast<size_t>(r)];
      options.combine = combine;
      Rank rank(canonical, options, 6);
      rank.run(6);
      meet(ranks);
      if (r == 0) before = allocations.load();
      meet(2 * ranks);
      for (int64_t tokens : {6, r, 0}) rank.run(tokens);
      meet(3 * ranks);
      if (r == 0) after = allocations.load();
      meet(4 * ranks);
    });
  }
  for (std::thread& t : threads) t.join();
  return after.load() - before.load();
}

TEST_P(AllocationTest, RunDoesNotAllocateOnManyRanks) {
  constexpr int kRanks = 3;
  const auto canonical = make_layer(GetParam()).canonical;
  for (Combine combine : {Combine::slots, Combine::rank_sums}) {
    const char* name = combine == Combine::slots ? "slots" : "rank_sums";
    EXPECT_EQ(allocations_of_calls(make_thread_ranks(kRanks), canonical, combine), 0) << name;
    EXPECT_EQ(allocations_of_calls(make_shared_memory_ranks(kRanks), canonical, combine), 0)
        << name << " over shared memory";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Problems, AllocationTest,
    testing::Values(
        "E=8,k=2,H=96,I=64,weights=bf16,tokens=8",
        "E=8,k=3,H=128,I=64,shared_I=64,weights=nvfp4,activations=nvfp4,tokens=8",
        "E=8,k=2,H=96,latent=64,I=96,weights=fp8_block,activations=fp8_block,tokens=8"));

}  // namespace
}  // namespace moekit::test
