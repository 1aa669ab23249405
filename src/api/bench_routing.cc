#include "api/bench_routing.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "moekit/tools.h"
#include "problem/spec.h"

namespace moekit::api {
namespace {

engine::SyntheticRouting routing_of_file(const std::string& name, const RoutingShape& shape) {
  const OwnedTensor file = load_routing(name, shape.top_k, shape.num_experts);
  const int64_t rows = file.view.shape[0];
  MOEKIT_CHECK(rows > 0, "--routing {}: expected at least one row of ids, got none", name);
  engine::SyntheticRouting routing;
  const int64_t slots = checked_mul(shape.num_tokens, shape.top_k, "routing slots");
  routing.ids.resize(static_cast<size_t>(slots));
  routing.weights.assign(static_cast<size_t>(slots), 1.0f / static_cast<float>(shape.top_k));
  const auto* from = static_cast<const int32_t*>(file.view.data);
  for (int64_t t = 0; t < shape.num_tokens; ++t) {
    std::copy_n(from + (t % rows) * shape.top_k, shape.top_k, routing.ids.data() + t * shape.top_k);
  }
  return routing;
}

}  // namespace

bool is_pattern(const std::string& name) {
  return name == "uniform" || name == "hot" || name == "one_rank" || name == "holes" ||
         name.starts_with("zipf");
}

std::vector<engine::SyntheticRouting> make_routings(const std::string& name,
                                                    const RoutingShape& shape, uint64_t seed,
                                                    int count) {
  std::vector<engine::SyntheticRouting> routings;
  if (!is_pattern(name)) {
    routings.push_back(routing_of_file(name, shape));
    return routings;
  }
  const RoutingPattern pattern = parse_routing(name);
  for (int i = 0; i < count; ++i) {
    routings.push_back(engine::make_routing(pattern, shape.num_tokens, shape.num_experts,
                                            shape.top_k, seed, shape.first_rank_experts,
                                            i * shape.num_tokens));
  }
  return routings;
}

int64_t count_active(const std::vector<int32_t>& ids, int64_t num_experts) {
  std::vector<bool> seen(static_cast<size_t>(num_experts), false);
  for (int32_t id : ids) {
    if (id >= 0 && id < num_experts) seen[static_cast<size_t>(id)] = true;
  }
  return std::count(seen.begin(), seen.end(), true);
}

}  // namespace moekit::api
