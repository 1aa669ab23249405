// ExpertStore: the memory of one rank's packed experts. A change of placement packs what comes
// beside what is in force, and moves it in once every rank is ready.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "engine/plan.h"
#include "moekit/placement.h"

namespace moekit::engine {

class ExpertStore {
 public:
  ExpertStore() = default;
  /// Room as plan.store says; packs nothing.
  ExpertStore(const Plan& plan, Allocator* allocator);

  /// The blob of the layout in force, as experts::Args takes it. Null for layouts without one in
  /// host memory.
  std::byte* blob() const { return blob_; }

  /// A change that waits to be put in force.
  struct Staged {
    WeightLayout layout;
    std::vector<int32_t> source;  ///< of each new slot: an old slot, or -1 - its staged place
    std::vector<int32_t> target;  ///< of each old slot: the new slot that its bytes go to, or -1
    std::vector<std::byte> head;
    PlacementChange change;
  };

  /// Packs the experts of `next` that are not in `now` into the staging places. The blob in force
  /// stays as it is, also when this throws: unsupported or invalid_argument where `next` needs more
  /// room than was planned.
  Staged stage(const Plan& plan, const CanonicalLayer& layer, std::span<const int32_t> now,
               std::span<const int32_t> next, ThreadPool& threads);
  /// Puts it in force: moves what stays, copies what came.
  void commit(const Staged& staged) noexcept;

 private:
  void move_kept(const Staged& staged, int64_t bytes) noexcept;
  std::byte* staging(int64_t place, int64_t expert_bytes) const {
    return places_ + store_.slots * store_.expert_bytes + place * expert_bytes;
  }
  /// Heads end where the first place begins, whatever their size.
  void set_blob(const WeightLayout& layout) { blob_ = places_ - layout.head_bytes(); }

  StorePlan store_;
  Buffer memory_;
  std::byte* places_ = nullptr;
  std::byte* blob_ = nullptr;
};

}  // namespace moekit::engine
