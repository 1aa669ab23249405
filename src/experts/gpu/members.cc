#include "experts/gpu/members.h"

#include <algorithm>
#include <exception>

#include "base/check.h"
#include "device/cuda_library.h"
#include "experts/gpu/image_pack.h"
#include "kernels/common/limits.h"
#include "tensor/bf16_rows.h"
#include "trace/span.h"

namespace moekit::experts {
namespace {

using device::ExpertKernels;
using kernels::Limits;

bool is_integer(WeightFormat f) {
  return f == WeightFormat::int4_group || f == WeightFormat::int8_group ||
         f == WeightFormat::int4_channel || f == WeightFormat::int8_channel;
}

/// Columns that share a scale along K, where a matrix must have whole groups.
int64_t scale_group(WeightFormat f) {
  switch (f) {
    case WeightFormat::mxfp8:
    case WeightFormat::mxfp8_e5m2:
    case WeightFormat::mxfp4: return 32;
    case WeightFormat::nvfp4: return 16;
    default: return 1;
  }
}

/// The rows that reach the experts have bf16 values, or are rounded to them.
bool reads_bf16_rows(const Problem& problem) {
  return problem.config.gate_up_input.format == ActivationFormat::bf16 ||
         (problem.hidden_dtype == DType::bf16 && problem.config.latent == 0 &&
          problem.wire != Wire::f32);
}

/// Shared memory of a block of decode, for calls of `tokens`.
int64_t decode_bytes(const MoeConfig& config, int64_t tokens) {
  const WeightFormat weights = config.gate_up_weights.format;
  const int64_t width = config.routed_width();
  const auto operand = cuda::operand_format(weights);
  if (!operand || !kernels::in_panels(*operand)) {
    return kernels::kDecodeStaticBytes +
           kernels::decode_shared_bytes(tokens, width, weights == WeightFormat::fp8_block ? 1 : 2);
  }
  // Beyond any block long before it leaves 32 bits.
  const auto columns = static_cast<int32_t>(std::min<int64_t>(width, 1 << 24));
  return kernels::kDecodeStaticBytes +
         kernels::decode_panel_shared_bytes(*operand, tokens, columns,
                                            kernels::decode_panel_stages(*operand, false));
}

/// What a call of `tokens` may ask of decode on Hopper.
bool decode_fits(const MoeConfig& config, int64_t tokens) {
  const Limits& limits = kernels::kDecodeLimits;
  return tokens <= limits.max_tokens && tokens * config.top_k <= limits.max_slots &&
         tokens * config.routed_width() <= limits.max_elements &&
         decode_bytes(config, tokens) <= kernels::block_shared_bytes(9, 0);
}

/// Whether the matrix kernels that read such weights read such rows.
bool has_matrix_kernel(kernels::OperandFormat weights, const ActivationScheme& input) {
  if (weights != kernels::OperandFormat::fp8_block) return input.format == ActivationFormat::bf16;
  return input.format == ActivationFormat::fp8_block && !input.ue8m0_scale;
}

std::string pair_text(const WeightScheme& weights, const ActivationScheme& input) {
  return fmt::format("{} weights with {}{} activations", to_string(weights.format),
                     to_string(input.format), input.ue8m0_scale ? " (ue8m0 scales)" : "");
}

/// Runs a call and puts its steps on the track of the rank's GPU. The device's clock is another
/// one: its first step is drawn where the call began on the host, which is when the call was
/// enqueued, at most the latency of a launch too early.
void run_traced(device::ExpertsWorkspace& workspace, device::ExpertsCall call,
                const trace::Context& context) {
  std::vector<device::DeviceSpan> spans;
  call.spans = &spans;
  const int64_t begin_ns = context.recorder->now_ns();
  workspace.run(call);
  const auto at = [&](double us) { return begin_ns + static_cast<int64_t>(us * 1e3); };
  for (const device::DeviceSpan& span : spans) {
    trace::Event event;
    event.begin_ns = at(span.begin_us);
    event.end_ns = at(span.end_us);
    event.stage = span.stage;
    event.call = context.call;
    event.workspace = context.workspace;
    event.facts.tokens = call.num_tokens;
    context.rings->device->push(event);
  }
}

}  // namespace

Traits CudaExperts::traits(const Problem&) const {
  return {.can_weight_and_sum = true, .sums_bf16_rows = true, .quantizes_input = true};
}

void CudaExperts::require_gpu(const Problem& problem, Support& s) const {
  const device::GpuTarget& gpu = problem.gpu;
  s.require(gpu.in_build, ReasonCode::not_in_build, "{}", gpu.missing);
  // In a build without CUDA the first reason tells why no GPU was looked for.
  s.require(gpu.arch.has_value() || !gpu.in_build, ReasonCode::device,
            "needs a GPU: none is visible; --arch plans for one that is not here");
  if (!gpu.arch) return;
  const std::string arch = to_string(*gpu.arch);
  if (kernels_ == ExpertKernels::sm90) {
    s.require(device::has_code_for("90a", *gpu.arch), ReasonCode::arch,
              "its kernels are made for 90a (Hopper), the plan is for {}", arch);
  } else {
    s.require(device::has_code_for(gpu.targets, *gpu.arch), ReasonCode::arch,
              "its kernels are compiled for {}, the plan is for {}", gpu.targets, arch);
  }
}

void CudaExperts::require_formats(const MoeConfig& c, Support& s) const {
  if (kernels_ == ExpertKernels::reference) {
    s.require(!is_integer(c.gate_up_weights.format) && !is_integer(c.down_weights.format),
              ReasonCode::weight_format, "integer weights are not covered on the device");
    s.require(c.routed_width() % scale_group(c.gate_up_weights.format) == 0 &&
                  c.inter % scale_group(c.down_weights.format) == 0,
              ReasonCode::shape, "hidden {} and intermediate {} must hold whole scale groups",
              c.routed_width(), c.inter);
    s.require(!c.gate_up_input.static_scale && !c.down_input.static_scale,
              ReasonCode::activation_format,
              "static activation scales, which experts have of their own, are not covered on the "
              "device");
    return;
  }
  const auto operand = cuda::operand_format(c.gate_up_weights.format);
  const std::string layer = fmt::format("this layer has {} (gate and up) and {} (down)",
                                        pair_text(c.gate_up_weights, c.gate_up_input),
                                        pair_text(c.down_weights, c.down_input));
  if (!operand || c.gate_up_weights.format != c.down_weights.format) {
    s.require(false, ReasonCode::weight_format,
              "takes weights in bf16, fp8_block, mxfp4, nvfp4 or mxfp8 (e4m3), gate and up in the "
              "format of down; {}",
              layer);
    return;
  }
  const bool reads_rows =
      has_matrix_kernel(*operand, c.gate_up_input) && has_matrix_kernel(*operand, c.down_input);
  s.require(reads_rows || *operand != kernels::OperandFormat::fp8_block,
            ReasonCode::activation_format,
            "takes fp8_block weights with fp8_block activations (f32 scales); {}", layer);
  s.require(reads_rows || *operand == kernels::OperandFormat::fp8_block,
            ReasonCode::activation_format,
            "takes {} weights with bf16 activations (--activations bf16); {}",
            to_string(c.gate_up_weights.format), layer);
  s.require(limits_.fp8_without_gate || c.activation.gated ||
                c.gate_up_weights.format != WeightFormat::fp8_block,
            ReasonCode::activation_function, "fp8_block without a gate has no kernel");
}

void CudaExperts::require_sizes(const Problem& problem, Support& s) const {
  const MoeConfig& c = problem.config;
  const int64_t tokens = problem.max_tokens;
  s.require(c.routed_width() % limits_.size_multiple == 0 && c.inter % limits_.size_multiple == 0,
            ReasonCode::shape, "hidden {} and intermediate {} must be multiples of {}",
            c.routed_width(), c.inter, limits_.size_multiple);
  s.require(problem.num_local_experts() <= limits_.max_experts, ReasonCode::shape,
            "{} experts, at most {} fit", problem.num_local_experts(), limits_.max_experts);
  s.require(tokens <= limits_.max_tokens, ReasonCode::shape,
            "calls have up to {} tokens, at most {} fit", tokens, limits_.max_tokens);
  if (tokens > limits_.max_tokens) return;
  s.require(tokens * c.top_k <= limits_.max_slots, ReasonCode::shape,
            "calls have up to {} slots, at most {} fit", tokens * c.top_k, limits_.max_slots);
  s.require(tokens * c.routed_width() <= limits_.max_elements, ReasonCode::shape,
            "{} tokens of {} elements do not fit into shared memory ({})", tokens, c.routed_width(),
            limits_.max_elements);
  if (kernels_ != ExpertKernels::decode || !problem.gpu.arch) return;
  const device::Arch& arch = *problem.gpu.arch;
  const int64_t has = kernels::block_shared_bytes(arch.major, arch.minor);
  const int64_t needs = decode_bytes(c, tokens);
  s.require(needs <= has, ReasonCode::shape,
            "{} tokens need {} bytes of shared memory, a block on {} has {}", tokens, needs,
            to_string(arch), has);
}

void CudaExperts::require_roles(const Problem& problem, Support& s) const {
  s.require(problem.num_ranks == 1 && problem.tp_size == 1, ReasonCode::parallel,
            "serves one rank, the plan has {}", problem.num_ranks * problem.tp_size);
  s.require(problem.slots_per_rank == 0, ReasonCode::layout,
            "its placement is fixed, the plan asks for {} slots a rank", problem.slots_per_rank);
  s.require(!problem.config.weight_on_input, ReasonCode::reduce_duty,
            "the experts cannot apply the router weight to their input");
  if (kernels_ == ExpertKernels::reference) return;
  s.require(problem.combine_dtype == DType::bf16, ReasonCode::combine,
            "its slot rows are bf16: plan with combine_dtype bf16");
  if (kernels_ == ExpertKernels::sm90) return;
  s.require(!problem.batch_invariant, ReasonCode::combine,
            "does not promise a row the same bits in every batch: plan without batch_invariant");
  s.require(reads_bf16_rows(problem), ReasonCode::rows_format,
            "reads bf16 rows, the calls bring f32 ones");
}

Support CudaExperts::supports(const Problem& problem) const {
  Support s;
  s.require(problem.device.type == DeviceType::cuda, ReasonCode::device,
            "runs on a CUDA device, the plan is for the CPU");
  if (!s.ok()) return s;
  require_gpu(problem, s);
  require_formats(problem.config, s);
  require_sizes(problem, s);
  require_roles(problem, s);
  return s;
}

WeightLayout CudaExperts::weight_layout(const CanonicalLayer& layer,
                                        std::span<const int32_t> local_experts) const {
  const MoeConfig& config = layer.config;
  const cuda::ExpertImage image(config, kernels_);
  cuda::check_images(layer, local_experts, image);
  const bool panels = image.up.panels.has_value();
  WeightLayout layout;
  layout.name = panels ? "cuda_panels" : "cuda_images";
  layout.row_order = config.activation.gated ? RowOrder::gate_up : RowOrder::not_gated;
  layout.gate_up = config.gate_up_weights;
  layout.down = config.down_weights;
  layout.num_local_experts = static_cast<int64_t>(local_experts.size());
  layout.on_device = true;
  for (int64_t e = 0; e <= layout.num_local_experts; ++e) {
    layout.expert_offset.push_back(checked_mul(e, image.bytes, "packed experts"));
  }
  layout.note = panels ? "weights lie in device memory in the checkpoint's codes, ordered in panels"
                       : "weights lie in device memory as the checkpoint codes them";
  return layout;
}

void CudaExperts::pack(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                       const WeightLayout& layout, std::byte* blob, ThreadPool& threads) const {
  std::vector<std::byte*> places;
  for (size_t i = 0; i < local_experts.size(); ++i) {
    places.push_back(blob + layout.expert_offset[i]);
  }
  pack_experts(layer, local_experts, layout, places, threads);
}

void CudaExperts::pack_experts(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                               const WeightLayout&, std::span<std::byte* const> places,
                               ThreadPool& threads) const {
  const cuda::ExpertImage image(layer.config, kernels_);
  // Threads of the pool may not throw.
  std::vector<std::exception_ptr> faults(places.size());
  auto pack_one = [&](int64_t i, int) {
    const auto at = static_cast<size_t>(i);
    if (places[at] == nullptr) return;
    const int32_t e = local_experts[at];
    try {
      cuda::pack_image(layer.experts[static_cast<size_t>(e)], e, image, places[at]);
    } catch (...) {
      faults[at] = std::current_exception();
    }
  };
  threads.parallel_for(static_cast<int64_t>(places.size()), pack_one);
  for (const std::exception_ptr& fault : faults) {
    if (fault != nullptr) std::rethrow_exception(fault);
  }
}

int64_t CudaExperts::workspace_bytes(const Problem& problem, const WeightLayout&, int64_t max_rows,
                                     int) const {
  WorkspaceLayout layout;
  layout.add(checked_mul(max_rows, problem.config.routed_width(), "bf16 rows"), 2);
  return layout.total();
}

device::ExpertsSpec CudaExperts::spec_of(const Problem& problem) const {
  device::ExpertsSpec spec;
  spec.kernels = kernels_;
  spec.device = problem.device.index;
  spec.config = problem.config;
  spec.num_experts = problem.num_local_experts();
  spec.max_tokens = problem.max_tokens;
  return spec;
}

int64_t CudaExperts::device_workspace_bytes(const Problem& problem) const {
  const device::CudaLibrary library = device::find_cuda_library();
  return library.plugin != nullptr ? library.plugin->workspace_bytes(spec_of(problem)) : 0;
}

std::unique_ptr<device::DeviceExperts> CudaExperts::make_device_experts(
    const CanonicalLayer& layer, const Problem& problem) const {
  const device::CudaLibrary library = device::find_cuda_library();
  MOEKIT_CHECK_AS(ErrorCode::unsupported, library.plugin != nullptr,
                  "{}: expected the CUDA plug-in, got: {}", name_, library.reason);
  device::ExpertsSpec spec = spec_of(problem);
  const std::vector<int32_t>& local = problem.placement->experts_of(problem.rank);
  if (!local.empty()) {
    const StoredExpert& expert = layer.experts[static_cast<size_t>(local.front())];
    spec.gate_up_global = expert.up.global_sense;
    spec.down_global = expert.down.global_sense;
  }
  return library.plugin->make_experts(spec);
}

namespace {

/// Of the experts that `num_tokens` tokens choose, if all are as likely.
double expected_weight_bytes(const MoeConfig& c, int64_t num_tokens) {
  const double chosen = kernels::expected_experts(static_cast<double>(c.num_experts),
                                                  static_cast<double>(num_tokens * c.top_k));
  return chosen * static_cast<double>(cuda::ExpertImage(c, ExpertKernels::sm90).bytes);
}

}  // namespace

std::vector<Knobs> CudaExperts::candidates(const Problem& problem, int64_t num_tokens) const {
  if (kernels_ == ExpertKernels::reference) return {"reference"};
  if (kernels_ == ExpertKernels::decode) return {Knobs(device::kDecodeChain)};
  const bool few = !problem.batch_invariant && reads_bf16_rows(problem) &&
                   decode_fits(problem.config, num_tokens);
  if (!few) return {Knobs(device::kSplitChain)};
  std::vector<Knobs> both{Knobs(device::kDecodeChain), Knobs(device::kSplitChain)};
  const MoeConfig& c = problem.config;
  if (c.gate_up_weights.format == WeightFormat::fp8_block &&
      kernels::fp8_takes_split_chain(expected_weight_bytes(c, num_tokens), num_tokens)) {
    std::swap(both[0], both[1]);
  }
  return both;
}

void CudaExperts::run(const Args& args, const Knobs& knobs) const {
  const ExpertRows& in = args.in;
  const MoeConfig& config = args.problem->config;
  const int64_t width = config.routed_width();
  const bool bf16_rows = in.format.format == ActivationFormat::bf16;
  device::ExpertsCall call;
  call.num_tokens = in.num_rows;
  call.rows = in.records;
  call.row_bytes = in.record_stride;
  call.row_type = bf16_rows ? device::RowType::bf16 : device::RowType::f32;
  if (!bf16_rows && config.gate_up_input.format == ActivationFormat::bf16) {
    // The rounding with which the GEMM reads them, and half the bytes to copy.
    auto* rounded = reinterpret_cast<uint16_t*>(args.workspace);
    auto round = [&](int64_t row, int) {
      const auto* from = reinterpret_cast<const float*>(in.records + row * in.record_stride);
      f32_to_bf16_row(from, width, rounded + row * width);
    };
    args.threads->parallel_for(in.num_rows, round);
    call.rows = rounded;
    call.row_bytes = width * 2;
    call.row_type = device::RowType::bf16;
  }
  call.knobs = knobs;
  call.ids = reinterpret_cast<const int32_t*>(in.ids);
  call.weights = in.weights;
  call.out = args.out.data;
  call.out_type = device::RowType::f32;
  call.stream = args.stream;
  const trace::Context* context = trace::current();
  if (context != nullptr && context->rings->device != nullptr) {
    run_traced(*args.device, call, *context);
  } else {
    args.device->run(call);
  }
}

const Experts& sm90_experts() {
  static const CudaExperts member("sm90", ExpertKernels::sm90, kernels::kGroupedGemmLimits);
  return member;
}

const Experts& cuda_decode_experts() {
  static const CudaExperts member("cuda_decode", ExpertKernels::decode, kernels::kDecodeLimits);
  return member;
}

const Experts& cuda_ref_experts() {
  static const CudaExperts member("cuda_ref", ExpertKernels::reference, kernels::kReferenceLimits);
  return member;
}

}  // namespace moekit::experts
