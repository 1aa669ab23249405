// SharedMemory: pages that processes of one host share. They have no name in the file system, so
// that nothing is left behind when a process dies; peers open them through the owner's /proc entry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moekit::comm {

class SharedMemory {
 public:
  SharedMemory() = default;
  /// New zeroed pages. Throws out_of_memory, or comm where the system has no such memory.
  static SharedMemory create(int64_t bytes);
  /// The pages that process `pid` holds as descriptor `descriptor`. Throws comm when they can't be
  /// reached.
  static SharedMemory open(int64_t pid, int descriptor, int64_t bytes);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }

  /// Holds byte `index` of the file until this object, or its process, ends.
  void hold(int index) const;
  /// Whether somebody else holds byte `index`.
  bool held(int index) const;

 private:
  SharedMemory(int descriptor, int64_t bytes);

  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  int descriptor_ = -1;
};

/// A number that processes share exactly when they can share memory: one boot of one kernel, one
/// process-id namespace, one user.
uint64_t host_identity();

}  // namespace moekit::comm
