// One safetensors file: header checked in full before any byte of data is used, data mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.h"
#include "moekit/dtype.h"

namespace moekit::checkpoint {

/// How safetensors spells a dtype ("BF16", "F8_E4M3", ...).
const char* safetensors_name(DType dtype);

/// One tensor of a file. Bytes are [begin, end) of the file and may lie at any address: the format
/// aligns nothing, so readers copy (memcpy) instead of casting pointers.
struct TensorEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;  ///< counts elements, for f4_e2m1 too; empty for a scalar
  int64_t begin = 0;
  int64_t end = 0;
  int64_t bytes() const { return end - begin; }
};

/// "BF16 [8, 128]"
std::string describe(const TensorEntry& entry);

/// A validated file. Entries are sorted by name. Immutable, shared by the views into it.
class SafetensorsFile {
 public:
  /// Throws Error{missing} when there is no such file and corrupt_file for every fault of its
  /// contents: length of the header, JSON, dtypes, shapes, offsets, overlaps, holes, trailing
  /// bytes.
  static std::shared_ptr<const SafetensorsFile> open(const std::string& path,
                                                     ErrorCode missing = ErrorCode::corrupt_file);

  const std::string& path() const { return map_.path(); }
  const std::vector<TensorEntry>& entries() const { return entries_; }
  /// Null when there is no such tensor.
  const TensorEntry* find(std::string_view name) const;
  const std::byte* data(const TensorEntry& entry) const { return map_.data() + entry.begin; }
  const MappedFile& map() const { return map_; }
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }

 private:
  explicit SafetensorsFile(MappedFile map) : map_(std::move(map)) {}
  void parse();
  void check_extents(int64_t data_bytes) const;

  MappedFile map_;
  std::vector<TensorEntry> entries_;
  std::vector<std::pair<std::string, std::string>> metadata_;
};

/// A tensor to write: row-major bytes of `shape` elements.
struct TensorSource {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

/// Writes a file at once or not at all. Tensors keep their order; the header is padded to 8 bytes.
void write_safetensors(const std::string& path, std::span<const TensorSource> tensors,
                       std::span<const std::pair<std::string, std::string>> metadata = {});

}  // namespace moekit::checkpoint
