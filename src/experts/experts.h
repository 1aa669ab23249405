// Experts: permute -> GEMM1 -> activation -> quantize -> GEMM2, on the rows that prepare delivers.
// A back-end is six functions.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "device/cuda_plugin.h"
#include "problem/canonical_layer.h"
#include "problem/duty.h"
#include "problem/expert_rows.h"
#include "problem/problem.h"
#include "problem/support.h"
#include "problem/weight_layout.h"
#include "problem/workspace_layout.h"

namespace moekit::experts {

/// A member's perf knobs as opaque text ("mr=6,kc=512"); they change speed, never bits.
using Knobs = std::string;

/// What the experts promise and need at the joint with prepare/finalize.
struct Traits {
  RowsLayout rows = RowsLayout::standard;
  bool can_weight_and_sum = false;  ///< can write [num_rows, width] itself, in slot order
  bool sums_bf16_rows = false;      ///< the same where combine_dtype is bf16, on one rank
  bool can_weight_input = false;    ///< honours ReduceDuty::weigher == input
  bool quantizes_input = true;      ///< takes f32/bf16 rows and quantizes to config.gate_up_input
                                    ///< itself (QuantDuty::experts)
  bool reads_quantized_rows =
      false;  ///< takes rows already in config.gate_up_input's format (source, destination)
};

/// All inputs and outputs of one call.
struct Args {
  const Problem* problem = nullptr;
  const WeightLayout* layout = nullptr;
  const std::byte* blob = nullptr;  ///< packed weights; null when layout->name == "canonical"
  const CanonicalLayer* canonical = nullptr;  ///< only for layouts named "canonical"
  std::span<const int32_t> local_experts;     ///< global id of each local expert
  ReduceDuty duty;
  ExpertRows in;
  ExpertOutput out;
  std::byte* workspace = nullptr;
  ThreadPool* threads = nullptr;
  device::ExpertsWorkspace* device = nullptr;  ///< of members with weights on a device
  void* stream = nullptr;                      ///< likewise: cudaStream_t; null: the workspace's
};

class Experts {
 public:
  virtual ~Experts() = default;
  virtual std::string_view name() const = 0;
  virtual Traits traits(const Problem& problem) const = 0;
  virtual Support supports(const Problem& problem) const = 0;
  virtual WeightLayout weight_layout(const CanonicalLayer& layer,
                                     std::span<const int32_t> local_experts) const = 0;
  /// Fills blob[0, layout.total_bytes()). Parallel over `threads`; reads only the local experts'
  /// pages.
  virtual void pack(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                    const WeightLayout& layout, std::byte* blob, ThreadPool& threads) const = 0;
  // pack() in two parts, for a blob whose experts come and go: what lies before the first expert,
  // and single experts. Members without a blob are never asked; the default refuses.
  /// Writes blob[0, layout.head_bytes()).
  virtual void pack_head(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                         const WeightLayout& layout, std::byte* blob) const;
  /// Writes layout.expert_bytes() bytes at places[i] for each local expert i whose place is not
  /// null; reads only these experts' pages.
  virtual void pack_experts(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                            const WeightLayout& layout, std::span<std::byte* const> places,
                            ThreadPool& threads) const;
  /// Scratch for at most max_rows rows of `rows` layout (batched: rows_per_expert) and weights in
  /// `layout`.
  virtual int64_t workspace_bytes(const Problem& problem, const WeightLayout& layout,
                                  int64_t max_rows, int num_threads) const = 0;
  // Members whose weights lie on a device (WeightLayout::on_device); no other is asked.
  /// Memory of the device for one call in flight.
  virtual int64_t device_workspace_bytes(const Problem&) const { return 0; }
  /// Room for the packed experts, which the caller uploads one by one.
  virtual std::unique_ptr<device::DeviceExperts> make_device_experts(const CanonicalLayer& layer,
                                                                     const Problem& problem) const;
  /// Best first. Never empty.
  virtual std::vector<Knobs> candidates(const Problem& problem, int64_t num_tokens) const = 0;
  /// Never allocates. On the CPU never throws; on a device throws `cuda`.
  virtual void run(const Args& args, const Knobs& knobs) const = 0;
};

/// Ordered registry, best first, reference last. Objects live for the whole process.
std::span<const Experts* const> registry();

}  // namespace moekit::experts
