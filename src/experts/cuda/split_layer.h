// SplitLayer: the routed experts of one GPU as a chain of launches, prefill's form: index,
// (quantize,) gate_up, down, combine. From (hidden, ids, weights) to summed rows; the host never
// sees a count, so that a captured graph serves any routing within capacity.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/sm90_grouped_gemm/api.h"
#include "kernels/smxx_moe/api.h"
#include "moekit/config.h"

namespace moekit::experts::cuda {

/// How the GEMMs of a call cut and share their work. Never changes bits.
enum class TaskForm : int32_t {
  automatic,  ///< by the rows that the call's experts have on average
  plain,
  few,     ///< mxfp4, nvfp4: tasks of up to 32 rows and twice the columns
  shared,  ///< two thread blocks share weight tiles (bf16, fp8) or rows
};
inline constexpr int kNumTaskForms = 4;

/// The part of a layer that decides launches and workspace.
struct SplitLayerSpec {
  kernels::OperandFormat format = kernels::OperandFormat::bf16;
  int32_t num_experts = 0;  ///< local
  int32_t top_k = 0;
  int32_t hidden = 0;
  int32_t inter = 0;
  ActivationSpec activation{};
  int64_t max_tokens = 0;
  int num_sms = 0;
  TaskForm form = TaskForm::automatic;
  bool overlap = true;  ///< programmatic dependent launches: a knob, never changes bits
};

class StageClock;

/// Types of a call's rows. f32 input is for layers that quantize it; in bf16 ones rows are bf16.
struct RowTypes {
  kernels::smxx_moe::RowType in = kernels::smxx_moe::RowType::bf16;
  kernels::smxx_moe::RowType out = kernels::smxx_moe::RowType::bf16;
};

/// Device pointers of the weights, in place: see WeightView.
struct SplitLayerWeights {
  kernels::WeightView gate_up;
  kernels::WeightView down;
  const float* gate_bias = nullptr;  ///< [num_experts, inter]
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;  ///< [num_experts, hidden]
};

class SplitLayer {
 public:
  /// Null, or why the members refuse.
  static const char* refusal(const SplitLayerSpec& spec);
  static int64_t workspace_bytes(const SplitLayerSpec& spec);

  /// Makes descriptors and clears a few words of `workspace`: device memory that must outlive the
  /// layer and serve one call at a time. Throws Error{unsupported} with refusal()'s text,
  /// Error{cuda} otherwise.
  SplitLayer(const SplitLayerSpec& spec, const SplitLayerWeights& weights, void* workspace);

  /// hidden, out: [num_tokens, hidden] of `types`; ids int32 and weights f32 [num_tokens, top_k];
  /// all on the device. num_tokens <= max_tokens is the capacity of this call, live_tokens (may be
  /// null) the real count. Enqueues and returns; throws Error{cuda} where a launch fails.
  void run(const void* hidden, const int32_t* ids, const float* weights, int64_t num_tokens,
           const int32_t* live_tokens, void* out, cudaStream_t stream, RowTypes types = {},
           StageClock* clock = nullptr) const;

  /// The single steps of run(), for profiles. beside_index: the launch before on the stream is
  /// index() of the same call, which quantizing need not wait for: it reads hidden and live_tokens,
  /// written before the index, and writes what the call before has read.
  void index(const int32_t* ids, int64_t num_tokens, const int32_t* live_tokens,
             cudaStream_t stream) const;
  void quantize(const void* hidden, int64_t num_tokens, const int32_t* live_tokens,
                cudaStream_t stream,
                kernels::smxx_moe::RowType type = kernels::smxx_moe::RowType::bf16,
                bool beside_index = false) const;
  /// Where rows are to be sorted and nothing quantizes them: copies them.
  void sort(const void* hidden, int64_t num_tokens, const int32_t* live_tokens,
            cudaStream_t stream) const;
  void gate_up(const void* hidden, int64_t num_tokens, cudaStream_t stream) const;
  void down(int64_t num_tokens, cudaStream_t stream) const;
  void combine(const int32_t* ids, const float* weights, int64_t num_tokens,
               const int32_t* live_tokens, void* out, cudaStream_t stream,
               kernels::smxx_moe::RowType type = kernels::smxx_moe::RowType::bf16) const;

 private:
  struct Regions;
  struct Gemm {
    kernels::sm90_grouped_gemm::Shape shape;
    kernels::sm90_grouped_gemm::Launch of[kNumTaskForms];  ///< those that its format has
  };
  static Gemm make_gemm(const SplitLayerSpec& spec, const kernels::sm90_grouped_gemm::Args& plain,
                        const kernels::sm90_grouped_gemm::Args& shared);
  /// Calls whose tasks are shared, but for bf16 ones, have rows in the order of the experts, once
  /// for every slot, so that TMA loads them: quantized into it, or copied. Others find them through
  /// the index.
  bool sorts_rows(int64_t num_tokens) const;
  const kernels::sm90_grouped_gemm::Launch& launch(const Gemm& gemm, int64_t num_tokens) const;

  SplitLayerSpec spec_;
  std::byte* workspace_ = nullptr;
  kernels::smxx_moe::Index index_;  ///< but for the shapes of tasks, which depend on the call
  Gemm gate_up_, down_;
};

}  // namespace moekit::experts::cuda
