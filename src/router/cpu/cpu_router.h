// The fast router of the host.
#pragma once

#include "router/router.h"

namespace moekit::router {

const Router& cpu_router();

}  // namespace moekit::router
