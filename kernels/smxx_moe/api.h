// Arch-neutral CUDA kernels of a MoE layer (sm_80 and up): everything between the matrix products,
// and a slow, certain evaluation of the whole layer.
//
// All functions enqueue on `stream` and return the launch's status; they never allocate, never wait
// for the device and can be captured. `overlap` makes a launch a programmatic dependent one: it may
// start while its predecessor on the stream ends. Pointers are device memory unless said otherwise.
// `num_tokens` is a capacity where `live_tokens` (device, may be null) holds the real count.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/activation.h"
#include "kernels/common/tile_task.h"
#include "moekit/quant.h"

namespace moekit::kernels::smxx_moe {

// --- index -----------------------------------------------------------------------------------

/// Where the index of one call lives. Slots are token * top_k + j.
struct Index {
  int32_t* expert_offsets = nullptr;  ///< [num_experts + 1]: sorted rows of expert e
  int32_t* row_slot = nullptr;        ///< [slots]: sorted row -> slot
  int32_t* row_token = nullptr;       ///< [slots]: sorted row -> token
  int32_t* slot_row = nullptr;        ///< [slots]: slot -> sorted row, -1 without an expert
  int32_t* num_rows = nullptr;        ///< [1]: rows that have an expert
  int32_t* dropped = nullptr;         ///< [1]: ids that are neither -1 nor an expert; may be null
  TileTask* tasks[2] = {};            ///< task lists; null where not wanted
  int32_t* num_tasks[2] = {};         ///< [1] each
  TaskShape shapes[2];
  // Scratch of build_index(). Calls of up to kOneLaunchSlots slots leave it alone.
  int32_t* chunk_counts = nullptr;  ///< [chunk_count(slots), num_experts]
  int32_t* pair_offsets = nullptr;  ///< [2, num_experts + 1]
  int32_t* ticket = nullptr;        ///< [2], zero before the first call; every call leaves it zero
};

/// Pieces of the slots that blocks of build_index() take, each its own.
int64_t chunk_count(int64_t num_slots);

/// Entries that tasks[i] must have room for.
int64_t task_capacity(const TaskShape& shape, int64_t num_slots, int64_t num_experts);

/// Slots up to which build_index() is one launch: eight for each thread of a block, which keeps
/// them in registers.
inline constexpr int32_t kOneLaunchSlots = 8192;

/// Counts, sorts, cuts into tasks: in one launch, or in two above kOneLaunchSlots. Its kernels let
/// dependent launches start only when everything before build_index() is complete. Rows of an
/// expert keep no particular order, which no result depends on. ids outside [0, num_experts) have
/// no expert. num_experts <= 4096.
cudaError_t build_index(const int32_t* ids, int64_t num_tokens, const int32_t* live_tokens,
                        int32_t top_k, int32_t num_experts, const Index& index, cudaStream_t stream,
                        bool overlap = false);

// --- rows --------------------------------------------------------------------------------------

enum class RowType : int32_t { f32, bf16 };

/// Codes and scales of quantized rows, as RowFormat orders them: row r's codes at codes + r *
/// row_bytes, its scales at scales + r * scale_row_bytes. `codes` and row_bytes are multiples of 4,
/// of fp8_block of 8, for which quantize_rows() stores eight codes at a time.
struct QuantizedRows {
  ActivationScheme scheme;
  float static_scale = 1.0f;
  int64_t width = 0;
  void* codes = nullptr;
  int64_t row_bytes = 0;
  void* scales =
      nullptr;  ///< f32, e8m0 or e4m3, by format; nvfp4: then, 4-aligned, the f32 multiplier
  int64_t scale_row_bytes = 0;
  /// fp8_block: where row r goes, slot_row[r * slots] to slot_row[r * slots + slots - 1] of an
  /// Index (-1: nowhere), so that rows lie sorted by expert. Null: row r is row r.
  const int32_t* slot_row = nullptr;
  int32_t slots = 1;
};

/// The chains of docs/numerics.md, bit for bit. rows: [num_rows, width], row_bytes apart, aligned
/// to 16 bytes; width is a multiple of 16. live_rows (device, may be null) holds the real count.
/// independent_of_predecessor, which matters with `overlap` only: the work may run beside the
/// launch before it on the stream, and the kernel still ends after that one. Right where that
/// launch is build_index() (which lets dependents start only when everything before it is
/// complete), and it neither writes `rows` or `live_rows` nor touches `out`.
cudaError_t quantize_rows(const void* rows, RowType type, int64_t row_bytes, int64_t num_rows,
                          const int32_t* live_rows, const QuantizedRows& out, cudaStream_t stream,
                          bool overlap = false, bool independent_of_predecessor = false);

/// to[slot_row[r * slots + j]] = from[r] for all j that are not -1: rows sorted by expert, where
/// slot_row is an Index's. `row_bytes` each, a multiple of 16, dense on both sides.
cudaError_t spread_rows(const void* from, int64_t row_bytes, int64_t num_rows,
                        const int32_t* live_rows, const int32_t* slot_row, int32_t slots, void* to,
                        cudaStream_t stream, bool overlap = false);

/// Exact values as f32 [num_rows, width].
cudaError_t dequantize_rows(const QuantizedRows& in, int64_t num_rows, float* out,
                            cudaStream_t stream);

/// h = act(gate, up), f32 [rows, 2 * inter] (gate columns first; without a gate [rows, inter]) to
/// [rows, inter] of `type`.
cudaError_t activate_rows(const float* gate_up, int64_t num_rows, int64_t inter,
                          const ActivationSpec& activation, RowType type, void* out,
                          cudaStream_t stream);

/// out[t] = sum over slots j of weight * row, each product rounded to fp32, added in slot order, no
/// fused multiply-add; slots without an expert are skipped unread, a token without any gets zeros.
/// rows: [num_tokens, top_k, width]; ids as build_index got them. width is a multiple of 8. With
/// `overlap`, the launch before this one on the stream writes none of ids, weights and live_tokens,
/// and lets dependents start only when everything before it is complete.
cudaError_t combine_rows(const void* rows, RowType type, const int32_t* ids, const float* weights,
                         int64_t num_tokens, const int32_t* live_tokens, int32_t top_k,
                         int32_t num_experts, int64_t width, RowType out_type, void* out,
                         cudaStream_t stream, bool overlap = false);

// --- the reference layer -------------------------------------------------------------------------

/// A canonical weight matrix per expert, [rows, cols] row-major codes, scales as the format has
/// them: fp8_tensor [1], fp8_channel [rows], fp8_block [ceil(rows/128), ceil(cols/128)], all f32;
/// mx* e8m0 [rows, cols/32]; nvfp4 e4m3 [rows, cols/16] and `global` f32 [num_experts].
struct ExpertMatrices {
  WeightScheme scheme;
  int64_t rows = 0;
  int64_t cols = 0;
  const void* codes = nullptr;
  int64_t expert_code_bytes = 0;
  const void* scales = nullptr;
  int64_t expert_scale_bytes = 0;
  const float* globals = nullptr;
  ScaleSense global_sense = ScaleSense::multiplier;
  const float* bias = nullptr;  ///< [num_experts, rows] or null
};

/// Null, or why the format is not covered.
const char* reference_refusal(const ExpertMatrices& matrices);

/// out[slot, n] = sum over k of in[row(slot), k] * value(n, k) + bias[n], fp32 sums, for every slot
/// with an expert; other slots stay untouched. row(slot) = slot / slots_per_row. `out` rows are
/// out_stride elements apart.
cudaError_t reference_product(const float* in, int32_t slots_per_row, const int32_t* ids,
                              int64_t num_slots, int32_t num_experts,
                              const ExpertMatrices& matrices, float* out, int64_t out_stride,
                              cudaStream_t stream);

}  // namespace moekit::kernels::smxx_moe
