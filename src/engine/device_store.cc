#include "engine/device_store.h"

#include <algorithm>
#include <span>

#include "base/buffer.h"
#include "base/math.h"

namespace moekit::engine {

std::vector<std::unique_ptr<device::DeviceExperts>> upload_experts(const CanonicalLayer& layer,
                                                                   const Plan& plan, int copies,
                                                                   ThreadPool& threads,
                                                                   Allocator* allocator) {
  const experts::Experts& member = *plan.choice.experts;
  const std::span<const int32_t> local = plan.local_experts();
  std::vector<std::unique_ptr<device::DeviceExperts>> stores;
  for (int i = 0; i < copies; ++i) {
    stores.push_back(member.make_device_experts(layer, plan.problem));
  }
  // A round of experts at a time, one a thread.
  const int64_t bytes = plan.layout.expert_bytes();
  const auto count = static_cast<int64_t>(local.size());
  const int64_t round = std::min<int64_t>(count, threads.num_threads());
  const Buffer images(checked_mul(round, bytes, "images of experts"), allocator);
  for (int64_t first = 0; first < count; first += round) {
    std::vector<std::byte*> places(local.size(), nullptr);
    const int64_t last = std::min(first + round, count);
    for (int64_t e = first; e < last; ++e) {
      places[static_cast<size_t>(e)] = images.data() + (e - first) * bytes;
    }
    member.pack_experts(layer, local, plan.layout, places, threads);
    for (int64_t e = first; e < last; ++e) {
      for (const auto& store : stores) store->upload(e, places[static_cast<size_t>(e)]);
    }
  }
  for (const auto& store : stores) store->finish();
  return stores;
}

}  // namespace moekit::engine
