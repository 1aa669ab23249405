// RefLayer: the routed experts of one GPU as the plain chain of smxx_moe's kernels: every row
// quantized and decoded, every product a sum in fp32. For any format that the kernels decode; a
// piece of the tokens at a time, so that the workspace stays small.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/smxx_moe/api.h"
#include "moekit/config.h"
#include "problem/workspace_layout.h"

namespace moekit::experts::cuda {

class StageClock;

struct RefLayerSpec {
  MoeConfig config;         ///< activation schemes are resolved, none has a static scale
  int64_t num_experts = 0;  ///< local
  int64_t max_tokens = 0;
};

/// In device memory.
struct RefLayerWeights {
  kernels::smxx_moe::ExpertMatrices gate;  ///< unused without a gate
  kernels::smxx_moe::ExpertMatrices up;
  kernels::smxx_moe::ExpertMatrices down;
};

class RefLayer {
 public:
  static int64_t workspace_bytes(const RefLayerSpec& spec);
  /// The workspace is device memory, serves one call at a time and outlives the layer.
  RefLayer(const RefLayerSpec& spec, const RefLayerWeights& weights, void* workspace);

  /// rows: [num_tokens, width] dense; ids, weights: [num_tokens, top_k]; out: [num_tokens, width];
  /// all on the device. Enqueues and returns.
  void run(const void* rows, kernels::smxx_moe::RowType row_type, const int32_t* ids,
           const float* weights, int64_t num_tokens, void* out, kernels::smxx_moe::RowType out_type,
           cudaStream_t stream, StageClock* clock = nullptr) const;

 private:
  struct Regions {
    Region codes, scales;  ///< rows, then intermediates, quantized
    Region x;              ///< what gate and up read, f32
    Region gate_up, act, h, y;
    WorkspaceLayout layout;
    explicit Regions(const RefLayerSpec& spec);
  };
  void read_rows(const void* rows, kernels::smxx_moe::RowType type, int64_t num_rows, int64_t width,
                 const ActivationScheme& scheme, float* out, cudaStream_t stream) const;
  void run_piece(const void* rows, kernels::smxx_moe::RowType row_type, const int32_t* ids,
                 const float* weights, int64_t num_tokens, void* out,
                 kernels::smxx_moe::RowType out_type, cudaStream_t stream, StageClock* clock) const;

  RefLayerSpec spec_;
  RefLayerWeights weights_;
  Regions regions_;
  std::byte* workspace_;
};

}  // namespace moekit::experts::cuda
