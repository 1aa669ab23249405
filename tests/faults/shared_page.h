// What ranks of a test share besides their group, be they threads or forked processes.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <type_traits>

namespace moekit::faults {

/// A value that processes forked later share. Its atomics have no locks, its memory is zero at
/// first.
template <typename T>
class Shared {
 public:
  static_assert(std::is_trivially_destructible_v<T>);
  Shared()
      : memory_(
            mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    value_ = new (memory_) T{};
  }
  ~Shared() { munmap(memory_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  void* memory_;
  T* value_;
};

/// Ranks that come to a place together; those that leave are not waited for any longer.
class Meeting {
 public:
  explicit Meeting(int size);
  /// Throws after two minutes: a rank has gone without leaving.
  void arrive_and_wait();
  void leave();

 private:
  struct State {
    std::atomic<uint64_t> word;
  };
  Shared<State> state_;
};

}  // namespace moekit::faults
