// Placements and loads between the C ABI and the C++ API.
#include <algorithm>
#include <climits>
#include <cstdlib>
#include <new>
#include <vector>

#include "api/c_convert.h"

namespace moekit::c {

Placement from_c(const moekit_placement& p) {
  MOEKIT_CHECK(p.num_ranks >= 1 && p.first != nullptr,
               "moekit_placement: expected 1 or more ranks and where their lists begin, got {} {}",
               p.num_ranks, p.first == nullptr ? "and NULL" : "ranks");
  Placement placement;
  for (int32_t r = 0; r < p.num_ranks; ++r) {
    const int64_t begin = p.first[r], end = p.first[r + 1];
    MOEKIT_CHECK(begin <= end && (r > 0 || begin == 0) && end - begin <= INT32_MAX,
                 "moekit_placement: first[{}] and first[{}] are {} and {}, expected them to ascend "
                 "from 0",
                 r, r + 1, begin, end);
    MOEKIT_CHECK(p.ids != nullptr || begin == end, "moekit_placement: ids is NULL");
    placement.experts_of_rank.emplace_back(p.ids + begin, p.ids + end);
  }
  return placement;
}

moekit_placement* to_c(const Placement& placement) {
  const size_t ranks = placement.experts_of_rank.size();
  size_t ids = 0;
  for (const auto& list : placement.experts_of_rank) ids += list.size();
  const size_t head = sizeof(moekit_placement) + (ranks + 1) * sizeof(int64_t);
  auto* block = static_cast<std::byte*>(std::malloc(head + ids * sizeof(int32_t)));
  if (block == nullptr) throw std::bad_alloc();
  auto* first = reinterpret_cast<int64_t*>(block + sizeof(moekit_placement));
  auto* next = reinterpret_cast<int32_t*>(block + head);
  auto* result = new (block)
      moekit_placement{sizeof(moekit_placement), static_cast<int32_t>(ranks), first, next};
  *first = 0;
  for (const auto& list : placement.experts_of_rank) {
    next = std::copy(list.begin(), list.end(), next);
    first[1] = first[0] + static_cast<int64_t>(list.size());
    ++first;
  }
  return result;
}

RebalanceOptions from_c(const moekit_rebalance_options& o) {
  MOEKIT_CHECK(o.policy == MOEKIT_REBALANCE_GREEDY || o.policy == MOEKIT_REBALANCE_HIERARCHICAL,
               "policy is {}, expected MOEKIT_REBALANCE_GREEDY or MOEKIT_REBALANCE_HIERARCHICAL",
               o.policy);
  RebalanceOptions options;
  options.num_ranks = o.num_ranks;
  options.num_nodes = o.num_nodes;
  options.policy = static_cast<RebalancePolicy>(o.policy);
  options.slots_per_rank = o.slots_per_rank;
  options.num_groups = o.num_groups;
  return options;
}

void to_c(const LoadStatistics& statistics, moekit_load* load) {
  const auto copy = [](const std::vector<int64_t>& from, int64_t* to, int64_t length,
                       const char* name) {
    if (to == nullptr) return;
    MOEKIT_CHECK(length == static_cast<int64_t>(from.size()),
                 "{} has room for {}, the layer has {}", name, length, from.size());
    std::copy(from.begin(), from.end(), to);
  };
  copy(statistics.per_expert, load->per_expert, load->num_experts, "per_expert");
  copy(statistics.per_rank, load->per_rank, load->num_ranks, "per_rank");
  load->calls = statistics.calls;
  load->tokens = statistics.tokens;
  load->imbalance = statistics.imbalance();
}

}  // namespace moekit::c
