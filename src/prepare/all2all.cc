// A row travels once to each rank that has an expert for it, whatever the number of its slots
// there.
#include "prepare/distributed.h"
#include "prepare/members.h"

namespace moekit::prepare {

const PrepareFinalize& all2all_member() {
  static const Distributed member("all2all", Spread::needed_rows, RowsLayout::standard);
  return member;
}

}  // namespace moekit::prepare
