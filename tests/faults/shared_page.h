// What ranks of a test share besides their group, be they threads, forked processes or processes
// that know a file.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace moekit::faults {

/// Zeroed pages that processes forked later share, or, with a `file`, all that name it: the first
/// one makes it. Throws system_error.
void* map_shared(size_t bytes, const std::string& file);

/// A value on such pages, all zero at first. Its atomics have no locks.
template <typename T>
class Shared {
 public:
  static_assert(std::is_trivially_destructible_v<T>);
  explicit Shared(const std::string& file = "")
      // Not constructed: zeroes are its first value, and another process may be ahead.
      : value_(static_cast<T*>(map_shared(sizeof(T), file))) {}
  ~Shared() { munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

/// Ranks that come to a place together; those that leave are not waited for any longer.
class Meeting {
 public:
  explicit Meeting(int size, const std::string& file = "");
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
