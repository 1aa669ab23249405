// Rows by expert in blocks of fixed capacity (Batched layout), for experts that want regular shapes
// whatever the routing, in one phase without a count exchange. A row travels once to a rank; the
// blocks are lists of where rows lie, so that none is copied on arrival.
#include "prepare/members.h"
#include "prepare/pushed.h"

namespace moekit::prepare {

const PrepareFinalize& low_latency_member() {
  static const Pushed member("low_latency", RowsLayout::batched);
  return member;
}

}  // namespace moekit::prepare
