#include "api/bench_work.h"

#include <algorithm>

#include "api/bench_routing.h"
#include "problem/canonical_layer.h"
#include "quant/weight_codec.h"

namespace moekit::api {

int64_t matrix_bytes(const WeightScheme& scheme, int64_t rows, int64_t cols) {
  const quant::EncodedLayout layout = quant::EncodedLayout::of(scheme, rows, cols);
  return rows * layout.code_row_bytes +
         layout.scale_rows * layout.scale_cols * bytes_of(layout.scale_unit);
}

int64_t expert_bytes(const MoeConfig& config) {
  const int64_t halves = config.activation.gated ? 2 : 1;
  return halves * matrix_bytes(config.gate_up_weights, config.inter, config.routed_width()) +
         matrix_bytes(config.down_weights, config.routed_width(), config.inter);
}

double flops_per_slot(const MoeConfig& config) {
  return 2.0 * static_cast<double>(config.activation.gated ? 3 : 2) *
         static_cast<double>(config.routed_width()) * static_cast<double>(config.inter);
}

LayerSource timed_source(const BenchRequest& request) {
  LayerSource source = request.source;
  if (request.include_shared || source.config.shared.inter == 0) return source;
  auto bare = std::make_shared<CanonicalLayer>(*source.canonical);
  bare->config.shared = SharedSpec{};
  bare->shared = StoredExpert{};
  bare->shared_gate = StoredMatrix{};
  source.config = bare->config;
  source.canonical = std::move(bare);
  return source;
}

Touched count_touched(const std::vector<std::vector<int32_t>>& all, int64_t num_experts) {
  Touched touched;
  std::vector<int32_t> joined;
  for (const auto& ids : all) {
    touched.active += static_cast<double>(count_active(ids, num_experts));
    touched.slots += static_cast<double>(
        std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id >= 0; }));
    joined.insert(joined.end(), ids.begin(), ids.end());
  }
  touched.active /= static_cast<double>(all.size());
  touched.slots /= static_cast<double>(all.size());
  touched.in_rotation = count_active(joined, num_experts);
  return touched;
}

}  // namespace moekit::api
