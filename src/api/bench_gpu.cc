#include "api/bench_gpu.h"

#include <algorithm>

#include "api/bench_parts.h"
#include "api/bench_routing.h"
#include "api/bench_work.h"
#include "base/check.h"
#include "base/math.h"
#include "base/thread_pool.h"
#include "device/cuda_library.h"
#include "engine/device_store.h"
#include "problem/error_bound.h"
#include "tensor/float_formats.h"

namespace moekit::api {
namespace {

using device::ExpertsCall;

// What one launch with one dependency inside needs beside the time of its bytes, as measured on an
// H200.
constexpr double kLaunchUs = 3.0;
// Weights between two uses of the same ones: forty times the largest L2.
constexpr int64_t kWeightBytes = 2'000'000'000;
constexpr int kMaxCopies = 32;
// Of the free memory, for weights and workspaces; a peer has its own copies beside them.
constexpr double kShareAlone = 0.85, kShareBesidePeers = 0.4;
// Rows that are held to the reference, which takes its time.
constexpr int64_t kReferenceRows = 2;
constexpr device::Replays kReplays{};

/// Calls in a graph: enough for a graph of about 100 us, and for every copy to be read.
int calls_of(int64_t tokens, int copies) {
  const int calls = tokens == 1 ? 16 : tokens <= 8 ? 8 : tokens <= 512 ? 4 : 2;
  return std::max(calls, copies);
}

/// Rates of dense products that are taken for granted where nobody measures them: 1e12 operations
/// a second with 16-bit and 8-bit operands.
struct AssumedPeak {
  int major, minor;
  double bf16, fp8;
  const char* grounds;
};
constexpr AssumedPeak kAssumedPeaks[] = {
    {8, 0, 312, 312, "A100 data sheet; 8-bit operands as bf16"},
    {9, 0, 780, 1400, "an H200's dense 8192^3, cool"},
    {10, 0, 2250, 4500, "B200 data sheet"},
};

bool is_8_bit(const WeightScheme& weights, const ActivationScheme& input) {
  switch (weights.format) {
    case WeightFormat::fp8_tensor:
    case WeightFormat::fp8_channel:
    case WeightFormat::fp8_block:
    case WeightFormat::mxfp8:
    case WeightFormat::mxfp8_e5m2:
    case WeightFormat::mxfp4: break;
    default: return false;
  }
  return is_quantized(input.format) && input.format != ActivationFormat::nvfp4;
}

/// Whether matrix units can form the layer's products exactly from 8-bit operands.
bool multiplies_fp8(const MoeConfig& c) {
  return is_8_bit(c.gate_up_weights, c.gate_up_input) && is_8_bit(c.down_weights, c.down_input);
}

bool multiplies_f32(const MoeConfig& c) {
  return c.gate_up_input.format == ActivationFormat::f32 ||
         c.down_input.format == ActivationFormat::f32;
}

/// Fills what a probe says of matrix products without measuring any.
void assume_peak(const MoeConfig& config, const device::Arch& arch, ProbeResult& probe) {
  const bool fp8 = multiplies_fp8(config);
  probe.matrix_instruction = fp8 ? "fp8 matrix units" : "bf16 matrix units";
  if (multiplies_f32(config)) {
    probe.matrix_instruction = "none";
    probe.matrix_source = "no rate is assumed for f32 rows: the floor counts bytes alone";
    return;
  }
  for (const AssumedPeak& peak : kAssumedPeaks) {
    if (peak.major != arch.major || peak.minor != arch.minor) continue;
    probe.matrix_tflops = fp8 ? peak.fp8 : peak.bf16;
    probe.matrix_source = fmt::format("assumed for {}: {}", to_string(arch), peak.grounds);
    return;
  }
  probe.matrix_source =
      fmt::format("no rate is assumed for {}: the floor counts bytes alone", to_string(arch));
}

}  // namespace

GpuBench::GpuBench(const BenchRequest& request,
                   const std::function<void(const std::string&)>& progress)
    : request_(request),
      source_(timed_source(request)),
      progress_(progress),
      options_(request.options) {
  check_request();
  options_.max_tokens = *std::max_element(request.tokens.begin(), request.tokens.end());
  options_.hidden_dtype = DType::bf16;
  make_plan();
  tell("copying weights to the GPU");
  ThreadPool threads(plan_->num_threads);
  copies_ = engine::upload_experts(*source_.canonical, *plan_, choose_copies(), threads, nullptr);
  for (const auto& copy : copies_) workspaces_.push_back(copy->make_workspace());
  assume_peak(plan_->problem.config, *plan_->problem.gpu.arch, probe_);
  if (request.peers.empty()) return;
  const auto say = [this](const std::string& what) { tell(what); };
  peers_ = std::make_unique<PeerBench>(request, source_, options_.max_tokens, say);
  if (multiplies_f32(plan_->problem.config)) return;
  const bool fp8 = multiplies_fp8(plan_->problem.config);
  const DenseRate dense = peers_->dense_rate(fp8);
  if (dense.tflops <= 0) return;
  probe_.matrix_tflops = dense.tflops;
  probe_.matrix_source = fmt::format("{} {} 8192^3, sustained, in this run", dense.peer,
                                     fp8 ? "fp8 (one scale a matrix)" : "bf16");
}

void GpuBench::check_request() const {
  constexpr ErrorCode kUnsupported = ErrorCode::unsupported;
  MOEKIT_CHECK_AS(kUnsupported, request_.num_ranks == 1 && !request_.exchange_only,
                  "bench on a GPU times the experts of one rank, got {} ranks{}",
                  request_.num_ranks, request_.exchange_only ? " and the exchange alone" : "");
  MOEKIT_CHECK_AS(kUnsupported, !request_.include_router && !request_.include_shared,
                  "bench on a GPU times the routed experts: router and shared experts run on the "
                  "CPU; leave --include out");
  MOEKIT_CHECK(request_.options.arch.empty(),
               "arch {} plans for a GPU that need not be here, which only explain does; leave it "
               "out to time one",
               request_.options.arch);
}

void GpuBench::make_plan() {
  const CanonicalLayer& layer = *source_.canonical;
  const Problem problem = engine::make_problem(layer, options_);
  explanation_ = engine::explain(layer, problem, options_, &plan_);
  if (plan_ == nullptr) engine::make_plan(layer, problem, options_);  // throws with every reason
  plugin_ = device::find_cuda_library().plugin;
}

int GpuBench::choose_copies() const {
  const int64_t weights = std::max<int64_t>(1, plan_->layout.total_bytes());
  const int64_t one = weights + plan_->device_workspace_bytes;
  const int64_t free = plugin_->tools().free_bytes(options_.device.index);
  const double share = request_.peers.empty() ? kShareAlone : kShareBesidePeers;
  const auto room = static_cast<int64_t>(share * static_cast<double>(free));
  MOEKIT_CHECK_AS(ErrorCode::out_of_memory, one <= free,
                  "weights and workspace: expected {} bytes of the GPU's memory, {} are free; time "
                  "a smaller problem or fewer tokens",
                  one, free);
  const int64_t wanted = std::clamp<int64_t>(ceil_div(kWeightBytes, weights), 2, kMaxCopies);
  return static_cast<int>(std::clamp<int64_t>(room / one, 1, wanted));
}

/// As a call of the layer would bring them: f32 only where they come out of a projection.
bool GpuBench::f32_rows() const {
  const MoeConfig& c = plan_->problem.config;
  return c.latent > 0 && c.gate_up_input.format != ActivationFormat::bf16;
}

std::unique_ptr<device::DeviceMemory> GpuBench::upload(const void* host, int64_t bytes) const {
  auto memory = plugin_->tools().allocate(options_.device.index, bytes);
  memory->upload(host, bytes);
  return memory;
}

GpuBench::Calls GpuBench::make_calls(int64_t tokens) const {
  const MoeConfig& c = plan_->problem.config;
  const int count = calls_of(tokens, static_cast<int>(copies_.size()));
  const int64_t width = c.routed_width(), elements = checked_mul(tokens, width, "rows");
  Calls calls;
  calls.tokens = tokens;
  calls.hidden = random_hidden(tokens + count, width, request_.seed);
  calls.routings = make_routings(
      request_.routing, {tokens, c.top_k, c.num_experts, plan_->problem.placement->experts_of(0)},
      request_.seed, count);
  const int64_t slots = tokens * c.top_k;
  std::vector<float> wide(f32_rows() ? static_cast<size_t>(elements) : 0);
  for (int i = 0; i < count; ++i) {
    const engine::SyntheticRouting& routing = calls.routing(static_cast<size_t>(i));
    const auto* rows = static_cast<const uint16_t*>(calls.hidden.view.data) + i * width;
    std::transform(rows, rows + wide.size(), wide.begin(), bf16_to_f32);
    Call call;
    call.rows = wide.empty() ? upload(rows, elements * 2) : upload(wide.data(), elements * 4);
    call.ids = upload(routing.ids.data(), slots * 4);
    call.weights = upload(routing.weights.data(), slots * 4);
    call.out = plugin_->tools().allocate(options_.device.index, elements * 2);
    calls.on_device.push_back(std::move(call));
  }
  return calls;
}

ExpertsCall GpuBench::args_of(const Calls& calls, size_t i) const {
  const Call& call = calls.on_device[i];
  ExpertsCall args;
  args.num_tokens = calls.tokens;
  args.rows = call.rows->data();
  args.row_type = f32_rows() ? device::RowType::f32 : device::RowType::bf16;
  args.row_bytes = plan_->problem.config.routed_width() * (f32_rows() ? 4 : 2);
  args.ids = static_cast<const int32_t*>(call.ids->data());
  args.weights = static_cast<const float*>(call.weights->data());
  args.out = call.out->data();
  args.out_type = device::RowType::bf16;
  args.knobs = plan_->bucket_of(calls.tokens).knobs;
  args.on_device = true;
  return args;
}

void GpuBench::run(const Calls& calls, size_t i, void* stream) const {
  ExpertsCall args = args_of(calls, i);
  args.stream = stream;
  workspaces_[i % workspaces_.size()]->run(args);
}

/// For peers and the reference, which compute the same rows.
RankedInputs GpuBench::inputs_of(const Calls& calls, size_t i) const {
  const engine::SyntheticRouting& routing = calls.routing(i);
  const int64_t top_k = source_.config.top_k;
  RankedInputs in;
  in.hidden = calls.hidden.view;
  in.hidden.shape[0] = calls.tokens;
  in.topk_ids = TensorView::contiguous(routing.ids.data(), DType::i32, {calls.tokens, top_k});
  in.topk_weights =
      TensorView::contiguous(routing.weights.data(), DType::f32, {calls.tokens, top_k});
  return in;
}

double GpuBench::try_out(const Calls& calls) const {
  for (size_t i = 0; i < calls.on_device.size(); ++i) run(calls, i, nullptr);
  const MoeConfig& c = plan_->problem.config;
  const int64_t rows = std::min(calls.tokens, kReferenceRows), width = c.routed_width();
  std::vector<uint16_t> got(static_cast<size_t>(rows * width));
  calls.on_device.front().out->download(got.data(), rows * width * 2);
  if (c.latent > 0) return -1;  // the reference begins and ends outside of the latent space
  std::vector<float> values(got.size());
  std::transform(got.begin(), got.end(), values.begin(), bf16_to_f32);
  RankedInputs in = inputs_of(calls, 0);
  for (TensorView* view : {&in.hidden, &in.topk_ids, &in.topk_weights}) view->shape[0] = rows;
  PlanOptions on_cpu = options_;
  on_cpu.device = {};
  on_cpu.backend = "ref";
  on_cpu.prepare.clear();
  on_cpu.packing_progress = nullptr;
  RankedOutputs outputs;
  RankedLayer(source_, on_cpu, 1, rows).run(in, outputs, 1, 0, false);
  const Errors errors = compare(values.data(), outputs.output.data(), rows, width);
  const double bound = gpu_row_error_bound(c, options_.combine_dtype);
  MOEKIT_CHECK_AS(ErrorCode::internal,
                  errors.nonfinite_mismatches == 0 && errors.worst_row_rms <= bound,
                  "{} at {} tokens: a row is {:.2e} from the reference where {:.2e} is the bound; "
                  "not timed, see `moekit check --device cuda`",
                  plan_->choice.experts->name(), calls.tokens, errors.worst_row_rms, bound);
  return errors.rel_rms;
}

void GpuBench::describe_work(const Calls& calls, BenchPoint& p) const {
  const MoeConfig& c = plan_->problem.config;
  const size_t count = calls.on_device.size(), copies = copies_.size();
  std::vector<std::vector<int32_t>> all, of_copy(std::min(count, copies));
  for (size_t i = 0; i < count; ++i) {
    const std::vector<int32_t>& ids = calls.routing(i).ids;
    all.push_back(ids);
    of_copy[i % copies].insert(of_copy[i % copies].end(), ids.begin(), ids.end());
  }
  const Touched touched = count_touched(all, c.num_experts);
  const auto rows = static_cast<double>(calls.tokens);
  p.active_experts = touched.active;
  p.weights_bytes = touched.active * static_cast<double>(expert_bytes(c));
  p.activations_bytes = rows * static_cast<double>(c.routed_width()) * (f32_rows() ? 4 + 2 : 2 + 2);
  p.flops = touched.slots * flops_per_slot(c);
  for (const auto& ids : of_copy) {
    p.working_set_bytes += count_active(ids, c.num_experts) * expert_bytes(c);
  }
  p.gpu->cache_bytes = plugin_->tools().l2_bytes(options_.device.index);
  p.cold = p.working_set_bytes > p.gpu->cache_bytes;
}

void GpuBench::time(const Calls& calls, BenchPoint& p) {
  const device::GpuTools& tools = plugin_->tools();
  const auto enqueue = [&](void* stream) {
    for (size_t i = 0; i < calls.on_device.size(); ++i) run(calls, i, stream);
  };
  std::vector<double> times = tools.time_graph(options_.device.index, kReplays, enqueue);
  for (double& us : times) us /= static_cast<double>(calls.on_device.size());
  std::sort(times.begin(), times.end());
  p.repeat = static_cast<int64_t>(times.size());
  p.median_us = percentile(times, 0.5);
  p.p5_us = percentile(times, 0.05);
  p.p95_us = percentile(times, 0.95);
}

void GpuBench::find_floor(BenchPoint& p) {
  const double read = plugin_->tools().read_gbs(options_.device.index);
  probe_.bandwidth_gbs = std::max(probe_.bandwidth_gbs, read);
  p.probe = probe_;
  const double by_bytes = kLaunchUs + p.total_bytes() / probe_.bandwidth_gbs / 1e3;
  const double by_flops = probe_.matrix_tflops > 0 ? p.flops / probe_.matrix_tflops / 1e6 : 0;
  p.floor_us = std::max(by_bytes, by_flops);
}

BenchPoint GpuBench::point(int64_t tokens) {
  BenchPoint p;
  p.tokens = p.tokens_total = tokens;
  p.routing = request_.routing;
  p.plan = explanation_.plan;
  const Calls calls = make_calls(tokens);
  p.gpu = GpuTiming{.device = plugin_->gpu(options_.device.index).name,
                    .knobs = plan_->bucket_of(tokens).knobs,
                    .calls = static_cast<int>(calls.on_device.size()),
                    .copies = static_cast<int>(copies_.size()),
                    .launch_us = kLaunchUs};
  describe_work(calls, p);
  p.gpu->rel_rms = try_out(calls);
  if (peers_) {
    std::vector<RankedInputs> inputs;
    for (size_t i = 0; i < calls.on_device.size(); ++i) inputs.push_back(inputs_of(calls, i));
    peers_->begin(inputs, p.gpu->copies);
  }
  tell(fmt::format("{} tokens", tokens));
  time(calls, p);
  if (peers_) {
    peers_->time_graphs(kReplays.untimed, kReplays.timed);
    p.peers = peers_->finish();
  }
  find_floor(p);
  return p;
}

}  // namespace moekit::api
