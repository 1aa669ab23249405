// The reference router.
#pragma once

#include "router/router.h"

namespace moekit::router {

const Router& ref_router();

}  // namespace moekit::router
