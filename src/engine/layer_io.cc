// LayerRuntime's edges: checks of the caller's tensors, conversions of input, routing and output.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "engine/layer_runtime.h"
#include "engine/quantized_hidden.h"
#include "tensor/convert.h"
#include "tensor/view_check.h"

namespace moekit::engine {
namespace {

bool is_real(DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f16; }

/// First and last byte that a view touches.
std::pair<const char*, const char*> extent(const TensorView& v) {
  int64_t low = 0, high = 0;
  for (int i = 0; i < v.rank; ++i) {
    const int64_t span = (v.shape[i] - 1) * v.strides[i];
    (span < 0 ? low : high) += span;
  }
  const int bits = bits_of(v.dtype);
  const char* data = static_cast<const char*>(v.data);
  return {data + low * bits / 8, data + (high * bits + bits + 7) / 8};
}

bool overlap(const TensorView& a, const TensorView& b) {
  if (a.data == nullptr || b.data == nullptr || a.num_elements() == 0 || b.num_elements() == 0)
    return false;
  const auto [a_first, a_last] = extent(a);
  const auto [b_first, b_last] = extent(b);
  return a_first < b_last && b_first < a_last;
}

void check_matrix(const TensorView& v, const char* name, int64_t rows, int64_t cols,
                  bool dtype_fits, const char* dtypes) {
  MOEKIT_CHECK(v.device.type == DeviceType::cpu,
               "{}: expected host memory, as the plan runs on the CPU or hidden lies there; the "
               "tensor lies on another device",
               name);
  MOEKIT_CHECK(dtype_fits, "{} must be {}, got {}", name, dtypes, to_string(v.dtype));
  MOEKIT_CHECK(v.rank == 2 && v.shape[0] == rows && v.shape[1] == cols,
               "{} must be [{}, {}], got rank {} [{}, {}]", name, rows, cols, v.rank,
               v.rank > 0 ? v.shape[0] : 0, v.rank > 1 ? v.shape[1] : 0);
  MOEKIT_CHECK(v.data != nullptr || rows * cols == 0, "{} has no data", name);
}

/// Contiguous optional result, or empty.
void check_result(const TensorView& v, const char* name, int64_t rows, int64_t cols, DType dtype) {
  if (v.empty()) return;
  check_matrix(v, name, rows, cols, v.dtype == dtype, to_string(dtype));
  MOEKIT_CHECK(v.is_contiguous(), "{} must be contiguous", name);
}

int64_t integer_at(const TensorView& v, int64_t i, int64_t j) {
  const int64_t offset = i * v.strides[0] + j * (v.rank > 1 ? v.strides[1] : 0);
  return v.dtype == DType::i64 ? static_cast<const int64_t*>(v.data)[offset]
                               : static_cast<const int32_t*>(v.data)[offset];
}

}  // namespace

int64_t LayerRuntime::check_tokens(const TensorView& hidden) const {
  const Problem& problem = plan_->problem;
  MOEKIT_CHECK(hidden.rank == 2, "hidden must be [T, {}], got rank {}", problem.config.hidden,
               hidden.rank);
  const int64_t tokens = hidden.shape[0];
  MOEKIT_CHECK(tokens <= problem.max_tokens,
               "the call has {} tokens, the plan was made for at most {}", tokens,
               problem.max_tokens);
  return tokens;
}

void LayerRuntime::check_views(const LayerArgs& args) {
  check_view(args.hidden, "hidden");
  check_view(args.hidden_scales, "hidden_scales");
  check_view(args.hidden_global, "hidden_global");
  check_view(args.router_input, "router_input");
  check_view(args.topk_ids, "topk_ids");
  check_view(args.topk_weights, "topk_weights");
  check_view(args.token_ids, "token_ids");
  check_written_view(args.output, "output");
  check_written_view(args.out_topk_ids, "out_topk_ids");
  check_written_view(args.out_topk_weights, "out_topk_weights");
  check_written_view(args.out_router_logits, "out_router_logits");
  check_written_view(args.out_routed, "out_routed");
}

void LayerRuntime::check_args(const LayerArgs& args) const {
  check_views(args);
  const Problem& problem = plan_->problem;
  const MoeConfig& config = problem.config;
  const TensorView& hidden = args.hidden;
  const int64_t tokens = check_tokens(hidden);
  const bool quantized = is_quantized_hidden(hidden);
  if (quantized) {
    MOEKIT_CHECK_AS(
        ErrorCode::unsupported, config.latent == 0,
        "hidden can't arrive quantized: the layer projects it to a latent space of {} first",
        config.latent);
    MOEKIT_CHECK_AS(ErrorCode::unsupported, device_ == nullptr,
                    "hidden can't arrive quantized: experts on a device read f32 or bf16 rows");
    check_quantized_hidden(args, RowFormat::of(config.gate_up_input.format, config.routed_width()),
                           tokens);
  } else {
    check_matrix(hidden, "hidden", tokens, config.hidden, is_real(hidden.dtype),
                 "f32, bf16 or f16");
    MOEKIT_CHECK(args.hidden_scales.empty() && args.hidden_global.empty(),
                 "hidden_scales and hidden_global belong to codes, but hidden arrives in {}; leave "
                 "them out",
                 to_string(hidden.dtype));
  }
  const bool needs_values = args.topk_ids.empty() || config.shared.inter > 0;
  if (!args.router_input.empty()) {
    check_matrix(args.router_input, "router_input", tokens, config.hidden,
                 is_real(args.router_input.dtype), "f32, bf16 or f16");
  } else {
    MOEKIT_CHECK(
        !quantized || !needs_values,
        "hidden is quantized: pass router_input [T, {}] for the router and the shared experts",
        config.hidden);
  }
  MOEKIT_CHECK(args.topk_ids.empty() == args.topk_weights.empty(),
               "topk_ids and topk_weights come together");
  if (args.topk_ids.empty()) {
    MOEKIT_CHECK(!router_.empty(),
                 "the layer has no router weights: pass topk_ids and topk_weights");
    MOEKIT_CHECK(!config.router.hash_routing || !args.token_ids.empty(),
                 "this layer routes by token id: pass token_ids [T]");
  } else {
    const DType ids = args.topk_ids.dtype;
    check_matrix(args.topk_ids, "topk_ids", tokens, config.top_k,
                 ids == DType::i32 || ids == DType::i64, "i32 or i64");
    check_matrix(args.topk_weights, "topk_weights", tokens, config.top_k,
                 args.topk_weights.dtype == DType::f32, "f32");
  }
  if (!args.token_ids.empty()) {
    const DType ids = args.token_ids.dtype;
    MOEKIT_CHECK((ids == DType::i32 || ids == DType::i64) && args.token_ids.rank == 1 &&
                     args.token_ids.shape[0] == tokens,
                 "token_ids must be i32 or i64 [{}]", tokens);
  }
  check_matrix(args.output, "output", tokens, config.hidden, is_real(args.output.dtype),
               "f32, bf16 or f16");
  check_result(args.out_topk_ids, "out_topk_ids", tokens, config.top_k, DType::i32);
  check_result(args.out_topk_weights, "out_topk_weights", tokens, config.top_k, DType::f32);
  check_result(args.out_router_logits, "out_router_logits", tokens, config.num_experts, DType::f32);
  check_result(args.out_routed, "out_routed", tokens, config.hidden, DType::f32);
  MOEKIT_CHECK(args.out_router_logits.empty() || args.topk_ids.empty(),
               "out_router_logits: the call brings its own topk_ids, no logits are computed");
  const TensorView* inputs[] = {&args.hidden,       &args.hidden_scales, &args.hidden_global,
                                &args.router_input, &args.topk_ids,      &args.topk_weights,
                                &args.token_ids};
  for (const TensorView* input : inputs) {
    MOEKIT_CHECK(!overlap(args.output, *input),
                 "output overlaps an input of the same call; pass separate memory");
  }
}

/// fp32 rows for the router, the shared experts and the latent projection.
void LayerRuntime::load_input(CallState& state) const {
  const MoeConfig& config = plan_->problem.config;
  const LayerArgs& args = state.args;
  const bool needed = args.topk_ids.empty() || config.shared.inter > 0 || config.latent > 0;
  if (!needed) return;
  const TensorView& source = args.router_input.empty() ? args.hidden : args.router_input;
  if (source.dtype == DType::f32 && source.strides[1] == 1) {
    state.x = static_cast<const float*>(source.data);
    state.x_stride = source.strides[0];
    return;
  }
  const trace::Span span(trace::Stage::input);
  float* x = regions_.input.in<float>(state.buffer.data());
  auto load = [&](int64_t t, int) { load_row_f32(source, t, x + t * config.hidden); };
  state.threads.parallel_for(source.shape[0], load);
  state.x = x;
  state.x_stride = config.hidden;
}

void LayerRuntime::load_token_ids(CallState& state) const {
  const TensorView& ids = state.args.token_ids;
  if (ids.empty()) return;
  auto* out = regions_.token_ids.in<int64_t>(state.buffer.data());
  for (int64_t t = 0; t < ids.shape[0]; ++t) out[t] = integer_at(ids, t, 0);
}

/// Precomputed ids and weights. Ids beyond int32 become the nearest int32, which no layer has:
/// prepare reports or drops them with all others that are out of range, on every rank alike.
void LayerRuntime::take_routing(CallState& state) const {
  const LayerArgs& args = state.args;
  const int64_t tokens = args.hidden.shape[0];
  const int64_t top_k = plan_->problem.config.top_k;
  auto* ids = regions_.ids.in<GlobalExpert>(state.buffer.data());
  auto* weights = regions_.weights.in<float>(state.buffer.data());
  const auto* given = static_cast<const float*>(args.topk_weights.data);
  constexpr int64_t kLowest = std::numeric_limits<int32_t>::min(),
                    kHighest = std::numeric_limits<int32_t>::max();
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t id = std::clamp(integer_at(args.topk_ids, t, j), kLowest, kHighest);
      ids[t * top_k + j] = GlobalExpert{static_cast<int32_t>(id)};
      weights[t * top_k + j] =
          given[t * args.topk_weights.strides[0] + j * args.topk_weights.strides[1]];
    }
  }
  state.call.routing = {tokens, top_k, ids, weights};
}

/// What the experts see: latent rows, the caller's rows, or records of quantized rows.
void LayerRuntime::set_rows(CallState& state) const {
  const MoeConfig& config = plan_->problem.config;
  const LayerArgs& args = state.args;
  const int64_t tokens = args.hidden.shape[0];
  std::byte* base = state.buffer.data();
  state.call.rows = args.hidden;
  if (config.latent > 0) {
    const trace::Span span(trace::Stage::latent_in);
    float* latent = regions_.latent.in<float>(base);
    latent_in_.run(state.x, state.x_stride, tokens, latent, base + regions_.scratch.offset,
                   state.threads);
    state.call.rows = TensorView::contiguous(latent, DType::f32, {tokens, config.latent});
  } else if (is_quantized_hidden(args.hidden)) {
    const RowFormat format = RowFormat::of(config.gate_up_input.format, config.routed_width());
    std::byte* records = base + regions_.records.offset;
    gather_records(args, format, tokens, records);
    state.call.records = records;
  }
}

void LayerRuntime::write_routing(const CallState& state) const {
  const LayerArgs& args = state.args;
  const RoutingTable& routing = state.call.routing;
  const int64_t slots = routing.num_tokens * routing.top_k;
  if (slots == 0) return;
  if (!args.out_topk_ids.empty())
    std::memcpy(args.out_topk_ids.data, routing.ids, slots * sizeof(int32_t));
  if (!args.out_topk_weights.empty()) {
    std::memcpy(args.out_topk_weights.data, routing.weights, slots * sizeof(float));
  }
  if (!args.out_router_logits.empty()) {
    std::memcpy(args.out_router_logits.data, regions_.logits.in<float>(state.buffer.data()),
                routing.num_tokens * plan_->problem.config.num_experts * sizeof(float));
  }
}

float* LayerRuntime::routed_rows(const CallState& state) const {
  const TensorView& output = state.args.output;
  // It is no input's memory (check_args), so it may be written before the call is over. Not with
  // shared experts: a call that fails leaves whole rows or none of a row.
  const bool aligned = reinterpret_cast<uintptr_t>(output.data) % alignof(float) == 0;
  const bool fits = output.dtype == DType::f32 && output.is_contiguous() && aligned &&
                    plan_->problem.config.latent == 0 && !has_shared() && !tp_.on();
  return fits ? static_cast<float*>(output.data) : regions_.routed.in<float>(state.buffer.data());
}

/// routed rows (back from the latent space) + shared rows, rounded once to the output's type.
void LayerRuntime::write_output(CallState& state) const {
  const MoeConfig& config = plan_->problem.config;
  const LayerArgs& args = state.args;
  const int64_t tokens = args.hidden.shape[0];
  std::byte* base = state.buffer.data();
  float* routed = state.call.routed;
  if (config.latent > 0) {
    const trace::Span span(trace::Stage::latent_out);
    float* back = regions_.hidden.in<float>(base);
    latent_out_.run(routed, config.latent, tokens, back, base + regions_.scratch.offset,
                    state.threads);
    routed = back;
  }
  const trace::Span span(trace::Stage::output);
  if (!args.out_routed.empty() && tokens > 0) {
    std::memcpy(args.out_routed.data, routed, tokens * config.hidden * sizeof(float));
  }
  if (routed == args.output.data) return;
  const float* shared = has_shared() ? regions_.shared.in<float>(base) : nullptr;
  auto store = [&](int64_t t, int) {
    float* row = routed + t * config.hidden;
    if (shared != nullptr) {
      for (int64_t i = 0; i < config.hidden; ++i) row[i] += shared[t * config.hidden + i];
    }
    store_row_f32(args.output, t, row);
  };
  state.threads.parallel_for(tokens, store);
}

}  // namespace moekit::engine
