// The router on a GPU: every recipe of RouterSpec in one launch, scores to sorted ids and weights.
// Arithmetic and orders are those of router/scoring.h and router/selection.h, compiled for the
// device without fused multiply-add: ids and weights have the bits of the CPU members. (One
// exception: a p_norm whose p is none of 1, 2, infinity goes through the device's powf.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "moekit/config.h"

namespace moekit::router::cuda {

/// All pointers are device memory.
struct Args {
  RouterSpec spec;
  int64_t num_tokens = 0;                ///< capacity where live_tokens is set
  const int32_t* live_tokens = nullptr;  ///< [1], may be null
  int32_t num_experts = 0;
  int32_t top_k = 0;
  const float* logits = nullptr;          ///< [T, E]
  const float* selection_bias = nullptr;  ///< [E] or null
  const int64_t* token_ids = nullptr;     ///< [T], hash routing only
  const int64_t* hash_table = nullptr;    ///< [hash_rows, top_k]
  int64_t hash_rows = 0;
  int32_t* ids = nullptr;       ///< [T, top_k] out
  float* weights = nullptr;     ///< [T, top_k] out
  int32_t* nan_rows = nullptr;  ///< [1], may be null: rows with a NaN logit are added to it
  int32_t* bad_ids = nullptr;   ///< [1], may be null: hash ids or token ids out of range are added;
                                ///< such a slot gets id -1 and weight 0
};

inline constexpr int32_t kMaxExperts = 4096;

/// Enqueues on `stream`; cudaErrorInvalidValue for more experts than kMaxExperts or a missing
/// pointer. Recipes are checked by router::validate() at plan time.
cudaError_t run(const Args& args, cudaStream_t stream);

}  // namespace moekit::router::cuda
