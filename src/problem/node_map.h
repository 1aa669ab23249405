// NodeMap: which ranks share a node, however they are spread over nodes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace moekit {

/// Nodes are numbered 0, 1, ... in the order of their first ranks. They need be neither contiguous
/// nor of one size. A default one has all ranks, however many, on one node. A copy allocates
/// nothing.
class NodeMap {
 public:
  NodeMap() = default;
  /// label_of[r] is any number that ranks of one node have in common.
  explicit NodeMap(std::span<const int> label_of) {
    auto lists = std::make_shared<Lists>();
    std::vector<int> labels;
    for (size_t rank = 0; rank < label_of.size(); ++rank) {
      const auto found = std::find(labels.begin(), labels.end(), label_of[rank]);
      const auto node = static_cast<size_t>(found - labels.begin());
      if (found == labels.end()) {
        labels.push_back(label_of[rank]);
        lists->ranks.emplace_back();
      }
      lists->node.push_back(static_cast<int>(node));
      lists->place.push_back(static_cast<int>(lists->ranks[node].size()));
      lists->ranks[node].push_back(static_cast<int>(rank));
    }
    lists_ = std::move(lists);
  }
  /// Contiguous shares of the ranks, 1 <= num_nodes <= num_ranks.
  static NodeMap shares(int num_ranks, int num_nodes) {
    std::vector<int> nodes;
    for (int r = 0; r < num_ranks; ++r) {
      nodes.push_back(static_cast<int>(int64_t{r} * num_nodes / num_ranks));
    }
    return NodeMap(nodes);
  }

  int num_nodes() const { return lists_ == nullptr ? 1 : static_cast<int>(lists_->ranks.size()); }
  int node_of(int rank) const { return lists_ == nullptr ? 0 : lists_->node[index(rank)]; }
  /// How many ranks of its node come before the rank. Not for a default map.
  int place_of(int rank) const { return lists_->place[index(rank)]; }
  /// A node's ranks, ascending. Not for a default map.
  std::span<const int> ranks_of(int node) const { return lists_->ranks[index(node)]; }

 private:
  struct Lists {
    std::vector<int> node, place;         // by rank
    std::vector<std::vector<int>> ranks;  // by node
  };
  static size_t index(int i) { return static_cast<size_t>(i); }

  std::shared_ptr<const Lists> lists_;
};

}  // namespace moekit
