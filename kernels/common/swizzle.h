// Arithmetic of shared-memory layouts that TMA, wgmma and our own stores have to agree on. Host and
// device, so that tests need no GPU.
#pragma once

#include <cstdint>

#include "tensor/host_device.h"

namespace moekit::kernels {

/// Bytes of one row of a swizzled operand tile: the K extent of a stage, whatever the element type.
inline constexpr uint32_t kTileRowBytes = 128;
/// Eight rows of 128 bytes: the unit in which the 128-byte swizzle repeats, and its alignment.
inline constexpr uint32_t kSwizzleAtomBytes = 1024;

/// Where byte `offset` of a 1024-aligned tile lies under CU_TENSOR_MAP_SWIZZLE_128B: the 16-byte
/// chunk number (bits 4-6) is xored with the row number inside the atom (bits 7-9). An involution.
MOEKIT_HOST_DEVICE constexpr uint32_t swizzle_128b(uint32_t offset) {
  return offset ^ ((offset >> 3) & 0x70u);
}

/// Offset of 16-byte chunk `chunk` (0-7) of row `row` in a tile of 128-byte rows.
MOEKIT_HOST_DEVICE constexpr uint32_t tile_chunk_offset(uint32_t row, uint32_t chunk) {
  return row * kTileRowBytes + ((chunk ^ (row & 7u)) << 4);
}

/// Offset of 16-byte chunk `chunk` of row `row` in a staging tile whose rows are `row_chunks`
/// chunks long (a multiple of 8): conflict-free for eight rows at one chunk and for one row at
/// eight chunks.
MOEKIT_HOST_DEVICE constexpr uint32_t staging_chunk_offset(uint32_t row, uint32_t chunk,
                                                           uint32_t row_chunks) {
  return (row * row_chunks + (chunk ^ (row & 7u))) << 4;
}

/// wgmma matrix descriptor of a K-major operand in the 128-byte swizzle: `address` is the shared
/// address of row 0 (a multiple of 1024, plus 32-byte steps along K), rows in atoms of eight that
/// are `kSwizzleAtomBytes` apart. PTX ISA, "Matrix descriptor format": address >> 4 in bits 0-13,
/// leading offset in 16-29 (not used by swizzled K-major layouts), stride offset in 32-45, layout
/// in 62-63.
MOEKIT_HOST_DEVICE constexpr uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1;
  return (static_cast<uint64_t>(address & 0x3ffffu) >> 4) | (uint64_t{1} << 16) |
         (static_cast<uint64_t>(kSwizzleAtomBytes >> 4) << 32) | (kSwizzle128 << 62);
}

/// What one k step (16 bf16 or 32 fp8 columns, 32 bytes) adds to a descriptor.
inline constexpr uint64_t kDescriptorStepK = 32 >> 4;

}  // namespace moekit::kernels
