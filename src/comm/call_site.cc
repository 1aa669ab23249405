#include <fmt/format.h>

#include "comm/communicator.h"

namespace moekit::comm {

std::string to_string(const CallSite& site) {
  if (site.layer < 0) return fmt::format("phase {}, call {}", site.phase, site.call);
  return fmt::format("phase {}, layer {}, call {}", site.phase, site.layer, site.call);
}

}  // namespace moekit::comm
