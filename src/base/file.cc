#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace moekit {
namespace {

/// Closes a descriptor at the end of a scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string reason() { return std::strerror(errno); }

/// Opens a regular file for reading and tells its size.
int open_regular(const std::string& path, ErrorCode missing, int64_t& size) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(missing, "{}: expected a readable file: {}", path, reason());
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(missing, "{}: expected a regular file, came a directory or a special file", path);
  }
  size = static_cast<int64_t>(info.st_size);
  return fd;
}

}  // namespace

MappedFile::MappedFile(const std::string& path, ErrorCode missing) : path_(path) {
  const Descriptor fd(open_regular(path, missing, size_));
  if (size_ == 0) return;
  void* map = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, fd.get(), 0);
  if (map == MAP_FAILED) {
    const int64_t bytes = std::exchange(size_, 0);
    fail(ErrorCode::out_of_memory, "{}: cannot map {} bytes: {}", path, bytes, reason());
  }
  data_ = static_cast<const std::byte*>(map);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), static_cast<size_t>(size_));
}

void MappedFile::swap(MappedFile& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

void MappedFile::will_need(int64_t offset, int64_t bytes) const {
  if (data_ == nullptr || bytes <= 0 || offset < 0 || offset >= size_) return;
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  const int64_t first = offset / page * page;
  const int64_t last = bytes > size_ - offset ? size_ : offset + bytes;
  ::madvise(const_cast<std::byte*>(data_) + first, static_cast<size_t>(last - first),
            MADV_WILLNEED);
}

bool is_file(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_directory(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

std::string read_file(const std::string& path, int64_t max_bytes, ErrorCode missing) {
  int64_t size = 0;
  const Descriptor fd(open_regular(path, missing, size));
  MOEKIT_CHECK_AS(ErrorCode::corrupt_file, size <= max_bytes,
                  "{}: expected at most {} bytes, came {}", path, max_bytes, size);
  std::string contents(static_cast<size_t>(size), '\0');
  size_t done = 0;
  while (done < contents.size()) {
    const ssize_t n = ::read(fd.get(), contents.data() + done, contents.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(ErrorCode::corrupt_file, "{}: reading failed: {}", path, reason());
    if (n == 0) break;  // the file shrank meanwhile
    done += static_cast<size_t>(n);
  }
  contents.resize(done);
  return contents;
}

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), temporary_(path_ + ".tmp.XXXXXX") {
  fd_ = ::mkostemp(temporary_.data(), O_CLOEXEC);
  if (fd_ < 0) fail_write("creating a file beside it");
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::fail_write(const char* step) const {
  fail(ErrorCode::invalid_argument, "{}: cannot write: {}: {}", path_, step, reason());
}

void AtomicFile::write(const void* data, int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, p, static_cast<size_t>(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_write("writing");
    p += n;
    bytes -= n;
  }
}

void AtomicFile::commit() {
  // mkostemp makes private files; a result should be as readable as any other new file.
  const mode_t mask = ::umask(0);
  ::umask(mask);
  ::fchmod(fd_, 0666 & ~mask);
  if (::fsync(fd_) != 0) fail_write("flushing");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_write("renaming");
  ::close(std::exchange(fd_, -1));
}

void write_file_atomically(const std::string& path, std::string_view contents) {
  AtomicFile file(path);
  file.write(contents);
  file.commit();
}

}  // namespace moekit
