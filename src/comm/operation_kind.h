// The collective operations of a communicator, as its messages call them.
#pragma once

#include <cstdint>

namespace moekit::comm {

enum class OperationKind : uint8_t { barrier, allgather, all_to_all_v };

constexpr const char* to_string(OperationKind kind) {
  return kind == OperationKind::barrier     ? "barrier"
         : kind == OperationKind::allgather ? "allgather"
                                            : "all_to_all_v";
}

}  // namespace moekit::comm
