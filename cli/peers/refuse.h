// A peer that can't be used here says why.
#pragma once

#include <string>

#include "moekit/error.h"

namespace moekit::cli {

/// Throws unsupported.
[[noreturn]] inline void refuse(const std::string& reason) {
  throw Error(ErrorCode::unsupported, reason);
}

}  // namespace moekit::cli
