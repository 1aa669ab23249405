// A checkpoint directory: config.json and the tensors of its safetensors files, found through the
// index where there is one. Files are opened when a tensor of theirs is asked for.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "checkpoint/safetensors.h"

namespace moekit::checkpoint {

/// A tensor and the file that holds it (the entry lives inside the file).
struct Tensor {
  std::shared_ptr<const SafetensorsFile> file;
  const TensorEntry* entry = nullptr;

  const std::string& name() const { return entry->name; }
  const std::byte* data() const { return file->data(*entry); }
};

/// Not thread-safe; used by one load or one inspection. Tensors stay valid without it.
class ModelFiles {
 public:
  /// invalid_argument when `directory` is none; corrupt_file when config, index or weights are
  /// missing or malformed. Every shard that the index names must exist.
  explicit ModelFiles(std::string directory);

  const std::string& directory() const { return directory_; }
  JsonPlace config() const { return JsonPlace(config_, config_path_); }
  /// The document of hf_quant_config.json; absent when there is no such file.
  JsonPlace quantization_file() const;

  /// All tensors whose names begin with `prefix`, sorted by name. Throws corrupt_file where index
  /// and shards contradict each other about one of them, or a name stands in two shards.
  std::vector<Tensor> with_prefix(std::string_view prefix);

 private:
  struct IndexEntry {
    std::string name;
    size_t shard = 0;
  };

  void read_index(const std::string& path);
  const std::shared_ptr<const SafetensorsFile>& shard(size_t i);
  /// Index entries whose names begin with `prefix`, as a half-open range of index_.
  std::pair<size_t, size_t> index_range(std::string_view prefix) const;
  void check_strays(std::string_view prefix, size_t shard_number);

  std::string directory_;
  std::string config_path_;
  std::string index_path_;  ///< empty: one file
  Json config_;
  std::unique_ptr<Json> quantization_file_;
  std::vector<IndexEntry> index_;  ///< sorted by name
  std::vector<std::string> shard_names_;
  std::vector<std::shared_ptr<const SafetensorsFile>> shards_;  ///< null until opened
};

}  // namespace moekit::checkpoint
