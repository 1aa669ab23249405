// The CPU experts: packed panels, decoded in registers, no dequantized copy of any weight.
#pragma once

#include <optional>

#include "base/cpu_features.h"
#include "experts/experts.h"

namespace moekit::experts {

/// Rows in either layout. The two members differ in nothing else and share blobs.
class CpuExperts final : public Experts {
 public:
  /// Without an ISA: the process's choice (linear/cpu_isa.h).
  explicit CpuExperts(RowsLayout rows, std::optional<CpuIsa> isa = std::nullopt)
      : rows_(rows), isa_(isa) {}

  std::string_view name() const override {
    return rows_ == RowsLayout::batched ? "cpu_batched" : "cpu";
  }
  Traits traits(const Problem& problem) const override;
  Support supports(const Problem& problem) const override;
  WeightLayout weight_layout(const CanonicalLayer& layer,
                             std::span<const int32_t> local_experts) const override;
  void pack(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
            const WeightLayout& layout, std::byte* blob, ThreadPool& threads) const override;
  void pack_head(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                 const WeightLayout& layout, std::byte* blob) const override;
  void pack_experts(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                    const WeightLayout& layout, std::span<std::byte* const> places,
                    ThreadPool& threads) const override;
  int64_t workspace_bytes(const Problem& problem, const WeightLayout& layout, int64_t max_rows,
                          int num_threads) const override;
  std::vector<Knobs> candidates(const Problem& problem, int64_t num_tokens) const override;
  void run(const Args& args, const Knobs& knobs) const override;

 private:
  CpuIsa isa() const;
  RowsLayout rows_;
  std::optional<CpuIsa> isa_;
};

const Experts& cpu_experts();
const Experts& cpu_batched_experts();

}  // namespace moekit::experts
