#include "comm/subgroup.h"

#include <algorithm>

namespace moekit::comm {

int share_of_nodes(int rank, int num_ranks, int num_nodes) {
  return static_cast<int>(static_cast<int64_t>(rank) * num_nodes / num_ranks);
}

Subgroup choose_subgroup(Communicator& group, int color, int key, CallSite site) {
  struct Choice {
    int32_t color, key;
  };
  const Choice mine{color, key};
  std::vector<Choice> all(static_cast<size_t>(group.size()));
  group.allgather(&mine, all.data(), sizeof(Choice), site);
  Subgroup subgroup;
  for (int r = 0; r < group.size(); ++r) {
    if (color >= 0 && all[static_cast<size_t>(r)].color == color) subgroup.ranks.push_back(r);
  }
  std::stable_sort(subgroup.ranks.begin(), subgroup.ranks.end(), [&](int a, int b) {
    return all[static_cast<size_t>(a)].key < all[static_cast<size_t>(b)].key;
  });
  const auto self = std::find(subgroup.ranks.begin(), subgroup.ranks.end(), group.rank());
  subgroup.rank = static_cast<int>(self - subgroup.ranks.begin());
  std::vector<int> known;
  for (const int r : subgroup.ranks) {
    auto found = std::find(known.begin(), known.end(), group.node_of(r));
    if (found == known.end()) found = known.insert(known.end(), group.node_of(r));
    subgroup.nodes.push_back(static_cast<int>(found - known.begin()));
  }
  return subgroup;
}

}  // namespace moekit::comm
