#include "base/check.h"
#include "experts/cpu/cpu.h"
#include "experts/experts.h"
#include "experts/gpu/members.h"
#include "experts/ref/ref.h"

namespace moekit::experts {

void Experts::pack_head(const CanonicalLayer&, std::span<const int32_t>, const WeightLayout&,
                        std::byte*) const {
  fail(ErrorCode::unsupported, "{} packs all its experts at once: its placement is fixed", name());
}

void Experts::pack_experts(const CanonicalLayer&, std::span<const int32_t>, const WeightLayout&,
                           std::span<std::byte* const>, ThreadPool&) const {
  fail(ErrorCode::unsupported, "{} packs all its experts at once: its placement is fixed", name());
}

std::unique_ptr<device::DeviceExperts> Experts::make_device_experts(const CanonicalLayer&,
                                                                    const Problem&) const {
  fail(ErrorCode::internal, "{} keeps its weights in host memory", name());
}

std::span<const Experts* const> registry() {
  static const Experts* const members[] = {
      &cpu_experts(),      &cpu_batched_experts(), &sm90_experts(), &cuda_decode_experts(),
      &cuda_ref_experts(), &ref64_experts(),       &ref_experts(),  &ref_batched_experts()};
  return members;
}

}  // namespace moekit::experts
