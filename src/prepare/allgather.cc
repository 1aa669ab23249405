// Every rank gets every row and serves what its experts have to serve: one block a rank and no
// packing by receiver, at the price of rows that nobody needs. For few ranks or large top_k.
#include "prepare/distributed.h"
#include "prepare/members.h"

namespace moekit::prepare {

const PrepareFinalize& allgather_member() {
  static const Distributed member("allgather", Spread::all_rows, RowsLayout::standard);
  return member;
}

}  // namespace moekit::prepare
