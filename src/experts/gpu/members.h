// The members that run on a CUDA device, as plans see them: what they take and how their weights
// are packed. The kernels are behind device/cuda_plugin.h, so that every build has these members
// and can say why they are taken or not.
#pragma once

#include "device/cuda_plugin.h"
#include "experts/experts.h"

namespace moekit::kernels {
struct Limits;
}

namespace moekit::experts {

class CudaExperts final : public Experts {
 public:
  CudaExperts(std::string_view name, device::ExpertKernels kernels, const kernels::Limits& limits)
      : name_(name), kernels_(kernels), limits_(limits) {}

  std::string_view name() const override { return name_; }
  Traits traits(const Problem& problem) const override;
  Support supports(const Problem& problem) const override;
  WeightLayout weight_layout(const CanonicalLayer& layer,
                             std::span<const int32_t> local_experts) const override;
  void pack(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
            const WeightLayout& layout, std::byte* blob, ThreadPool& threads) const override;
  void pack_experts(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                    const WeightLayout& layout, std::span<std::byte* const> places,
                    ThreadPool& threads) const override;
  /// Host memory: rows on their way to the device.
  int64_t workspace_bytes(const Problem& problem, const WeightLayout& layout, int64_t max_rows,
                          int num_threads) const override;
  int64_t device_workspace_bytes(const Problem& problem) const override;
  std::unique_ptr<device::DeviceExperts> make_device_experts(const CanonicalLayer& layer,
                                                             const Problem& problem) const override;
  std::vector<Knobs> candidates(const Problem& problem, int64_t num_tokens) const override;
  void run(const Args& args, const Knobs& knobs) const override;

 private:
  void require_gpu(const Problem& problem, Support& support) const;
  void require_formats(const MoeConfig& config, Support& support) const;
  void require_sizes(const Problem& problem, Support& support) const;
  void require_roles(const Problem& problem, Support& support) const;
  device::ExpertsSpec spec_of(const Problem& problem) const;

  std::string_view name_;
  device::ExpertKernels kernels_;
  const kernels::Limits& limits_;
};

/// Grouped GEMMs for Hopper, and the launches of cuda_decode where few tokens come.
const Experts& sm90_experts();
/// A handful of tokens on any GPU from compute capability 8.0 on.
const Experts& cuda_decode_experts();
/// Simple, slow and certain; every format but integers.
const Experts& cuda_ref_experts();

}  // namespace moekit::experts
