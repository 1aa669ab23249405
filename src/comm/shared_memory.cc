#include "comm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/check.h"

namespace moekit::comm {

SharedMemory::SharedMemory(int descriptor, int64_t bytes) : bytes_(bytes), descriptor_(descriptor) {
  // NORESERVE: rings between ranks that never talk much stay untouched.
  void* mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    close(descriptor_);
    fail(ErrorCode::out_of_memory,
         "expected to map {} bytes of shared memory, got \"{}\"; use fewer ranks on this host",
         bytes, std::strerror(error));
  }
  data_ = static_cast<std::byte*>(mapped);
}

SharedMemory SharedMemory::create(int64_t bytes) {
  const int descriptor = memfd_create("moekit", MFD_CLOEXEC);
  MOEKIT_CHECK_AS(ErrorCode::comm, descriptor >= 0,
                  "expected shared memory from memfd_create, got \"{}\"; ranks that are processes "
                  "need a Linux kernel that allows it",
                  std::strerror(errno));
  if (ftruncate(descriptor, bytes) != 0) {
    const int error = errno;
    close(descriptor);
    fail(ErrorCode::out_of_memory,
         "expected {} bytes of shared memory, got \"{}\"; use fewer ranks on this host", bytes,
         std::strerror(error));
  }
  return SharedMemory(descriptor, bytes);
}

SharedMemory SharedMemory::open(int64_t pid, int descriptor, int64_t bytes) {
  const std::string path = fmt::format("/proc/{}/fd/{}", pid, descriptor);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  MOEKIT_CHECK_AS(
      ErrorCode::comm, opened >= 0,
      "expected to open the shared memory of process {} as {}, got \"{}\"; ranks of one "
      "host must run as one user and see each other's /proc entries",
      pid, path, std::strerror(errno));
  return SharedMemory(opened, bytes);
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
  if (descriptor_ >= 0) close(descriptor_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

// Locks of the open file description, not of the process: several ranks of one process must not
// take each other's, and the kernel drops them however the process ends, a zombie's too.
void SharedMemory::hold(int index) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = index;
  lock.l_len = 1;
  MOEKIT_CHECK_AS(ErrorCode::comm, fcntl(descriptor_, F_OFD_SETLK, &lock) == 0,
                  "expected to lock byte {} of the shared memory, got \"{}\"", index,
                  std::strerror(errno));
}

bool SharedMemory::held(int index) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = index;
  lock.l_len = 1;
  // A kernel that can't tell is no reason to call a peer dead.
  return fcntl(descriptor_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

uint64_t host_identity() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  char space[64] = {};
  if (readlink("/proc/self/ns/pid", space, sizeof(space) - 1) > 0) text += space;
  text += std::to_string(geteuid());
  uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

}  // namespace moekit::comm
