// Limits: what each family of kernels takes. One table for the host code that launches them and for
// the members that promise them; reading it needs no CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/common/weight_panels.h"

namespace moekit::kernels {

struct Limits {
  int32_t size_multiple = 1;  ///< hidden and inter are multiples of it
  int32_t max_experts = std::numeric_limits<int32_t>::max();
  int64_t max_tokens = std::numeric_limits<int32_t>::max();  ///< of one call
  int64_t max_slots = std::numeric_limits<int32_t>::max();   ///< tokens * top_k
  /// tokens * hidden: what shared memory holds of the rows.
  int64_t max_elements = std::numeric_limits<int64_t>::max();
  bool fp8_without_gate = true;
};

/// sm90_grouped_gemm over the index of smxx_moe, whose counters fit one block.
inline constexpr Limits kGroupedGemmLimits{
    .size_multiple = 32, .max_experts = 4096, .fp8_without_gate = false};

/// smxx_decode.
inline constexpr Limits kDecodeLimits{
    .size_multiple = 32, .max_tokens = 8, .max_slots = 64, .max_elements = 100000};

/// Whether the split chain is the faster one for an fp8 call of few tokens that reads so many bytes
/// of weights, on an H200 (docs/performance-gpu.md): it streams them better and makes the tokens'
/// codes once, decode has fewer launches.
constexpr bool fp8_takes_split_chain(double bytes, int64_t num_tokens) {
  return bytes * static_cast<double>(num_tokens) > 0.9e9;
}

/// Of `experts`, how many `slots` choices hit on average, if all are as likely.
inline double expected_experts(double experts, double slots) {
  return experts * (1.0 - std::pow(1.0 - 1.0 / experts, slots));
}

/// Dynamic shared memory of smxx_decode's gate_up: the rows, padded, and a scale per 128 columns.
constexpr int64_t decode_shared_bytes(int64_t tokens, int64_t hidden, int64_t element_bytes) {
  return tokens * (hidden * element_bytes + 16 + (hidden + 127) / 128 * 4);
}

/// Steps of weights that a warp of smxx_decode has in shared memory where they lie in panels: many,
/// or few where the rows leave no room. A step is two strips with their scales.
constexpr int32_t decode_panel_stages(OperandFormat format, bool many) {
  if (PanelFormat::of(format).code_bits == 8) return many ? 3 : 2;
  return many ? 5 : 3;
}
/// The same of down, which has no rows there: so many that it fits beside gate_up.
constexpr int32_t decode_panel_down_stages(OperandFormat format, bool many) {
  return decode_panel_stages(format, many) - (many ? 1 : 0);
}
/// Elements from row to row of h then, and of the rows in shared memory but for 64 bytes of
/// padding.
MOEKIT_HOST_DEVICE constexpr int32_t panel_row_elements(int32_t width) {
  return (width + 127) / 128 * 128;
}
/// The dynamic shared memory then: rings of 16 warps, pieces of sums, and (gate_up) the rows.
constexpr int64_t decode_panel_shared_bytes(OperandFormat format, int64_t tokens, int32_t hidden,
                                            int32_t stages) {
  const PanelFormat f = PanelFormat::of(format);
  const int64_t step = 2 * (f.strip_bytes() + kStripRows * f.row_scales());
  return 16 * stages * step + 15 * 1024 + tokens * (int64_t{panel_row_elements(hidden)} * 2 + 64);
}

/// The same of fp8 weights, which lie in rows: a step is 16 rows of 128 columns and the scales of
/// two blocks. gate_up takes the kernel without rings (decode_shared_bytes()) where the fewest
/// stages do not fit.
inline constexpr int32_t kFp8StepBytes = 16 * 128 + 16;
constexpr int64_t decode_fp8_shared_bytes(int64_t tokens, int32_t hidden, int32_t stages) {
  const int64_t row = panel_row_elements(hidden);
  return int64_t{16} * stages * kFp8StepBytes + 15 * 512 + tokens * (row + 64 + row / 128 * 4);
}

/// Beside it: the chosen experts and the pieces of sums that warps join.
inline constexpr int64_t kDecodeStaticBytes = 5 << 10;
/// Strips of 16 columns, times slots, that a block of smxx_decode's down adds up itself: no more,
/// so that it still finds room beside a block of gate_up.
inline constexpr int32_t kDecodeOwnedRows = 24;

/// Shared memory that one block may have (CUDA programming guide, technical specifications).
constexpr int64_t block_shared_bytes(int32_t major, int32_t minor) {
  if (major == 8) return (minor == 0 || minor == 7 ? 163 : 99) << 10;
  return (major == 12 ? 99 : 227) << 10;
}

/// smxx_moe's reference chain: its row quantizers take 16 columns at a time.
inline constexpr Limits kReferenceLimits{.size_multiple = 16};

}  // namespace moekit::kernels
