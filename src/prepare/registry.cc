#include <array>

#include "prepare/members.h"

namespace moekit::prepare {

std::span<const PrepareFinalize* const> registry() {
  static const std::array members{
      &local_member(),           &local_batched_member(),
      &all2all_member(),         &push_member(),
      &allgather_member(),       &low_latency_member(),
      &all2all_batched_member(), &hierarchical_member(),
  };
  return members;
}

}  // namespace moekit::prepare
