// Node relays: the rank of a node through which a source reaches the node's ranks. The relay has
// the source's place in its own node (Problem::nodes), so that traffic between two nodes is spread
// over pairs of ranks.
#pragma once

#include <cstdint>

#include "prepare/slot_homes.h"
#include "problem/problem.h"

namespace moekit::prepare {

/// Through which rank `source` reaches `server`: the source itself in its own node.
int relay_of(const Problem& problem, int source, int server);
/// As many sources as any rank relays for, itself among them, or more.
int64_t max_relayed_sources(const Problem& problem);
/// Replaces the ranks of the first `num_tokens` tokens' slots by the relays on the way there.
void send_to_relays(const Problem& problem, int64_t num_tokens, SlotHomes& homes);

}  // namespace moekit::prepare
