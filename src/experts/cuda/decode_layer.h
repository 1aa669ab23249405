// DecodeLayer: the routed experts of one GPU for up to eight tokens, as two or three launches:
// gate_up, down, and combine where down's blocks do not own their columns. Same weights, same calls
// as SplitLayer.
#pragma once

#include <cstdint>

#include "experts/cuda/split_layer.h"
#include "kernels/smxx_decode/api.h"

namespace moekit::experts::cuda {

class DecodeLayer {
 public:
  /// Null, or why it refuses.
  static const char* refusal(const SplitLayerSpec& spec);
  static int64_t workspace_bytes(const SplitLayerSpec& spec);

  /// As SplitLayer's; the workspace needs no clearing. hidden is bf16, out of `out_type`.
  DecodeLayer(const SplitLayerSpec& spec, const SplitLayerWeights& weights, void* workspace);
  void run(const void* hidden, const int32_t* ids, const float* weights, int64_t num_tokens,
           const int32_t* live_tokens, void* out, cudaStream_t stream,
           kernels::smxx_moe::RowType out_type = kernels::smxx_moe::RowType::bf16,
           StageClock* clock = nullptr) const;

 private:
  SplitLayerSpec spec_;
  kernels::smxx_decode::Args args_;
};

}  // namespace moekit::experts::cuda
