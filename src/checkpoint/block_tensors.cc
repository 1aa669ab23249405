// BlockReader's book of tensors: which stand in a block, which were read, which are missing or left
// over.
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "base/check.h"
#include "checkpoint/block_reader.h"
#include "checkpoint/error_codes.h"

namespace moekit::checkpoint {
namespace {

constexpr size_t kSamples = 4;

}  // namespace

BlockReader::BlockReader(std::string prefix, const std::vector<Tensor>& tensors,
                         const QuantConfig& quant, bool read_values, OwnedData& owned)
    : prefix_(std::move(prefix)), quant_(quant), read_values_(read_values), owned_(owned) {
  slots_.reserve(tensors.size());
  for (const Tensor& t : tensors) {
    slots_.push_back({t, false});
    bytes_ += t.entry->bytes();
    if (std::ranges::find(owned_.files, t.file) == owned_.files.end()) {
      owned_.files.push_back(t.file);
    }
  }
}

// ---- names

const BlockReader::Slot* BlockReader::find(const std::string& name) const {
  const auto it = std::ranges::lower_bound(
      slots_, name, {}, [](const Slot& s) -> const std::string& { return s.tensor.name(); });
  return it != slots_.end() && it->tensor.name() == name ? &*it : nullptr;
}

bool BlockReader::has_module(std::string_view pattern) const {
  const size_t hole = pattern.find("{e}");
  const std::string_view before = pattern.substr(0, hole);
  const std::string_view after =
      hole == std::string_view::npos ? std::string_view() : pattern.substr(hole + 3);
  return std::ranges::any_of(slots_, [&](const Slot& slot) {
    std::string_view name = slot.tensor.name();
    name.remove_prefix(prefix_.size());
    if (!name.starts_with(before)) return false;
    name.remove_prefix(before.size());
    if (hole != std::string_view::npos) {
      size_t digits = 0;
      while (digits < name.size() && std::isdigit(static_cast<unsigned char>(name[digits])))
        ++digits;
      if (digits == 0) return false;
      name.remove_prefix(digits);
      if (!name.starts_with(after)) return false;
      name.remove_prefix(after.size());
    }
    return name.empty() || name[0] == '.' || name[0] == '_';
  });
}

const Tensor* BlockReader::claim_optional(const std::string& name) {
  const Slot* slot = find(name);
  if (slot == nullptr) return nullptr;
  slot->used = true;
  return &slot->tensor;
}

const Tensor* BlockReader::claim(const std::string& name) {
  const Tensor* tensor = claim_optional(name);
  if (tensor == nullptr) {
    // The experts of a stack ask for the same tensor, each on its own.
    if (missing_.insert(name).second && missing_samples_.size() < kSamples) {
      missing_samples_.push_back(name);
    }
  }
  return tensor;
}

std::string BlockReader::part(const MatrixPlace& place, std::string_view ending) const {
  if (place.bare && ending == "weight") return place.module;
  return fmt::format("{}{}{}", place.module, place.bare ? "_" : ".", ending);
}

void BlockReader::finish() const {
  std::vector<std::string_view> unknown;
  int64_t num_unknown = 0;
  for (const Slot& slot : slots_) {
    if (slot.used) continue;
    if (unknown.size() < kSamples) unknown.push_back(slot.tensor.name());
    ++num_unknown;
  }
  if (missing_.empty() && num_unknown == 0) return;
  std::string text = fmt::format("MoE block {}*: ", prefix_);
  if (!missing_.empty()) {
    text += fmt::format("{} expected tensors are missing, e.g. {}", missing_.size(),
                        fmt::join(missing_samples_, ", "));
  }
  if (num_unknown > 0) {
    text += fmt::format("{}{} tensors are unknown here, e.g. {}", missing_.empty() ? "" : "; ",
                        num_unknown, fmt::join(unknown, ", "));
  }
  fail(kCorrupt, "{} (does config.json describe this checkpoint?)", text);
}

void BlockReader::finish_unknown(std::string_view what) const {
  std::vector<std::string_view> samples;
  // Spread over the block, so that router names do not hide the experts'.
  for (size_t i = 0; i < kSamples && i < slots_.size(); ++i) {
    samples.push_back(slots_[i * slots_.size() / kSamples % slots_.size()].tensor.name());
  }
  fail(kCorrupt, "MoE block {}*: {}; {} tensors came, e.g. {}", prefix_, what, slots_.size(),
       fmt::join(samples, ", "));
}

// ---- grids

}  // namespace moekit::checkpoint
