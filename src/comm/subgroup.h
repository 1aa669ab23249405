// Which ranks form a subgroup, and on which nodes ranks lie: the same for every transport.
#pragma once

#include <vector>

#include "comm/communicator.h"

namespace moekit::comm {

/// The node of a rank where ranks lie on nodes in contiguous shares.
int share_of_nodes(int rank, int num_ranks, int num_nodes);

struct Subgroup {
  std::vector<int> ranks;  ///< of the group, in the order of the subgroup
  std::vector<int> nodes;  ///< of each, counted from 0 in that order
  int rank = 0;            ///< of this rank in the subgroup
};

/// Who gives the same color, as Communicator::split defines it. Collective; empty below zero.
Subgroup choose_subgroup(Communicator& group, int color, int key, CallSite site);

}  // namespace moekit::comm
