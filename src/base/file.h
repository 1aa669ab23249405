// Files: read-only maps, whole reads with a cap, and writes that appear at once or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "moekit/error.h"

namespace moekit {

/// A whole file mapped read-only. Move-only. An empty file maps to no bytes.
/// Note: another process that truncates the file while it is mapped makes later reads fault
/// (SIGBUS); writers of moekit therefore replace files and never shorten them.
class MappedFile {
 public:
  MappedFile() = default;
  /// Throws Error{missing} when the file cannot be opened, corrupt_file when it is no regular file.
  explicit MappedFile(const std::string& path, ErrorCode missing = ErrorCode::corrupt_file);
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    MappedFile moved(static_cast<MappedFile&&>(other));
    swap(moved);
    return *this;
  }
  ~MappedFile();

  const std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

  /// Asks the system to start reading [offset, offset + bytes). A hint: never fails.
  void will_need(int64_t offset, int64_t bytes) const;

 private:
  void swap(MappedFile& other) noexcept;

  std::string path_;
  const std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

/// True for a regular file or a link to one.
bool is_file(const std::string& path);
bool is_directory(const std::string& path);

/// The file's bytes. Throws Error{missing} when it cannot be opened, corrupt_file when it is longer
/// than `max_bytes` or cannot be read.
std::string read_file(const std::string& path, int64_t max_bytes,
                      ErrorCode missing = ErrorCode::corrupt_file);

/// Writes a file piece by piece beside its final path; commit() flushes it to the disk and renames
/// it. Without commit() nothing remains. Throws invalid_argument naming path and reason.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(const void* data, int64_t bytes);
  void write(std::string_view text) { write(text.data(), static_cast<int64_t>(text.size())); }
  void commit();

 private:
  [[noreturn]] void fail_write(const char* step) const;

  std::string path_;
  std::string temporary_;
  int fd_ = -1;
};

/// AtomicFile in one call.
void write_file_atomically(const std::string& path, std::string_view contents);

}  // namespace moekit
