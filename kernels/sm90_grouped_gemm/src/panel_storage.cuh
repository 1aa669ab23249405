// Shared memory of the kernels for weights in panels.
#pragma once

#include "kernels/common/expand.cuh"
#include "kernels/sm90_grouped_gemm/src/shared_storage.cuh"

namespace moekit::kernels::sm90_grouped_gemm {

/// Blocks of 64 columns of depth in a stage: fewer, larger steps keep short tasks streaming.
inline constexpr int kStageBlocks = 2;

template <Knobs K>
struct PanelStorage {
  static constexpr int kBlockBytes = PanelFormat::of(K.format).block_bytes();
  static constexpr int kRowsBytes = K.tile().rows * kTileRowBytes;
  /// Tiles of 64 weight rows of a task: two for each consumer group.
  static constexpr int kTiles = 2 * K.groups;
  // Rows of 64 columns in the 128-byte swizzle, and blocks as they lie in memory.
  uint8_t rows[K.stages][kStageBlocks * kRowsBytes];
  uint8_t weights[K.stages][kTiles * kStageBlocks * kBlockBytes];
  // 32 rows of 16 columns for each consumer warp on their way out.
  uint8_t out[K.groups * 4][32 * 32];
  uint64_t full[K.stages];
  uint64_t empty[K.stages];
};

template <Knobs K>
__device__ __forceinline__ PanelStorage<K>& panel_storage(uint8_t* dynamic) {
  const uint32_t address = shared_address(dynamic);
  return *reinterpret_cast<PanelStorage<K>*>(dynamic + ((1024u - (address & 1023u)) & 1023u));
}

}  // namespace moekit::kernels::sm90_grouped_gemm
