#include "support/run_layer.h"

#include "base/thread_pool.h"
#include "engine/synthetic.h"

namespace moekit::test {

LayerSource make_layer(const std::string& spec, uint64_t seed) {
  ThreadPool threads(2);
  LayerSource source;
  source.canonical =
      engine::make_synthetic_layer(parse_spec(spec), seed, threads, {.unlike_experts = true});
  source.config = source.canonical->config;
  source.model = spec;
  source.family = source.canonical->family;
  return source;
}

std::vector<float> make_rows(const LayerSource& layer, int64_t tokens, uint64_t seed) {
  return engine::make_hidden(tokens, layer.config.hidden, seed);
}

std::vector<float> run_layer(const LayerSource& layer, const PlanOptions& options, int num_ranks,
                             const std::vector<float>& rows) {
  const int64_t hidden = layer.config.hidden;
  const int64_t tokens = static_cast<int64_t>(rows.size()) / hidden;
  const RankedLayer ranks(layer, options, num_ranks, tokens);
  RankedInputs inputs;
  inputs.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, hidden});
  RankedOutputs outputs;
  ranks.run(inputs, outputs);
  return outputs.output;
}

PlanOptions options_for(const std::string& backend, int num_threads) {
  PlanOptions options;
  options.backend = backend;
  options.num_threads = num_threads;
  return options;
}

double worst_row(const std::vector<float>& y, const std::vector<float>& r, int64_t width) {
  return compare(y.data(), r.data(), static_cast<int64_t>(r.size()) / width, width).worst_row_rms;
}

}  // namespace moekit::test
