// The ordered list of routers: best first, the reference last.
#include <array>

#include "router/cpu/cpu_router.h"
#include "router/ref/ref_router.h"
#include "router/router.h"

namespace moekit::router {

std::span<const Router* const> registry() {
  static const std::array<const Router*, 2> routers{&cpu_router(), &ref_router()};
  return routers;
}

}  // namespace moekit::router
