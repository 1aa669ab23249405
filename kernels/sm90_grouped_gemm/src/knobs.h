// Knobs: everything a kernel instance is compiled for.
#pragma once

#include <cstdint>

#include "kernels/sm90_grouped_gemm/api.h"

namespace moekit::kernels::sm90_grouped_gemm {

struct Knobs {
  Format format = Format::bf16;
  Phase phase = Phase::gate_up;
  int32_t stages = 4;
  /// Blocks that share a weight tile, or (weights in panels) rows, by multicast: 1 or 2.
  int32_t cluster = 1;

  bool gather = true;  ///< rows found through row_index by the loads; `down` never gathers
  /// Weights in panels: consumer warpgroups. Each has two tiles of 64 weight rows; four of them
  /// take short tasks, whose expansion waits for its own latencies with fewer warps.
  int32_t groups = 2;

  constexpr bool gathers() const { return gather && phase != Phase::down; }
  constexpr bool gated() const { return phase == Phase::gate_up; }
  /// Whether weights are loaded before the predecessor, which makes the rows, has ended.
  constexpr bool starts_early() const { return phase == Phase::down; }
  constexpr TileSize tile() const { return tile_size(phase, groups == 4); }
  /// Of rows; weights in panels have fewer.
  constexpr int32_t element_bytes() const { return format == Format::fp8_block ? 1 : 2; }
  /// Columns of depth in a stage: 128 bytes.
  constexpr int32_t block_depth() const { return 128 / element_bytes(); }
  /// Weight rows of one TMA box and of one half of the B tile.
  constexpr int32_t box_rows() const { return gated() ? 64 : 128; }
};

inline constexpr int32_t kTileColumns = 256;  ///< rows of the weight tile

}  // namespace moekit::kernels::sm90_grouped_gemm
