#include "engine/expert_store.h"

#include <cstring>

#include "base/check.h"

namespace moekit::engine {

ExpertStore::ExpertStore(const Plan& plan, Allocator* allocator)
    : store_(plan.store), memory_(plan.layout.on_device ? 0 : plan.store.total_bytes(), allocator) {
  if (plan.layout.total_bytes() == 0 || plan.layout.on_device) return;
  places_ = memory_.data() + store_.head_bytes;
  set_blob(plan.layout);
}

ExpertStore::Staged ExpertStore::stage(const Plan& plan, const CanonicalLayer& layer,
                                       std::span<const int32_t> now, std::span<const int32_t> next,
                                       ThreadPool& threads) {
  const experts::Experts& member = *plan.choice.experts;
  Staged staged;
  staged.layout = member.weight_layout(layer, next);
  staged.change.experts_kept = static_cast<int64_t>(next.size());
  if (staged.layout.total_bytes() == 0) return staged;  // read in place
  const int64_t bytes = staged.layout.expert_bytes();
  const auto slots = static_cast<int64_t>(next.size());
  MOEKIT_CHECK(slots <= store_.slots && bytes <= store_.expert_bytes &&
                   staged.layout.head_bytes() <= store_.head_bytes,
               "the placement needs {} experts of {} bytes on a rank, {} of {} were planned", slots,
               bytes, store_.slots, store_.expert_bytes);

  const bool same_encoding = staged.layout.encoding == plan.layout.encoding;
  std::vector<int32_t> old_slot(static_cast<size_t>(plan.problem.config.num_experts), -1);
  if (same_encoding) {
    for (size_t j = 0; j < now.size(); ++j) old_slot[now[j]] = static_cast<int32_t>(j);
  }
  staged.target.assign(now.size(), -1);
  std::vector<std::byte*> places(next.size(), nullptr);
  int32_t coming = 0;
  for (size_t i = 0; i < next.size(); ++i) {
    const int32_t from = old_slot[next[i]];
    staged.source.push_back(from >= 0 ? from : -1 - coming);
    if (from >= 0) {
      staged.target[from] = static_cast<int32_t>(i);
    } else {
      places[i] = staging(coming++, bytes);
    }
  }
  // One place stays free: cycles of moved experts turn through it.
  MOEKIT_CHECK(coming < store_.staged,
               "the placement brings {} experts to a rank ({}), {} staging slots were planned; "
               "change it in smaller steps or plan with more staging_slots",
               coming, same_encoding ? "new to it" : "all, as they are packed in another way now",
               store_.staged - 1);
  staged.head.resize(static_cast<size_t>(staged.layout.head_bytes()));
  member.pack_head(layer, next, staged.layout, staged.head.data());
  member.pack_experts(layer, next, staged.layout, places, threads);
  staged.change = {slots - coming, coming, coming * bytes};
  return staged;
}

void ExpertStore::commit(const Staged& staged) noexcept {
  if (staged.layout.total_bytes() == 0) return;
  const int64_t bytes = staged.layout.expert_bytes();
  move_kept(staged, bytes);
  for (size_t i = 0; i < staged.source.size(); ++i) {
    if (staged.source[i] >= 0) continue;
    std::memcpy(places_ + static_cast<int64_t>(i) * bytes, staging(-1 - staged.source[i], bytes),
                static_cast<size_t>(bytes));
  }
  set_blob(staged.layout);
  std::memcpy(blob_, staged.head.data(), staged.head.size());
}

/// Kept experts to their new slots, each copied once (one of each cycle twice).
void ExpertStore::move_kept(const Staged& staged, int64_t bytes) noexcept {
  const auto old_slots = static_cast<int32_t>(staged.target.size());
  const auto new_slots = static_cast<int32_t>(staged.source.size());
  const auto copy = [&](std::byte* to, const std::byte* from) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  };
  const auto place = [&](int32_t slot) { return places_ + slot * bytes; };
  /// Fills `slot` and every slot that this sets free in turn.
  const auto fill_from = [&](int32_t slot, int32_t end) {
    while (slot < new_slots && staged.source[slot] >= 0 && staged.source[slot] != slot) {
      const int32_t from = staged.source[slot];
      if (from == end) break;
      copy(place(slot), place(from));
      slot = from;
    }
    return slot;
  };
  const auto wanted = [&](int32_t slot) { return slot < old_slots && staged.target[slot] >= 0; };
  // Chains begin at slots whose old bytes nobody wants.
  for (int32_t slot = 0; slot < new_slots; ++slot) {
    if (!wanted(slot)) fill_from(slot, -1);
  }
  // What is left are cycles. Each is turned once, from its lowest slot.
  std::byte* aside = staging(store_.staged - 1, bytes);
  for (int32_t slot = 0; slot < new_slots; ++slot) {
    if (staged.source[slot] < 0 || staged.source[slot] == slot || !wanted(slot)) continue;
    int32_t lowest = slot, at = staged.source[slot];
    while (at != slot && at < new_slots && at >= 0) {
      lowest = at < lowest ? at : lowest;
      at = staged.source[at];
    }
    if (at != slot || lowest != slot) continue;  // a chain, or a cycle that was turned already
    copy(aside, place(slot));
    copy(place(fill_from(slot, slot)), aside);
  }
}

}  // namespace moekit::engine
