// The two ways in which a checkpoint is not taken, named as often as in no other layer.
#pragma once

#include "moekit/error.h"

namespace moekit::checkpoint {

inline constexpr ErrorCode kCorrupt = ErrorCode::corrupt_file;
inline constexpr ErrorCode kUnsupported = ErrorCode::unsupported;

}  // namespace moekit::checkpoint
