#include "checkpoint/model_files.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "checkpoint/error_codes.h"

namespace moekit::checkpoint {
namespace {

constexpr int64_t kMaxConfigBytes = 64 << 20;
/// The index of the largest public models (some 10^5 tensors) takes about 10 MB.
constexpr int64_t kMaxIndexBytes = 512 << 20;

/// A shard is a plain file name: a checkpoint may not reach outside its directory.
void check_shard_name(const std::string& name, const std::string& index) {
  const bool plain = !name.empty() && name != "." && name != ".." &&
                     name.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
  MOEKIT_CHECK_AS(kCorrupt, plain,
                  "{}: expected shards as plain file names inside the model's "
                  "directory, came {}",
                  index, json_quote(name.substr(0, 200)));
}

}  // namespace

ModelFiles::ModelFiles(std::string directory) : directory_(std::move(directory)) {
  MOEKIT_CHECK(
      is_directory(directory_),
      "{}: expected a model directory on this machine, found none (moekit downloads nothing)",
      directory_);
  config_path_ = directory_ + "/config.json";
  MOEKIT_CHECK_AS(kCorrupt, is_file(config_path_),
                  "{}: expected config.json in the model directory, found none", directory_);
  config_ = Json::parse_file(config_path_, kMaxConfigBytes);
  if (config_.kind() != Json::Kind::object) config().expected("an object");
  const std::string quantization = directory_ + "/hf_quant_config.json";
  if (is_file(quantization)) {
    quantization_file_ = std::make_unique<Json>(Json::parse_file(quantization, kMaxConfigBytes));
  }
  const std::string index = directory_ + "/model.safetensors.index.json";
  if (is_file(index)) {
    index_path_ = index;
    read_index(index);
  } else {
    MOEKIT_CHECK_AS(kCorrupt, is_file(directory_ + "/model.safetensors"),
                    "{}: expected model.safetensors or model.safetensors.index.json, found neither",
                    directory_);
    shard_names_.emplace_back("model.safetensors");
  }
  shards_.resize(shard_names_.size());
}

JsonPlace ModelFiles::quantization_file() const {
  static const Json kNull;
  return JsonPlace(quantization_file_ ? *quantization_file_ : kNull,
                   directory_ + "/hf_quant_config.json");
}

void ModelFiles::read_index(const std::string& path) {
  const std::string text = read_file(path, kMaxIndexBytes);
  JsonScanner scanner(text, path);
  std::map<std::string, size_t> numbers;
  bool has_map = false;
  auto placement = [&](std::string& name) {
    const std::string shard = scanner.read_string();
    auto [it, added] = numbers.try_emplace(shard, shard_names_.size());
    if (added) {
      check_shard_name(shard, path);
      shard_names_.push_back(shard);
    }
    index_.push_back({std::move(name), it->second});
  };
  auto member = [&](std::string& key) {
    if (key != "weight_map") {
      scanner.skip_value();
      return;
    }
    MOEKIT_CHECK_AS(kCorrupt, !has_map, "{}: duplicate key \"weight_map\"", path);
    has_map = true;
    scanner.read_object(placement);
  };
  scanner.read_object(member);
  scanner.finish();
  MOEKIT_CHECK_AS(kCorrupt, has_map && !index_.empty(), "{}: expected a \"weight_map\" of tensors",
                  path);
  std::ranges::sort(index_, {}, &IndexEntry::name);
  const auto twin = std::ranges::adjacent_find(index_, {}, &IndexEntry::name);
  if (twin != index_.end()) {
    fail(kCorrupt, "{}: duplicate tensor name {} in weight_map (shards {} and {})", path,
         twin->name, shard_names_[twin->shard], shard_names_[std::next(twin)->shard]);
  }
  for (const std::string& name : shard_names_) {
    MOEKIT_CHECK_AS(kCorrupt, is_file(directory_ + "/" + name),
                    "{}: shard {} is missing, though the index names it (an incomplete download?)",
                    directory_, name);
  }
}

const std::shared_ptr<const SafetensorsFile>& ModelFiles::shard(size_t i) {
  if (!shards_[i]) shards_[i] = SafetensorsFile::open(directory_ + "/" + shard_names_[i]);
  return shards_[i];
}

std::pair<size_t, size_t> ModelFiles::index_range(std::string_view prefix) const {
  const auto first = std::ranges::lower_bound(index_, prefix, {}, &IndexEntry::name);
  auto last = first;
  while (last != index_.end() && last->name.starts_with(prefix)) ++last;
  return {static_cast<size_t>(first - index_.begin()), static_cast<size_t>(last - index_.begin())};
}

void ModelFiles::check_strays(std::string_view prefix, size_t shard_number) {
  const std::vector<TensorEntry>& entries = shard(shard_number)->entries();
  auto it = std::ranges::lower_bound(entries, prefix, {}, &TensorEntry::name);
  for (; it != entries.end() && it->name.starts_with(prefix); ++it) {
    const auto known = std::ranges::lower_bound(index_, it->name, {}, &IndexEntry::name);
    MOEKIT_CHECK_AS(kCorrupt, known != index_.end() && known->name == it->name,
                    "{}: tensor {} stands in shard {}, but the index does not list it", directory_,
                    it->name, shard_names_[shard_number]);
    MOEKIT_CHECK_AS(kCorrupt, known->shard == shard_number,
                    "{}: duplicate tensor {}: shard {} holds it, and the index places it in {}",
                    directory_, it->name, shard_names_[shard_number], shard_names_[known->shard]);
  }
}

std::vector<Tensor> ModelFiles::with_prefix(std::string_view prefix) {
  std::vector<Tensor> tensors;
  if (index_path_.empty()) {
    const auto& file = shard(0);
    auto it = std::ranges::lower_bound(file->entries(), prefix, {}, &TensorEntry::name);
    for (; it != file->entries().end() && it->name.starts_with(prefix); ++it) {
      tensors.push_back({file, &*it});
    }
    return tensors;
  }
  const auto [first, last] = index_range(prefix);
  std::set<size_t> used;
  for (size_t i = first; i < last; ++i) {
    const auto& file = shard(index_[i].shard);
    const TensorEntry* entry = file->find(index_[i].name);
    MOEKIT_CHECK_AS(kCorrupt, entry != nullptr,
                    "{}: the index places tensor {} in shard {}, which does not hold it",
                    directory_, index_[i].name, shard_names_[index_[i].shard]);
    tensors.push_back({file, entry});
    used.insert(index_[i].shard);
  }
  for (const size_t number : used) check_strays(prefix, number);
  return tensors;
}

}  // namespace moekit::checkpoint
