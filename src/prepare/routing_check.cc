#include "prepare/routing_check.h"

#include "base/check.h"

namespace moekit::prepare {

RoutingFault find_fault(const Problem& problem, const RoutingTable& routing) {
  using Kind = RoutingFault::Kind;
  if (routing.num_tokens < 0 || routing.num_tokens > problem.max_tokens) {
    return {Kind::too_many_tokens, 0, 0, routing.num_tokens};
  }
  if (!problem.checked) return {};
  const int64_t num_slots = routing.num_tokens * routing.top_k;
  for (int64_t i = 0; i < num_slots; ++i) {
    const GlobalExpert id = routing.ids[i];
    if (id == GlobalExpert::none || names_expert(problem, id)) continue;
    return {Kind::id_out_of_range, i / routing.top_k, i % routing.top_k, index_of(id)};
  }
  return {};
}

int64_t count_out_of_range(const Problem& problem, const RoutingTable& routing) {
  int64_t count = 0;
  const int64_t num_slots = routing.num_tokens * routing.top_k;
  for (int64_t i = 0; i < num_slots; ++i) {
    const GlobalExpert id = routing.ids[i];
    count += id != GlobalExpert::none && !names_expert(problem, id) ? 1 : 0;
  }
  return count;
}

void throw_fault(const Problem& problem, int rank, const RoutingFault& fault) {
  switch (fault.kind) {
    case RoutingFault::Kind::none: return;
    case RoutingFault::Kind::id_out_of_range:
      fail(
          ErrorCode::invalid_argument,
          "rank {}: row {}, slot {} of the routing table names expert {}; expected -1 (none) or an "
          "id in [0, {}): mend the ids, or plan unchecked to drop such slots",
          rank, fault.row, fault.slot, fault.value, problem.config.num_experts);
    case RoutingFault::Kind::too_many_tokens:
      fail(ErrorCode::invalid_argument,
           "rank {}: a call brings {} tokens, the plan allows 0 to {}: split the call or plan with "
           "more max_tokens",
           rank, fault.value, problem.max_tokens);
  }
}

void fail_capacity(int rank, const char* unit, int64_t wanted, int64_t max_rows) {
  fail(ErrorCode::invalid_argument,
       "rank {} would get {} {}, its capacity is {} and the policy is to refuse: plan with more "
       "rows, with --capacity drop, or with the exact worst case",
       rank, wanted, unit, max_rows);
}

}  // namespace moekit::prepare
