// The packed Linear member.
#pragma once

#include <optional>

#include "base/cpu_features.h"
#include "linear/linear.h"

namespace moekit::linear {

/// Panels as experts/cpu packs them, one matrix. Any weight format, any input scheme.
class CpuLinear final : public Linear {
 public:
  /// Without an ISA: the process's choice (cpu_isa.h).
  explicit CpuLinear(std::optional<CpuIsa> isa = std::nullopt) : isa_(isa) {}

  std::string_view name() const override { return "cpu"; }
  bool supports(const StoredMatrix& weight, const ActivationScheme& input) const override;
  int64_t packed_bytes(const StoredMatrix& weight) const override;
  void pack(const StoredMatrix& weight, std::byte* blob, ThreadPool& threads) const override;
  int64_t workspace_bytes(const StoredMatrix& weight, const ActivationScheme& input,
                          int64_t max_rows, int num_threads) const override;
  void run(const Args& args) const override;

 private:
  CpuIsa isa() const;
  std::optional<CpuIsa> isa_;
};

/// The definition: decoded weights, quantized rows, plain loops. Packs nothing.
const Linear& ref_linear();

}  // namespace moekit::linear
