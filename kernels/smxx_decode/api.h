// The experts for a handful of tokens: two launches that read each chosen expert's weights once,
// spread evenly over the whole GPU, warp by warp; no index, no shared tiles. From sm_80 up.
//
//   gate_up   h[slot] = act(x Wg^T + bg, x Wu^T + bu)       x quantized on the way in (fp8)
//   down      y[slot] = h[slot] Wd^T + bd, f32
//
// y goes to combine_rows; or, where owns_columns() says so, a block of down has its columns of all
// slots and adds them up itself. In fp8 gate_up leaves h in f32, and down quantizes the rows that
// it reads. Weights in panels (mxfp4, nvfp4, mxfp8) are expanded to bf16, exactly, and multiply
// bf16 rows; their sums times the expert's multiplier are what biases are added to. Numbers: the
// exact chain, products and sums in fp32; in fp8 a block of 128 columns is summed before it is
// scaled. In which order partial sums are added depends on how many experts a call chooses; the
// same call has the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/activation.h"
#include "kernels/common/limits.h"
#include "kernels/common/weight_view.h"

namespace moekit::kernels::smxx_decode {

inline constexpr auto kMaxTokens = static_cast<int32_t>(kDecodeLimits.max_tokens);
inline constexpr auto kMaxSlots = static_cast<int32_t>(kDecodeLimits.max_slots);

struct Args {
  OperandFormat format = OperandFormat::bf16;
  int32_t num_tokens = 0;                ///< capacity where live_tokens is set
  const int32_t* live_tokens = nullptr;  ///< [1], may be null
  int32_t top_k = 0;
  int32_t num_experts = 0;
  int32_t hidden = 0;  ///< multiples of 32
  int32_t inter = 0;
  bool gated = true;
  const int32_t* ids = nullptr;  ///< [T, top_k]; outside [0, num_experts) is no expert
  WeightView gate_up;
  WeightView down;
  const float* gate_bias = nullptr;  ///< [num_experts, inter] or null
  const float* up_bias = nullptr;
  const float* down_bias = nullptr;  ///< [num_experts, hidden] or null
  EpilogueActivation activation;
  const void* x = nullptr;  ///< bf16 [T, hidden]
  /// [slots, inter], dense: bf16, or e4m3 codes (down's own). Panels: bf16, rows of
  /// panel_row_elements(inter), columns in an order that only down knows.
  void* h = nullptr;
  float* h_values = nullptr;  ///< fp8_block: [slots, inter], what gate_up writes
  float* h_scales = nullptr;  ///< fp8_block: [slots, ceil(inter / 128)], down's own
  float* y = nullptr;         ///< [slots, hidden]
  /// Where owns_columns(): what combine_rows() would make of y, which then stays as it is. Else
  /// null.
  void* out = nullptr;             ///< [T, hidden]
  bool out_f32 = false;            ///< else bf16
  const float* weights = nullptr;  ///< [T, top_k]
  int32_t num_sms = 0;
};

/// Null, or why the shape is refused.
const char* refusal(const Args& args);

/// Whether down is faster if it adds up its slots itself: strips of 16 columns come out even on the
/// GPU, and shared memory has room for their slots.
bool owns_columns(const Args& args);

/// Both enqueue on `stream`. With `overlap`, down reads ids and weights while its predecessor still
/// runs: they must be older than gate_up, and gate_up's end must lie before down's predecessor or
/// be it.
cudaError_t gate_up(const Args& args, cudaStream_t stream, bool overlap);
cudaError_t down(const Args& args, cudaStream_t stream, bool overlap);

}  // namespace moekit::kernels::smxx_decode
