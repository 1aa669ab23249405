// LayerRuntime's calls whose tensors lie on the plan's device: the routed experts alone, enqueued
// on the caller's stream.
#include "base/check.h"
#include "engine/layer_runtime.h"

namespace moekit::engine {
namespace {

void check_tensor(const TensorView& v, const char* name, Device device, DType dtype, int64_t rows,
                  int64_t cols) {
  MOEKIT_CHECK(
      v.device == device, "{}: expected device {} of type {}, as hidden, got {} of type {}", name,
      device.index, static_cast<int>(device.type), v.device.index, static_cast<int>(v.device.type));
  MOEKIT_CHECK(v.dtype == dtype, "{} on a device must be {}, got {}", name, to_string(dtype),
               to_string(v.dtype));
  MOEKIT_CHECK(v.rank == 2 && v.shape[0] == rows && v.shape[1] == cols && v.is_contiguous(),
               "{} must be contiguous [{}, {}]", name, rows, cols);
  MOEKIT_CHECK(v.data != nullptr || rows * cols == 0, "{} has no data", name);
}

}  // namespace

void LayerRuntime::check_device_args(const LayerArgs& args) const {
  check_views(args);
  const Problem& problem = plan_->problem;
  const MoeConfig& config = problem.config;
  // What surrounds the routed experts runs on the host.
  MOEKIT_CHECK_AS(ErrorCode::unsupported, !has_shared() && config.latent == 0,
                  "tensors on a device: shared experts and latent projections run on the host; "
                  "pass host tensors");
  MOEKIT_CHECK_AS(ErrorCode::unsupported, problem.capacity.policy == CapacityPolicy::exact,
                  "tensors on a device: a bound on rows needs host tensors");
  MOEKIT_CHECK(!args.topk_ids.empty() && !args.topk_weights.empty(),
               "tensors on a device: the router runs on the host; pass topk_ids and topk_weights");
  MOEKIT_CHECK(args.out_topk_ids.empty() && args.out_topk_weights.empty() &&
                   args.out_router_logits.empty() && args.out_routed.empty(),
               "tensors on a device: output is the only result");
  const std::span<const int32_t> local = plan_->local_experts();
  const auto in_order = [&] {
    for (size_t e = 0; e < local.size(); ++e) {
      if (local[e] != static_cast<int32_t>(e)) return false;
    }
    return true;
  };
  MOEKIT_CHECK_AS(ErrorCode::unsupported, in_order(),
                  "tensors on a device: ids name experts in the order of the linear placement; "
                  "plan with it");
  const TensorView& hidden = args.hidden;
  const int64_t tokens = check_tokens(hidden);
  const Device device = problem.device;
  check_tensor(hidden, "hidden", device, DType::bf16, tokens, config.hidden);
  check_tensor(args.topk_ids, "topk_ids", device, DType::i32, tokens, config.top_k);
  check_tensor(args.topk_weights, "topk_weights", device, DType::f32, tokens, config.top_k);
  check_tensor(args.output, "output", device, DType::bf16, tokens, config.hidden);
}

void LayerRuntime::enqueue(CallState& state, void* stream) const {
  const LayerArgs& args = state.args;
  const int64_t tokens = args.hidden.shape[0];
  if (args.out_dropped != nullptr) *args.out_dropped = 0;
  if (args.skip_experts || tokens == 0) return;
  device::ExpertsCall call;
  call.num_tokens = tokens;
  call.rows = args.hidden.data;
  call.row_bytes = args.hidden.shape[1] * 2;
  call.ids = static_cast<const int32_t*>(args.topk_ids.data);
  call.weights = static_cast<const float*>(args.topk_weights.data);
  call.out = args.output.data;
  call.out_type = device::RowType::bf16;
  call.knobs = plan_->bucket_of(tokens).knobs;
  call.on_device = true;
  call.stream = stream;
  state.device->run(call);
}

}  // namespace moekit::engine
