// The only reader of environment variables. Read at plan time or first use, never while a layer
// runs.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace moekit {

/// Value of `name`, or "" when it is unset.
std::string env(const char* name);

/// All variables whose name starts with `prefix`, sorted by name.
std::vector<std::pair<std::string, std::string>> env_with_prefix(const std::string& prefix);

}  // namespace moekit
