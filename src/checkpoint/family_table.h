// The table of model families. Rows are data: see families.h for what a column means.
#pragma once

#include <span>

#include "checkpoint/families.h"

namespace moekit::checkpoint {

std::span<const Family> families();

}  // namespace moekit::checkpoint
