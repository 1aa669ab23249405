// Strong types of expert numbers: a global id can't be used where a local one is meant (field bugs
// F10, F11).
#pragma once

#include <cstdint>

namespace moekit {

/// Logical expert in [0, E), as routers and callers name it; none = -1 is "no expert".
enum class GlobalExpert : int32_t { none = -1 };
/// Slot on one rank, in [0, num_local_experts); none = not on this rank.
enum class LocalExpert : int32_t { none = -1 };

constexpr int32_t index_of(GlobalExpert e) { return static_cast<int32_t>(e); }
constexpr int32_t index_of(LocalExpert e) { return static_cast<int32_t>(e); }

}  // namespace moekit
