// Grouped GEMM over rows sorted by expert on Hopper: the two GEMMs of a MoE layer at 8 tokens an
// expert and more. One persistent launch a GEMM; work comes from a task list in device memory, so
// one CUDA graph serves any routing.
//
//   gate_up   h[row] = act(x[token of row] Wg^T + bg, x[..] Wu^T + bu)      rows gathered in the
//   load up        h[row] = act(x[token of row] Wu^T + bu)                       no gate down
//   y[out_index[row]] = h[row] Wd^T + bd
//
// Numbers: bf16 operands, or fp8 e4m3 with 1x128 scales of rows and 128x128 scales of weights, each
// block of 128 columns summed by the tensor cores and added to fp32 sums by fp32 arithmetic.
// gate_up in fp8 writes h quantized to 1x128 again. Weights in panels (mxfp4, nvfp4, mxfp8) are
// expanded to bf16, exactly, and multiply bf16 rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "kernels/common/activation.h"
#include "kernels/common/tile_task.h"
#include "kernels/common/weight_panels.h"
#include "kernels/common/weight_view.h"

namespace moekit::kernels::sm90_grouped_gemm {

using Format = OperandFormat;
enum class Phase : int32_t { gate_up, up, down };

/// Rows of a task, and its output columns: 128 of h with a gate (128 gate and 128 up columns), else
/// 256. mxfp4 and nvfp4 have a second size for experts of few rows: a quarter of the rows, twice
/// the columns.
struct TileSize {
  int32_t rows = 128;
  int32_t columns = 256;

  constexpr bool operator==(const TileSize&) const = default;
};
constexpr TileSize tile_size(Phase phase, bool short_tasks = false) {
  const int32_t columns = phase == Phase::gate_up ? 128 : 256;
  return short_tasks ? TileSize{32, 2 * columns} : TileSize{128, columns};
}

/// Whether blocks of a cluster share rows, which must lie in order, in place of weights: a task has
/// twice the columns then, half of them a block's.
constexpr bool cluster_shares_rows(Format format) { return in_panels(format); }

/// Whether a format has the second size.
constexpr bool has_short_tasks(Format format) {
  return format == Format::mxfp4 || format == Format::nvfp4;
}

struct Shape {
  Format format = Format::bf16;
  Phase phase = Phase::gate_up;
  int32_t num_experts = 0;
  int32_t columns = 0;  ///< outputs: I for gate_up and up, H for down; a multiple of 32
  int32_t depth = 0;    ///< inputs: a multiple of 32
  /// The task list has the size for experts of few rows: has_short_tasks(). Never changes bits.
  bool short_tasks = false;
};

struct Args {
  Shape shape;
  WeightView weights;
  const void* rows = nullptr;         ///< gate_up, up: x [tokens]; down: h [max_rows]
  int64_t row_bytes = 0;              ///< a multiple of 16
  int64_t max_rows = 0;               ///< rows of `rows` (TMA bounds), where they are not gathered
  const float* row_scales = nullptr;  ///< fp8_block
  int64_t row_scale_stride = 0;       ///< elements
  const int32_t* row_index =
      nullptr;                       ///< gate_up, up: sorted row -> row of x; null: sorted already
  const float* gate_bias = nullptr;  ///< [num_experts, columns] or null
  const float* up_bias = nullptr;    ///< also the bias of `down`
  EpilogueActivation activation;
  const TileTask* tasks = nullptr;
  const int32_t* num_tasks = nullptr;  ///< device; even
  /// Device, [2]: from which blocks take numbers of tasks. Zero before the first call; every call
  /// leaves it zero.
  int32_t* next_task = nullptr;
  void* out = nullptr;
  int64_t out_row_bytes = 0;
  const int32_t* out_index = nullptr;  ///< down: sorted row -> output row; null: itself
  float* out_scales = nullptr;         ///< gate_up in fp8_block
  int64_t out_scale_stride = 0;
};

/// Null, or why a shape is refused.
const char* refusal(const Shape& shape);

/// A prepared call: descriptors are made once, at plan time. Thread-safe to launch.
class Launch {
 public:
  /// Host work only. cluster: pairs of blocks share what both read, see cluster_shares_rows().
  static cudaError_t make(const Args& args, int num_sms, bool cluster, Launch* launch);
  /// `overlap` lets the launch start while its predecessor on the stream ends (programmatic
  /// dependent launch). `rows` replaces Args::rows where rows are gathered (gate_up, up).
  cudaError_t run(cudaStream_t stream, bool overlap, const void* rows = nullptr) const;

  Launch();
  Launch(Launch&&) noexcept;
  Launch& operator=(Launch&&) noexcept;
  ~Launch();

 private:
  struct Prepared;
  std::unique_ptr<Prepared> prepared_;
};

}  // namespace moekit::kernels::sm90_grouped_gemm
