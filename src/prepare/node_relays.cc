#include "prepare/node_relays.h"

#include <algorithm>

#include "base/math.h"

namespace moekit::prepare {

int relay_of(const Problem& problem, int source, int server) {
  const NodeMap& nodes = problem.nodes;
  const int to = nodes.node_of(server);
  if (nodes.node_of(source) == to) return source;
  const std::span<const int> there = nodes.ranks_of(to);
  return there[static_cast<size_t>(nodes.place_of(source)) % there.size()];
}

int64_t max_relayed_sources(const Problem& problem) {
  const NodeMap& nodes = problem.nodes;
  const auto size = [&](int node) { return static_cast<int64_t>(nodes.ranks_of(node).size()); };
  if (nodes.num_nodes() == 1) return 1;
  int64_t most = 1;
  for (int mine = 0; mine < nodes.num_nodes(); ++mine) {
    int64_t sources = 1;
    for (int other = 0; other < nodes.num_nodes(); ++other) {
      // Ranks of a larger node share the relays of a smaller one.
      if (other != mine) sources += ceil_div(size(other), size(mine));
    }
    most = std::max(most, sources);
  }
  return most;
}

void send_to_relays(const Problem& problem, int64_t num_tokens, SlotHomes& homes) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t j = 0; j < problem.config.top_k; ++j) {
      const int32_t server = homes.rank(t, j);
      if (server < 0) continue;
      homes.set(t, j, relay_of(problem, problem.rank, server), homes.expert(t, j));
    }
  }
}

}  // namespace moekit::prepare
