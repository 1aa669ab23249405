// PackCache: packed experts of earlier processes, one file each, in a directory that the user
// names. A file is found by the content of the weights, the layout and the instruction set, and is
// verified before it is believed.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/digest.h"
#include "base/thread_pool.h"
#include "problem/canonical_layer.h"
#include "problem/weight_layout.h"

namespace moekit::engine {

/// What became of a look-up, for explain.
enum class PackOutcome : uint8_t {
  off,         ///< no directory was named, or the layout has no blob
  hit,         ///< read from the directory
  stored,      ///< packed, and written for the next process
  damaged,     ///< a file was there but did not verify; packed and written anew
  not_stored,  ///< packed; writing the file failed (a full disk), which the log tells
};

const char* to_string(PackOutcome outcome);

/// Thread-safe between processes: files appear whole or not at all, and two writers of one key
/// write the same bytes.
class PackCache {
 public:
  /// Makes the directory where it is missing (its parent must be there). Throws invalid_argument
  /// naming path and reason where it can't be read and written.
  explicit PackCache(std::string directory);

  /// Name of the packed form: content of the experts in `local_experts`, in this order.
  static Digest key_of(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                       const WeightLayout& layout, std::string_view isa, ThreadPool& threads);

  /// Fills `blob` from the file of `key`, or by pack() and then writes the file. Of files it throws
  /// nothing: the layer is whole without its cache.
  PackOutcome fill(const Digest& key, std::byte* blob, int64_t bytes, ThreadPool& threads,
                   FunctionRef<void()> pack) const;

  std::string path_of(const Digest& key) const;

 private:
  std::string directory_;
};

}  // namespace moekit::engine
