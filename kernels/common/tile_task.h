// TileTask: one output tile of a grouped GEMM over rows sorted by expert, as the index kernel lists
// it on the device and a GEMM kernel takes it. The host never sees one.
#pragma once

#include <cstdint>

#include "tensor/host_device.h"

namespace moekit::kernels {

struct alignas(16) TileTask {
  int32_t expert = 0;
  int32_t first_row = 0;  ///< in the order sorted by expert
  int32_t num_rows = 0;   ///< 0 (nothing to do, keep step with the cluster) to the tile's height
  int32_t n_block = 0;    ///< which block of output columns
};

/// How row tiles of one expert become tasks. Tasks of a list come in pairs for the two blocks of a
/// cluster: same columns and neighbouring rows (they share the weight tile), or, for an odd last
/// row tile, same rows and neighbouring columns.
struct TaskShape {
  int32_t tile_rows = 128;
  int32_t n_blocks = 1;    ///< column blocks of an expert
  int32_t row_group = 16;  ///< row tiles that sweep over the columns together, even: what L2 holds

  /// Pairs of an expert with `rows` rows.
  MOEKIT_HOST_DEVICE constexpr int32_t num_pairs(int32_t rows) const {
    const int32_t tiles = (rows + tile_rows - 1) / tile_rows;
    return tiles / 2 * n_blocks + (tiles % 2) * ((n_blocks + 1) / 2);
  }

  /// Task `half` (0, 1) of pair `pair` of an expert whose rows start at `first_row`. A group of row
  /// tiles sweeps over the columns, two blocks of them at a time: the group's pairs at the one, at
  /// the other, then the odd last row tile, if it is of this group, at both. So whoever reads the
  /// same weights does so at about the same time, while L2 has them.
  MOEKIT_HOST_DEVICE constexpr TileTask task(int32_t expert, int32_t first_row, int32_t rows,
                                             int32_t pair, int32_t half) const {
    const int32_t tiles = (rows + tile_rows - 1) / tile_rows;
    const int32_t row_pairs = tiles / 2;
    const int32_t group_pairs = row_group / 2;
    const int32_t groups = row_pairs == 0 ? 1 : (row_pairs + group_pairs - 1) / group_pairs;
    const int32_t in_order = pair / (group_pairs * n_blocks);
    const int32_t group = in_order < groups ? in_order : groups - 1;
    const int32_t first = group * group_pairs;
    const int32_t left = row_pairs - first;
    const int32_t height = left < group_pairs ? left : group_pairs;
    const int32_t sweep = 2 * height + (group == groups - 1 ? tiles % 2 : 0);
    const int32_t in_group = pair - first * n_blocks;
    const int32_t n = in_group / sweep * 2, step = in_group % sweep;
    const int32_t columns = n + 1 < n_blocks ? 2 : 1;
    TileTask t;
    t.expert = expert;
    int32_t tile = tiles - 1;
    if (step < columns * height) {
      t.n_block = n + step / height;
      tile = (first + step % height) * 2 + half;
    } else {
      t.n_block = n + half;
    }
    t.first_row = first_row + tile * tile_rows;
    const int32_t rest = rows - tile * tile_rows;
    t.num_rows = t.n_block >= n_blocks ? 0 : rest < tile_rows ? rest : tile_rows;
    return t;
  }
};

}  // namespace moekit::kernels
