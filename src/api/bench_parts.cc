#include "api/bench_parts.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/buffer.h"
#include "base/math.h"
#include "comm/communicator.h"
#include "engine/plan.h"
#include "engine/tensor_parallel.h"
#include "moekit/communicator.h"
#include "moekit/problems.h"

namespace moekit::api {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBareInter = 32, kBlock = 128;
constexpr int kCallsAtOnce = 10;
constexpr int kTracedCalls = 5;
constexpr int64_t kTraceSpans = 256;
constexpr int kPackings = 3;
constexpr int64_t kPageBytes = 4096;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// The bare weights are nothing to keep.
PlanOptions with_trace(PlanOptions options, const Trace& trace) {
  options.pack_cache.clear();
  options.trace = trace;
  return options;
}

/// One rank that is like each of the many.
PlanOptions alone(PlanOptions options, int num_ranks) {
  options.comm = {};
  options.tp = 1;
  options.pack_cache.clear();
  options.prepare.clear();
  options.placement = "linear";
  options.num_nodes = 1;
  options.comm = {};
  if (options.num_threads == 0) options.num_threads = std::max(1, usable_cpus() / num_ranks);
  return options;
}

/// Sorted times of calls without experts.
std::vector<double> time_calls(const RankedLayer& layer, const RankedInputs& inputs,
                               double min_seconds, RankedOutputs& outputs) {
  // A whole call first: rows that the experts have never written would come from one page of zeros.
  layer.run(inputs, outputs, RunOptions{.want_routing = false});
  RunOptions calls{.repeat = kCallsAtOnce, .warmups = 3, .want_routing = false};
  calls.skip_experts = true;
  std::vector<double> times;
  double elapsed = 0;
  while (elapsed < min_seconds * 1e6 || times.empty()) {
    layer.run(inputs, outputs, calls);
    for (double us : outputs.time_us) elapsed += us;
    times.insert(times.end(), outputs.time_us.begin(), outputs.time_us.end());
  }
  std::sort(times.begin(), times.end());
  return times;
}

/// Rows of the first rank.
RankedInputs first_share(const RankedInputs& inputs, int num_ranks) {
  RankedInputs mine = inputs;
  for (TensorView* view : {&mine.hidden, &mine.token_ids, &mine.topk_ids, &mine.topk_weights}) {
    if (!view->empty()) view->shape[0] /= num_ranks;
  }
  return mine;
}

}  // namespace

double percentile(const std::vector<double>& sorted, double p) {
  const auto at = static_cast<size_t>(std::llround(p * static_cast<double>(sorted.size() - 1)));
  return sorted[at];
}

LayerSource exchange_source(const MoeConfig& config, int tp, uint64_t seed) {
  LayerProblem problem;
  problem.config = config;
  // Whole scale blocks for each slice.
  problem.config.inter = tp > 1 ? tp * kBlock : kBareInter;
  problem.config.gate_up_weights = {WeightFormat::bf16};
  problem.config.down_weights = {WeightFormat::bf16};
  problem.config.shared = SharedSpec{};
  problem.config.has_gate_up_bias = problem.config.has_down_bias = false;
  problem.config.router = RouterSpec{};
  return synthetic_source(problem, seed, 0);
}

ExchangeBench::ExchangeBench(const LayerSource& source, const PlanOptions& options, int num_ranks,
                             int64_t tokens)
    : num_ranks_(num_ranks),
      capacity_(checked_mul(tokens, num_ranks, "tokens of all ranks")),
      trace_(kTraceSpans),
      group_(options.comm),
      ranks_(source, with_trace(options, trace_), num_ranks, capacity_),
      local_(source, alone(options, num_ranks), 1, tokens) {}

void ExchangeBench::count_bytes(const RankedInputs& inputs, ExchangeTime& time) {
  RunOptions calls{.repeat = kTracedCalls, .want_routing = false, .skip_experts = true};
  trace_.start();
  ranks_.run(inputs, outputs_, calls);
  trace_.stop();
  gather_trace(trace_, group_);
  const auto add = [](double counted, double& total) { total = std::max(0.0, total) + counted; };
  for (const StageTime& stage : trace_.summary()) {
    const double us = stage.max_us / kTracedCalls;
    const bool out = stage.stage.starts_with("dispatch");
    if (!out && !stage.stage.starts_with("combine")) continue;
    ExchangeWay& way = out ? time.dispatch : time.combine;
    way.us += us;
    if (stage.bytes < 0) continue;
    const double bytes = static_cast<double>(stage.bytes) / kTracedCalls;
    const double own_bytes = static_cast<double>(stage.own_bytes) / kTracedCalls;
    add(bytes, way.bytes);
    add(own_bytes, way.own_bytes);
    add(bytes, time.bytes);
    add(own_bytes, time.own_bytes);
  }
}

ExchangeTime ExchangeBench::time(const RankedInputs& inputs, double min_seconds, Probe& probe) {
  ExchangeTime time;
  const int64_t rows = inputs.hidden.shape[0];
  probe.copy_round();
  const std::vector<double> times = time_calls(ranks_, inputs, min_seconds, outputs_);
  probe.copy_round();
  time.repeat = static_cast<int64_t>(times.size());
  time.median_us = percentile(times, 0.5);
  time.p5_us = percentile(times, 0.05);
  time.p95_us = percentile(times, 0.95);
  count_bytes(inputs, time);
  time.local_us = percentile(
      time_calls(local_, first_share(inputs, num_ranks_), min_seconds / 2, outputs_), 0.5);
  probe.copy_round();
  time.memcpy_gbs = probe.copy_gbs();
  time.plan_bytes = static_cast<double>(ranks_.wire_bytes());
  time.plan_bytes *=
      static_cast<double>(rows) / static_cast<double>(std::max<int64_t>(1, capacity_));
  return time;
}

PackingTime time_packing(const LayerSource& source, const PlanOptions& options, int num_ranks,
                         Probe& probe) {
  PlanOptions mine = options;
  mine.max_tokens = 1;
  if (mine.num_threads == 0) mine.num_threads = std::max(1, usable_cpus() / num_ranks);
  std::vector<CommunicatorHandle> ends;
  if (num_ranks > 1 && mine.comm.impl == nullptr) {
    ends = make_thread_ranks(num_ranks, options.deadline, options.num_nodes);
    mine.comm = ends.front();
  }
  const auto mine_of = engine::rank_layer(source.canonical, mine);
  const CanonicalLayer& layer = *mine_of;
  const engine::Plan plan = engine::make_plan(layer, engine::make_problem(layer, mine), mine);
  PackingTime time;
  time.bytes = plan.layout.total_bytes();
  if (time.bytes == 0) return time;
  ThreadPool threads(plan.num_threads);
  Buffer blob(time.bytes);
  auto touch = [&](int thread) {
    const int64_t share = round_up(ceil_div(time.bytes, threads.num_threads()), kPageBytes);
    const int64_t end = std::min(time.bytes, (thread + 1) * share);
    for (int64_t at = thread * share; at < end; at += kPageBytes) blob.data()[at] = std::byte{0};
  };
  auto start = Clock::now();
  threads.run(touch);
  time.fault_us_per_mib = seconds_since(start) * 1e6 / (static_cast<double>(time.bytes) / 0x1p20);
  for (int i = 0; i < kPackings; ++i) {
    probe.copy_round();
    start = Clock::now();
    plan.choice.experts->pack(layer, plan.local_experts(), plan.layout, blob.data(), threads);
    const double seconds = seconds_since(start);
    time.seconds = i == 0 ? seconds : std::min(time.seconds, seconds);
  }
  probe.copy_round();
  time.memcpy_gbs = probe.copy_gbs();
  return time;
}

}  // namespace moekit::api
