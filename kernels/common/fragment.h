// Which row and column of a tile each register of a thread holds: the m64nN accumulator of wgmma
// (PTX ISA, "Register fragments for wgmma.mma_async.m64n*"). Host and device.
#pragma once

#include <cstdint>

#include "tensor/host_device.h"

namespace moekit::kernels {

/// Threads of a warpgroup.
inline constexpr int kWarpgroup = 128;

/// Row (0-63) of accumulator register `i` of thread `thread` (0-127) of the warpgroup.
MOEKIT_HOST_DEVICE constexpr int accumulator_row(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + (i & 2 ? 8 : 0);
}

/// Column (0-N-1) of accumulator register `i`.
MOEKIT_HOST_DEVICE constexpr int accumulator_column(int thread, int i) {
  return i / 4 * 8 + thread % 4 * 2 + (i & 1);
}

}  // namespace moekit::kernels
