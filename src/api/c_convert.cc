#include "api/c_convert.h"

#include <string>
#include <vector>

#include "tensor/view_check.h"

namespace moekit::c {
namespace {

/// A number from the caller as an enumerator; `last` is the greatest that exists.
template <typename E>
E enumerator(int32_t number, E last, const char* field) {
  MOEKIT_CHECK(number >= 0 && number <= static_cast<int32_t>(last),
               "{} is {}, expected 0 to {} (the enumerators of moekit/c_api.h)", field, number,
               static_cast<int32_t>(last));
  return static_cast<E>(number);
}

WeightScheme from_c(const moekit_weight_scheme& s, const char* field) {
  return {enumerator(s.format, WeightFormat::int8_channel, field), s.group, s.zero_points != 0};
}
moekit_weight_scheme to_c(const WeightScheme& s) {
  return {static_cast<int32_t>(s.format), s.group, s.zero_points};
}
ActivationScheme from_c(const moekit_input_scheme& s, const char* field) {
  return {enumerator(s.format, ActivationFormat::nvfp4, field), s.static_scale != 0,
          enumerator(s.sense, ScaleSense::divisor, field), s.ue8m0_scale != 0};
}
moekit_input_scheme to_c(const ActivationScheme& s) {
  return {static_cast<int32_t>(s.format), s.static_scale, static_cast<int32_t>(s.sense),
          s.ue8m0_scale};
}

RouterSpec router_from_c(const moekit_config& c) {
  RouterSpec r;
  r.scoring = enumerator(c.scoring, Scoring::logits, "scoring");
  r.select_on = enumerator(c.select_on, SelectOn::logits, "select_on");
  r.weight = enumerator(c.router_weight, RouterWeight::sigmoid_logit, "router_weight");
  r.renormalize = enumerator(c.renormalize, Renormalize::p_norm, "renormalize");
  r.epsilon = c.epsilon;
  r.p = c.p;
  r.scaling_factor = c.scaling_factor;
  r.num_groups = c.num_groups;
  r.topk_groups = c.topk_groups;
  r.group_score = enumerator(c.group_score, GroupScore::top2_sum, "group_score");
  r.has_logit_bias = c.has_logit_bias != 0;
  r.has_selection_bias = c.has_selection_bias != 0;
  r.hash_routing = c.hash_routing != 0;
  return r;
}

void router_to_c(const RouterSpec& r, moekit_config* c) {
  c->scoring = static_cast<int32_t>(r.scoring);
  c->select_on = static_cast<int32_t>(r.select_on);
  c->router_weight = static_cast<int32_t>(r.weight);
  c->renormalize = static_cast<int32_t>(r.renormalize);
  c->epsilon = r.epsilon;
  c->p = r.p;
  c->scaling_factor = r.scaling_factor;
  c->num_groups = r.num_groups;
  c->topk_groups = r.topk_groups;
  c->group_score = static_cast<int32_t>(r.group_score);
  c->has_logit_bias = r.has_logit_bias;
  c->has_selection_bias = r.has_selection_bias;
  c->hash_routing = r.hash_routing;
}

DType dtype_from_c(moekit_dtype t, const char* name) {
  const int bits = t.bits;
  switch (t.code) {
    case MOEKIT_DTYPE_INT:
      if (bits == 8) return DType::i8;
      if (bits == 16) return DType::i16;
      if (bits == 32) return DType::i32;
      if (bits == 64) return DType::i64;
      break;
    case MOEKIT_DTYPE_UINT:
      if (bits == 8) return DType::u8;
      if (bits == 16) return DType::u16;
      if (bits == 32) return DType::u32;
      if (bits == 64) return DType::u64;
      break;
    case MOEKIT_DTYPE_FLOAT:
      if (bits == 16) return DType::f16;
      if (bits == 32) return DType::f32;
      if (bits == 64) return DType::f64;
      break;
    case MOEKIT_DTYPE_BFLOAT:
      if (bits == 16) return DType::bf16;
      break;
    case MOEKIT_DTYPE_BOOL:
      if (bits == 8) return DType::boolean;
      break;
    case MOEKIT_DTYPE_FLOAT8_E4M3FN:
      if (bits == 8) return DType::f8_e4m3;
      break;
    case MOEKIT_DTYPE_FLOAT8_E5M2:
      if (bits == 8) return DType::f8_e5m2;
      break;
    case MOEKIT_DTYPE_FLOAT8_E8M0FNU:
      if (bits == 8) return DType::f8_e8m0;
      break;
    case MOEKIT_DTYPE_FLOAT4_E2M1FN:
      if (bits == 4) return DType::f4_e2m1;
      break;
    default: break;
  }
  fail(
      ErrorCode::invalid_argument,
      "{}: DLPack dtype code {} with {} bits is none that moekit knows (MOEKIT_DTYPE_* of c_api.h)",
      name, t.code, bits);
}

void check_reserved(int32_t value, const char* name) {
  MOEKIT_CHECK(value == 0, "{}.reserved is {}, expected 0", name, value);
}

int64_t twice(int64_t count, const char* name) {
  int64_t product = 0;
  MOEKIT_CHECK(!__builtin_mul_overflow(count, int64_t{2}, &product),
               "{}: its shape or strides count more pairs than fit into 64 bits", name);
  return product;
}

void fill_strides(const moekit_tensor& tensor, TensorView* view, const char* name) {
  // A pair of float4 is one DLPack element of two lanes; a view counts single codes.
  const int lanes = tensor.dtype.lanes;
  const bool pairs = lanes == 2 && view->dtype == DType::f4_e2m1 && tensor.ndim > 0;
  MOEKIT_CHECK(lanes == 1 || pairs, "{}: lanes is {}, expected 1 (or 2 for float4)", name, lanes);
  int64_t stride = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    const bool last = i == tensor.ndim - 1;
    view->shape[i] = pairs && last ? twice(tensor.shape[i], name) : tensor.shape[i];
    if (tensor.strides != nullptr) {
      MOEKIT_CHECK(!pairs || !last || tensor.strides[i] == 1 || tensor.shape[i] == 1,
                   "{}: pairs of float4 must stand side by side, stride {} came", name,
                   tensor.strides[i]);
      stride = pairs && !last ? twice(tensor.strides[i], name) : tensor.strides[i];
      view->strides[i] = stride;
    } else {
      view->strides[i] = stride;
      MOEKIT_CHECK(!__builtin_mul_overflow(stride, view->shape[i], &stride),
                   "{}: its shape has more elements than 64 bits count", name);
    }
  }
}

std::vector<MatrixTensors> matrices(const moekit_matrix* first, uint32_t step, int64_t count,
                                    const char* name);

MatrixTensors matrix_from_c(const moekit_matrix& m, const std::string& name) {
  MatrixTensors out;
  out.codes = view_of(m.codes, (name + ".codes").c_str());
  out.scales = view_of(m.scales, (name + ".scales").c_str());
  out.zeros = view_of(m.zeros, (name + ".zeros").c_str());
  out.global = view_of(m.global, (name + ".global").c_str());
  out.input_scale = view_of(m.input_scale, (name + ".input_scale").c_str());
  out.bias = view_of(m.bias, (name + ".bias").c_str());
  return out;
}

MatrixTensors matrix_or_empty(const moekit_matrix* m, uint32_t size, const char* name) {
  if (m == nullptr) return {};
  return matrices(m, size, 1, name).front();
}

// `step` is the caller's sizeof(moekit_matrix): older callers have a shorter one.
std::vector<MatrixTensors> matrices(const moekit_matrix* first, uint32_t step, int64_t count,
                                    const char* name) {
  std::vector<MatrixTensors> out;
  if (first == nullptr) return out;
  out.reserve(static_cast<size_t>(count));
  const auto* bytes = reinterpret_cast<const unsigned char*>(first);
  for (int64_t i = 0; i < count; ++i) {
    moekit_matrix m{};
    std::memcpy(&m, bytes + i * static_cast<int64_t>(step), step < sizeof(m) ? step : sizeof(m));
    out.push_back(matrix_from_c(m, fmt::format("{}[{}]", name, i)));
  }
  return out;
}

std::string text(const char* given, const char* fallback = "") {
  return given != nullptr ? given : fallback;
}

}  // namespace

CallbackAllocator::CallbackAllocator(const moekit_allocator& callbacks) : callbacks_(callbacks) {
  MOEKIT_CHECK(callbacks.allocate != nullptr && callbacks.deallocate != nullptr,
               "moekit_allocator needs both callbacks, allocate and deallocate");
}

void* CallbackAllocator::allocate(size_t bytes, size_t alignment) {
  return callbacks_.allocate(callbacks_.user, bytes, alignment);
}

void CallbackAllocator::deallocate(void* data, size_t bytes) noexcept {
  callbacks_.deallocate(callbacks_.user, data, bytes);
}

moekit_config default_config() { return to_c(MoeConfig{}); }

moekit_config to_c(const MoeConfig& config) {
  moekit_config c{};
  c.struct_size = sizeof(c);
  c.activation = static_cast<int32_t>(config.activation.kind);
  c.num_experts = config.num_experts;
  c.top_k = config.top_k;
  c.hidden = config.hidden;
  c.inter = config.inter;
  c.latent = config.latent;
  c.gated = config.activation.gated;
  c.activation_limit = config.activation.limit;
  c.activation_alpha = config.activation.alpha;
  c.activation_beta = config.activation.beta;
  c.has_gate_up_bias = config.has_gate_up_bias;
  c.has_down_bias = config.has_down_bias;
  c.weight_on_input = config.weight_on_input;
  c.gate_up_weights = to_c(config.gate_up_weights);
  c.down_weights = to_c(config.down_weights);
  c.gate_up_input = to_c(config.gate_up_input);
  c.down_input = to_c(config.down_input);
  router_to_c(config.router, &c);
  c.shared_sigmoid_gate = config.shared.sigmoid_gate;
  c.shared_inter = config.shared.inter;
  c.shared_gate_up_weights = to_c(config.shared.gate_up_weights);
  c.shared_down_weights = to_c(config.shared.down_weights);
  c.shared_gate_up_input = to_c(config.shared.gate_up_input);
  c.shared_down_input = to_c(config.shared.down_input);
  return c;
}

MoeConfig from_c(const moekit_config& c) {
  check_reserved(c.reserved, "moekit_config");
  MoeConfig config;
  config.num_experts = c.num_experts;
  config.top_k = c.top_k;
  config.hidden = c.hidden;
  config.inter = c.inter;
  config.latent = c.latent;
  config.activation.kind = enumerator(c.activation, ActivationKind::relu2, "activation");
  config.activation.gated = c.gated != 0;
  config.activation.limit = c.activation_limit;
  config.activation.alpha = c.activation_alpha;
  config.activation.beta = c.activation_beta;
  config.has_gate_up_bias = c.has_gate_up_bias != 0;
  config.has_down_bias = c.has_down_bias != 0;
  config.weight_on_input = c.weight_on_input != 0;
  config.gate_up_weights = from_c(c.gate_up_weights, "gate_up_weights");
  config.down_weights = from_c(c.down_weights, "down_weights");
  config.gate_up_input = from_c(c.gate_up_input, "gate_up_input");
  config.down_input = from_c(c.down_input, "down_input");
  config.router = router_from_c(c);
  config.shared.inter = c.shared_inter;
  config.shared.sigmoid_gate = c.shared_sigmoid_gate != 0;
  config.shared.gate_up_weights = from_c(c.shared_gate_up_weights, "shared_gate_up_weights");
  config.shared.down_weights = from_c(c.shared_down_weights, "shared_down_weights");
  config.shared.gate_up_input = from_c(c.shared_gate_up_input, "shared_gate_up_input");
  config.shared.down_input = from_c(c.shared_down_input, "shared_down_input");
  return config;
}

WeightScheme scheme_from_c(const moekit_weight_scheme& scheme) { return from_c(scheme, "scheme"); }

moekit_plan_options default_plan_options() {
  const PlanOptions d;
  moekit_plan_options o{};
  o.struct_size = sizeof(o);
  o.activations = MOEKIT_INPUT_FROM_CHECKPOINT;
  o.max_tokens = d.max_tokens;
  o.device = {static_cast<int32_t>(d.device.type), d.device.index};
  o.combine = static_cast<int32_t>(d.combine);
  o.combine_dtype = d.combine_dtype == DType::bf16 ? MOEKIT_COMBINE_BF16 : MOEKIT_COMBINE_F32;
  o.wire = static_cast<int32_t>(d.wire);
  o.batch_invariant = d.batch_invariant;
  o.capacity = static_cast<int32_t>(d.capacity);
  o.capacity_rows = d.capacity_rows;
  o.deadline_ns = d.deadline.count();
  o.num_threads = d.num_threads;
  o.checked = d.checked;
  o.slots_per_rank = d.slots_per_rank;
  o.staging_slots = d.staging_slots;
  o.load_statistics = d.load_statistics;
  o.tp = d.tp;
  return o;
}

PlanOptions from_c(const moekit_plan_options& o) {
  PlanOptions options;
  options.backend = text(o.backend);
  options.prepare = text(o.prepare);
  MOEKIT_CHECK(o.device.device_type == 1 || o.device.device_type == 2,
               "device_type is {}, expected 1 (CPU) or 2 (CUDA)", o.device.device_type);
  options.device = {static_cast<DeviceType>(o.device.device_type), o.device.device_id};
  if (o.activations != MOEKIT_INPUT_FROM_CHECKPOINT) {
    options.activations = enumerator(o.activations, ActivationFormat::nvfp4, "activations");
  }
  options.max_tokens = o.max_tokens;
  options.placement = text(o.placement, "linear");
  options.combine = enumerator(o.combine, Combine::rank_sums, "combine");
  MOEKIT_CHECK(o.combine_dtype == MOEKIT_COMBINE_F32 || o.combine_dtype == MOEKIT_COMBINE_BF16,
               "combine_dtype is {}, expected MOEKIT_COMBINE_F32 or MOEKIT_COMBINE_BF16",
               o.combine_dtype);
  options.combine_dtype = o.combine_dtype == MOEKIT_COMBINE_BF16 ? DType::bf16 : DType::f32;
  options.wire = enumerator(o.wire, Wire::nvfp4, "wire");
  options.batch_invariant = o.batch_invariant != 0;
  options.capacity = enumerator(o.capacity, CapacityMode::drop, "capacity");
  options.capacity_rows = o.capacity_rows;
  MOEKIT_CHECK(o.deadline_ns > 0, "deadline_ns is {}, expected a positive time", o.deadline_ns);
  options.deadline = std::chrono::nanoseconds(o.deadline_ns);
  options.num_threads = o.num_threads;
  options.checked = o.checked != 0;
  options.pack_cache = text(o.pack_cache);
  options.slots_per_rank = o.slots_per_rank;
  options.staging_slots = o.staging_slots;
  options.load_statistics = o.load_statistics != 0;
  options.tp = o.tp;
  return options;
}

TensorView view_of(const moekit_tensor* tensor, const char* name) {
  if (tensor == nullptr) return {};
  MOEKIT_CHECK(tensor->ndim >= 0 && tensor->ndim <= kMaxRank, "{}: ndim is {}, expected 0 to {}",
               name, tensor->ndim, kMaxRank);
  MOEKIT_CHECK(tensor->ndim == 0 || tensor->shape != nullptr, "{}: shape is NULL with ndim {}",
               name, tensor->ndim);
  TensorView view;
  view.dtype = dtype_from_c(tensor->dtype, name);
  view.rank = tensor->ndim;
  MOEKIT_CHECK(tensor->device.device_type == 1 || tensor->device.device_type == 2,
               "{}: device_type is {}, expected 1 (CPU) or 2 (CUDA)", name,
               tensor->device.device_type);
  view.device = {static_cast<DeviceType>(tensor->device.device_type), tensor->device.device_id};
  bool none = false;
  for (int i = 0; i < tensor->ndim; ++i) {
    MOEKIT_CHECK(tensor->shape[i] >= 0, "{}: shape[{}] is {}, expected 0 or more", name, i,
                 tensor->shape[i]);
    none |= tensor->shape[i] == 0;
  }
  fill_strides(*tensor, &view, name);
  MOEKIT_CHECK(tensor->data != nullptr || none, "{}: data is NULL but the shape has elements",
               name);
  if (tensor->data != nullptr) {
    // Added as numbers: the sum may leave the address space.
    uintptr_t data = 0;
    MOEKIT_CHECK(!__builtin_add_overflow(reinterpret_cast<uintptr_t>(tensor->data),
                                         tensor->byte_offset, &data),
                 "{}: byte_offset is {}, which leads out of the address space", name,
                 tensor->byte_offset);
    view.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  }
  check_view(view, name);
  return view;
}

LayerTensors from_c(const moekit_layer_tensors& t, const MoeConfig& config) {
  check_reserved(t.reserved, "moekit_layer_tensors");
  MOEKIT_CHECK(t.matrix_size >= sizeof(void*) && t.matrix_size <= kLargestStruct,
               "moekit_layer_tensors.matrix_size is {}; set it to sizeof(moekit_matrix) ({} here)",
               t.matrix_size, sizeof(moekit_matrix));
  MOEKIT_CHECK(config.num_experts > 0, "num_experts is {}, expected at least 1",
               config.num_experts);
  LayerTensors out;
  out.gate = matrices(t.gate, t.matrix_size, config.num_experts, "gate");
  out.up = matrices(t.up, t.matrix_size, config.num_experts, "up");
  out.down = matrices(t.down, t.matrix_size, config.num_experts, "down");
  out.gate_up_stacked = matrix_or_empty(t.gate_up_stacked, t.matrix_size, "gate_up_stacked");
  out.down_stacked = matrix_or_empty(t.down_stacked, t.matrix_size, "down_stacked");
  out.stacked_order = enumerator(t.stacked_order, StackedOrder::interleaved, "stacked_order");
  out.transposed = t.transposed != 0;
  out.global_sense = enumerator(t.global_sense, ScaleSense::divisor, "global_sense");
  out.router_weight = view_of(t.router_weight, "router_weight");
  out.router_bias = view_of(t.router_bias, "router_bias");
  out.selection_bias = view_of(t.selection_bias, "selection_bias");
  out.shared_gate_proj = matrix_or_empty(t.shared_gate_proj, t.matrix_size, "shared_gate_proj");
  out.shared_up_proj = matrix_or_empty(t.shared_up_proj, t.matrix_size, "shared_up_proj");
  out.shared_down_proj = matrix_or_empty(t.shared_down_proj, t.matrix_size, "shared_down_proj");
  out.shared_gate = view_of(t.shared_gate, "shared_gate");
  out.latent_in = view_of(t.latent_in, "latent_in");
  out.latent_out = view_of(t.latent_out, "latent_out");
  return out;
}

LayerArgs from_c(const moekit_run_args& a) {
  check_reserved(a.reserved, "moekit_run_args");
  LayerArgs args;
  args.hidden = view_of(a.hidden, "hidden");
  args.hidden_scales = view_of(a.hidden_scales, "hidden_scales");
  args.hidden_global = view_of(a.hidden_global, "hidden_global");
  args.router_input = view_of(a.router_input, "router_input");
  args.topk_ids = view_of(a.topk_ids, "topk_ids");
  args.topk_weights = view_of(a.topk_weights, "topk_weights");
  args.token_ids = view_of(a.token_ids, "token_ids");
  args.output = view_of(a.output, "output");
  args.out_topk_ids = view_of(a.out_topk_ids, "out_topk_ids");
  args.out_topk_weights = view_of(a.out_topk_weights, "out_topk_weights");
  args.out_router_logits = view_of(a.out_router_logits, "out_router_logits");
  args.out_routed = view_of(a.out_routed, "out_routed");
  args.out_dropped = a.out_dropped;
  return args;
}

}  // namespace moekit::c
