// Problems: the SPEC grammar for programs, and layers made from it.
#include "moekit/problems.h"

#include "api/bench_routing.h"
#include "api/doctor.h"
#include "base/check.h"
#include "base/thread_pool.h"
#include "engine/plan.h"
#include "engine/synthetic.h"
#include "problem/canonical_layer.h"
#include "problem/spec.h"

namespace moekit {
namespace {

ProblemSpec to_spec(const LayerProblem& problem) {
  ProblemSpec spec;
  spec.name = problem.name;
  spec.config = problem.config;
  spec.tokens = problem.tokens;
  // The grammar has no word for a file of ids: the default stands in.
  if (api::is_pattern(problem.routing)) spec.routing = parse_routing(problem.routing);
  spec.placement = problem.placement;
  return spec;
}

LayerProblem from_spec(const ProblemSpec& spec) {
  return {spec.name, spec.config, spec.tokens, spell(spec.routing), spec.placement};
}

LayerSource source_of(const LayerProblem& problem, std::shared_ptr<const CanonicalLayer> layer) {
  LayerSource source;
  source.config = layer->config;
  source.family = layer->family;
  source.hash_rows = layer->router.hash_rows;
  source.canonical = std::move(layer);
  source.model = spec_of(problem);
  return source;
}

}  // namespace

LayerProblem parse_problem(const std::string& spec) { return from_spec(parse_spec(spec)); }

std::string spec_of(const LayerProblem& problem) {
  ProblemSpec spec = to_spec(problem);
  try {
    return to_string(spec);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::unsupported) throw;
  }
  // Checkpoints may route in a way that the grammar has no word for. Ids are given where a SPEC is
  // planned or timed, so the default recipe stands in.
  spec.config.router = RouterSpec{.renormalize = Renormalize::sum};
  return to_string(spec);
}

std::vector<std::pair<std::string, std::string>> list_problems() {
  std::vector<std::pair<std::string, std::string>> list;
  for (const ProblemSpec& spec : named_problems()) {
    ProblemSpec anonymous = spec;
    anonymous.name.clear();
    list.emplace_back(spec.name, to_string(anonymous));
  }
  return list;
}

std::string describe_problem_keys() { return describe_spec_keys(); }

LayerSource hollow_source(const LayerProblem& problem) {
  return source_of(problem, std::make_shared<CanonicalLayer>(engine::hollow_layer(problem.config)));
}

LayerSource synthetic_source(const LayerProblem& problem, uint64_t seed, int num_threads) {
  const int64_t needed = engine::synthetic_expert_bytes(problem.config);
  const int64_t available = api::look_at_memory().available_bytes;
  MOEKIT_CHECK_AS(ErrorCode::out_of_memory, available == 0 || needed < available,
                  "random weights of {}: expected {} bytes of memory, {} are available; use a "
                  "smaller problem",
                  spec_of(problem), needed, available);
  ThreadPool threads(num_threads > 0 ? num_threads : usable_cpus());
  return source_of(problem, engine::make_synthetic_layer(to_spec(problem), seed, threads));
}

}  // namespace moekit
