// What prepare refuses in a routing table, as a plain value that can travel to the other ranks.
#pragma once

#include <cstdint>

#include "problem/problem.h"
#include "problem/routing_table.h"

namespace moekit::prepare {

/// The first fault of one rank's routing, or none.
struct RoutingFault {
  enum class Kind : int64_t { none, id_out_of_range, too_many_tokens };
  Kind kind = Kind::none;
  int64_t row = 0;
  int64_t slot = 0;
  int64_t value = 0;  ///< the id, or the number of tokens
};

/// An id names an expert of the problem; -1 and anything out of range does not.
inline bool names_expert(const Problem& problem, GlobalExpert id) {
  return index_of(id) >= 0 && index_of(id) < problem.config.num_experts;
}

/// Checks the number of tokens, and the ids when problem.checked.
RoutingFault find_fault(const Problem& problem, const RoutingTable& routing);

/// Ids out of range; only where they are not faults.
int64_t count_out_of_range(const Problem& problem, const RoutingTable& routing);

/// Throws invalid_argument for a fault of `rank`. The text is the same whoever throws it.
void throw_fault(const Problem& problem, int rank, const RoutingFault& fault);

/// Throws invalid_argument: more rows than the capacity admits under CapacityPolicy::refuse.
/// `unit` says what is bounded ("rows", "rows of one expert").
[[noreturn]] void fail_capacity(int rank, const char* unit, int64_t wanted, int64_t max_rows);

}  // namespace moekit::prepare
