// The workspace of what surrounds the modular kernel: routing, latent projections, shared experts.
#include <algorithm>

#include "engine/dense_matrix.h"
#include "engine/plan.h"
#include "engine/shared_expert.h"

namespace moekit::engine {
namespace {

/// Scratch that the steps around the kernel use in turn.
int64_t scratch_bytes(const CanonicalLayer& layer, const Plan& plan) {
  const MoeConfig& config = plan.problem.config;
  const int64_t tokens = plan.problem.max_tokens;
  const int threads = plan.num_threads;
  int64_t scratch =
      layer_router().workspace_bytes(config.router, config.num_experts, config.top_k, threads);
  auto add_dense = [&](const StoredMatrix& weight) {
    const int64_t bytes =
        dense_member(weight).workspace_bytes(weight, kDenseInput, tokens, threads);
    scratch = std::max(scratch, bytes);
  };
  // Without router weights only precomputed ids can come.
  if (layer.router.weight.rows > 0) add_dense(layer.router.weight);
  if (config.latent > 0) {
    add_dense(layer.latent_in);
    add_dense(layer.latent_out);
  }
  if (config.shared.inter > 0) {
    scratch = std::max(scratch, shared_mlp(layer, config).workspace_bytes(tokens, threads));
    if (config.shared.sigmoid_gate) add_dense(layer.shared_gate);
  }
  return scratch;
}

}  // namespace

const router::Router& layer_router() { return *router::registry().front(); }

void lay_out_layer(const CanonicalLayer& layer, Plan& plan) {
  const MoeConfig& config = plan.problem.config;
  const int64_t tokens = plan.problem.max_tokens;
  WorkspaceLayout& workspace = plan.workspace;
  LayerRegions& regions = plan.layer_regions;
  auto floats = [&](int64_t width) {
    return workspace.add(checked_mul(tokens, width, "token rows"), sizeof(float));
  };
  regions.input = floats(config.hidden);
  if (is_quantized(config.gate_up_input.format)) {
    const RowFormat format = RowFormat::of(config.gate_up_input.format, config.routed_width());
    regions.records = workspace.add(tokens, format.record_bytes);
  }
  regions.logits = floats(config.num_experts);
  regions.ids = workspace.add(checked_mul(tokens, config.top_k, "token ids"), sizeof(GlobalExpert));
  regions.weights = floats(config.top_k);
  regions.token_ids = workspace.add(tokens, sizeof(int64_t));
  regions.routed = floats(config.routed_width());
  if (config.latent > 0) {
    regions.latent = floats(config.latent);
    regions.hidden = floats(config.hidden);
  }
  // A later slice can't see whether the first one has a shared expert, whose rows it would receive.
  if (config.shared.inter > 0 || plan.problem.tp_rank > 0) regions.shared = floats(config.hidden);
  regions.slices = lay_out_slices(workspace, plan.problem.tp_size, tokens, config.routed_width());
  if (config.shared.sigmoid_gate) regions.gate = floats(1);
  regions.scratch = workspace.add(scratch_bytes(layer, plan), 1);
}

}  // namespace moekit::engine
