// Rows travel as with all2all and are spread over blocks by expert on arrival (Batched layout).
// Counts come first, so that an expert's capacity is shared by whoever has rows for it, and no
// symmetric heap is needed.
#include "prepare/distributed.h"
#include "prepare/members.h"

namespace moekit::prepare {

const PrepareFinalize& all2all_batched_member() {
  static const Distributed member("all2all_batched", Spread::needed_rows, RowsLayout::batched);
  return member;
}

}  // namespace moekit::prepare
