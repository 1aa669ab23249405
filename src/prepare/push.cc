// Rows straight into the memory of the ranks that serve them, in one phase: no counts are exchanged
// first.
#include "prepare/members.h"
#include "prepare/pushed.h"

namespace moekit::prepare {

const PrepareFinalize& push_member() {
  static const Pushed member("push", RowsLayout::standard);
  return member;
}

}  // namespace moekit::prepare
