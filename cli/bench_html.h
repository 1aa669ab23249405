// The report of `moekit bench --html`: one self-contained page with plots and the table, made from
// the same JSON objects that --json prints.
#pragma once

#include <string>
#include <vector>

#include "json_writers.h"

namespace moekit::cli {

/// `points` holds one object a point, in the order of their token counts; not empty.
std::string bench_html(const OrderedJson& machine, const std::vector<OrderedJson>& points);

}  // namespace moekit::cli
