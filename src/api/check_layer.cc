// check_layer: every experts member that takes a layer, against the reference and against golden
// rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "engine/plan.h"
#include "moekit/tools.h"
#include "problem/error_bound.h"

namespace moekit {
namespace {

constexpr const char* kReference = "ref";

/// Half the largest relative distance between neighbours: the most by which rounding to the format
/// changes a normal value, relative to itself.
double half_step(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::f32: return 0;
    case ActivationFormat::bf16: return 0x1p-8;
    case ActivationFormat::fp8_tensor:
    case ActivationFormat::fp8_token:
    case ActivationFormat::fp8_block:
    case ActivationFormat::mxfp8: return 0x1p-4;
    case ActivationFormat::mxfp4:
    case ActivationFormat::nvfp4: return 0x1p-2;
  }
  return 0;
}

/// Golden rows may hold the layer's exact value or the value after its quantization chain. Three
/// roundings separate the two: of the input as gate and up read it, and of the intermediate; each
/// moves a row by half a step at most, beside the difference of two fp32 evaluations. No bound
/// where a static scale may saturate.
std::optional<double> golden_bound_of(const MoeConfig& config, double bound) {
  if (config.gate_up_input.static_scale || config.down_input.static_scale) return std::nullopt;
  double rounding =
      2 * half_step(config.gate_up_input.format) + half_step(config.down_input.format);
  if (config.shared.inter > 0) {
    if (config.shared.gate_up_input.static_scale || config.shared.down_input.static_scale) {
      return std::nullopt;
    }
    rounding = std::max(rounding, 2 * half_step(config.shared.gate_up_input.format) +
                                      half_step(config.shared.down_input.format));
  }
  return bound + rounding;
}

bool within(const Errors& errors, double bound) {
  return errors.nonfinite_mismatches == 0 && errors.worst_row_rms <= bound;
}

std::vector<float> run_backend(const LayerSource& source, PlanOptions options,
                               const std::string& backend, int num_ranks,
                               const RankedInputs& inputs) {
  options.backend = backend;
  const RankedLayer layer(source, options, num_ranks, inputs.hidden.shape[0]);
  RankedOutputs outputs;
  layer.run(inputs, outputs, 1, 0, false);
  return std::move(outputs.output);
}

MoeConfig resolved_config(const LayerSource& source, PlanOptions options) {
  options.max_tokens = 1;
  options.placement = "linear";
  options.tp = 1;
  return engine::make_problem(*source.canonical, options).config;
}

}  // namespace

std::vector<CheckResult> check_layer(const LayerSource& source, const PlanOptions& options,
                                     int num_ranks, const RankedInputs& inputs,
                                     const TensorView& golden,
                                     const std::function<void(const std::string&)>& progress) {
  const int64_t num_tokens = inputs.hidden.shape[0];
  const int64_t width = source.config.hidden;
  const int64_t per_rank = std::max<int64_t>(1, (num_tokens + num_ranks - 1) / num_ranks);
  const MoeConfig config = resolved_config(source, options);
  const bool on_gpu = options.device.type == DeviceType::cuda;
  const double bound = on_gpu ? gpu_row_error_bound(config, options.combine_dtype)
                              : row_error_bound(config, options.combine_dtype);
  const Explanation explanation = explain_plan(source, options, num_ranks, per_rank);
  MOEKIT_CHECK_AS(ErrorCode::unsupported, options.backend.empty() || explanation.chosen,
                  "--backend {} does not take this layer: {}", options.backend,
                  refusal_of(explanation, options.backend));

  auto tell = [&](const std::string& text) {
    if (progress) progress(text);
  };
  tell("reference");
  PlanOptions on_cpu = options;
  on_cpu.device = {};
  const std::vector<float> reference = run_backend(source, on_cpu, kReference, num_ranks, inputs);
  std::vector<CheckResult> results;
  for (const Candidate& candidate : explanation.candidates) {
    if (candidate.kind != "experts") continue;
    if (!options.backend.empty() && candidate.name != options.backend) continue;
    CheckResult result;
    result.backend = candidate.name;
    result.supported = candidate.supported;
    result.reasons = candidate.reasons;
    result.bound = bound;
    if (candidate.supported) {
      tell(candidate.name);
      const bool is_reference = candidate.name == kReference;
      const std::vector<float> output =
          is_reference ? reference
                       : run_backend(source, options, candidate.name, num_ranks, inputs);
      result.errors = compare(output.data(), reference.data(), num_tokens, width);
      result.passed = within(result.errors, bound);
      if (!golden.empty()) {
        result.golden_errors =
            compare(output.data(), static_cast<const float*>(golden.data), num_tokens, width);
        result.golden_bound = golden_bound_of(config, bound);
        if (result.golden_bound && !within(*result.golden_errors, *result.golden_bound)) {
          result.passed = false;
        }
      }
    }
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace moekit
