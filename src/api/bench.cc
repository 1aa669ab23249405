// run_bench: times a planned layer with weights that no cache holds, next to the roofs that bound
// it.
#include "moekit/bench.h"

#include <algorithm>
#include <cmath>

#include "api/bench_gpu.h"
#include "api/bench_parts.h"
#include "api/bench_peers.h"
#include "api/bench_routing.h"
#include "api/bench_work.h"
#include "api/doctor.h"
#include "api/probe.h"
#include "base/check.h"
#include "base/math.h"
#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "engine/plan.h"
#include "moekit/communicator.h"
#include "problem/canonical_layer.h"

namespace moekit {
namespace {

// Sixteen routings, as in the measuring rules of the CPU targets: successive calls touch other
// experts.
constexpr int kRoutings = 16;
// A weight counts as cold when this many times the last-level cache has passed since its last use.
constexpr int64_t kColdFactor = 4;
constexpr int kMaxCopies = 32;
constexpr int kMinCalls = 5;
constexpr int kMaxCalls = 100'000;
// Probes run between calls after this much timed work.
constexpr double kProbeEverySeconds = 0.5;
// Peers take turns after this much timed work.
constexpr double kPeersEverySeconds = 0.15;
// Calls of the exchange alone vary less than whole ones.
constexpr double kExchangeSeconds = 0.4;

/// Work of one call beyond the routed experts.
struct Extras {
  double bytes = 0, flops = 0;
};

Extras extras_of(const MoeConfig& c, const BenchRequest& request, double tokens) {
  Extras extras;
  const int64_t halves = c.activation.gated ? 2 : 1;
  if (request.include_router) {
    extras.bytes += static_cast<double>(c.num_experts * c.hidden * 2);
    extras.flops += 2.0 * tokens * static_cast<double>(c.num_experts * c.hidden);
  }
  if (request.include_shared && c.shared.inter > 0) {
    extras.bytes += static_cast<double>(
        halves * api::matrix_bytes(c.shared.gate_up_weights, c.shared.inter, c.hidden) +
        api::matrix_bytes(c.shared.down_weights, c.hidden, c.shared.inter));
    extras.flops += 2.0 * tokens * static_cast<double>((halves + 1) * c.hidden * c.shared.inter);
  }
  if (c.latent > 0) {
    extras.bytes += static_cast<double>(2 * c.latent * c.hidden * 2);
    extras.flops += 4.0 * tokens * static_cast<double>(c.latent * c.hidden);
  }
  return extras;
}

/// Everything that one point rotates through.
class Rotation {
 public:
  Rotation(const BenchRequest& request, const LayerSource& source, int64_t tokens_total,
           std::vector<int32_t> first_rank_experts)
      : hidden_(random_hidden(tokens_total, source.config.hidden, request.seed)) {
    if (source.config.router.hash_routing && request.include_router) {
      token_ids_ = random_token_ids(tokens_total, source.hash_rows, request.seed);
    }
    if (request.include_router) return;
    const api::RoutingShape shape{tokens_total, source.config.top_k, source.config.num_experts,
                                  std::move(first_rank_experts)};
    samples_ = api::make_routings(request.routing, shape, request.seed, kRoutings);
  }

  RankedInputs inputs(int64_t call) const {
    RankedInputs in;
    in.hidden = hidden_.view;
    in.token_ids = token_ids_.view;
    if (samples_.empty()) return in;
    const engine::SyntheticRouting& sample = samples_[static_cast<size_t>(call) % samples_.size()];
    const int64_t rows = hidden_.view.shape[0];
    const int64_t top_k = rows > 0 ? static_cast<int64_t>(sample.ids.size()) / rows : 1;
    in.topk_ids = TensorView::contiguous(sample.ids.data(), DType::i32, {rows, top_k});
    in.topk_weights = TensorView::contiguous(sample.weights.data(), DType::f32, {rows, top_k});
    return in;
  }

  /// Calls of every variant.
  std::vector<RankedInputs> all_inputs() const {
    std::vector<RankedInputs> all;
    for (size_t i = 0; i < std::max<size_t>(1, samples_.size()); ++i)
      all.push_back(inputs(static_cast<int64_t>(i)));
    return all;
  }

  /// Ids of every variant; with the layer's own router, what it chose.
  std::vector<std::vector<int32_t>> all_ids(const RankedLayer& layer) const {
    std::vector<std::vector<int32_t>> all;
    for (const engine::SyntheticRouting& sample : samples_) all.push_back(sample.ids);
    if (samples_.empty()) {
      RankedOutputs outputs;
      layer.run(inputs(0), outputs);
      all.push_back(outputs.topk_ids);
    }
    return all;
  }

 private:
  OwnedTensor hidden_, token_ids_;
  std::vector<engine::SyntheticRouting> samples_;
};

/// The layer in as many copies as the rotation needs to leave the cache.
class Bench {
 public:
  Bench(const BenchRequest& request, const std::function<void(const std::string&)>& progress)
      : request_(request),
        source_(api::timed_source(request)),
        progress_(progress),
        cache_bytes_(largest_cache(request.options.comm)),
        probe_(total_threads(), cache_bytes_) {
    capacity_ = checked_mul(*std::max_element(request.tokens.begin(), request.tokens.end()),
                            request.num_ranks, "tokens of all ranks");
    if (request.num_ranks > 1) {
      tell("making the ranks of the exchange");
      exchange_.emplace(api::exchange_source(source_.config, request.options.tp, request.seed),
                        request.options, request.num_ranks, capacity_ / request.num_ranks);
    }
    if (request.exchange_only) return;
    check_memory();
    tell("timing the packing of weights");
    packing_ = api::time_packing(source_, request.options, request.num_ranks, probe_);
    add_copy();
    if (!request.peers.empty()) {
      const auto say = [this](const std::string& what) { tell(what); };
      peers_ = std::make_unique<api::PeerBench>(request, source_, capacity_, say);
    }
  }

  BenchPoint point(int64_t tokens) {
    BenchPoint p;
    p.tokens = tokens;
    p.tokens_total = tokens * request_.num_ranks;
    p.routing = request_.include_router ? "router" : request_.routing;
    if (exchange_) p.exchange = time_exchange(p);
    if (request_.exchange_only) return of_exchange(std::move(p));
    p.packing = packing_;
    p.plan = copies_.front().explanation().plan;
    const Rotation rotation(request_, source_, p.tokens_total, first_rank_experts());
    describe_work(p, rotation);
    if (peers_) {
      peers_->begin(rotation.all_inputs(), static_cast<int>(copies_.size()));
      tell(fmt::format("{} tokens a rank", tokens));
    }
    time(p, rotation);
    if (peers_) p.peers = peers_->finish();
    p.probe = probe_.best();
    const double by_bytes = p.total_bytes() / p.probe.bandwidth_gbs / 1e3;
    const double by_flops = p.flops / p.probe.matrix_tflops / 1e6;
    p.floor_us = std::max(by_bytes, by_flops);
    return p;
  }

 private:
  /// Ranks that are processes repeat the same calls, whatever their hosts are.
  static int64_t largest_cache(const CommunicatorHandle& ranks) {
    const int64_t mine = api::look_at_cpu().last_level_cache_bytes;
    if (ranks.impl == nullptr) return mine;
    std::vector<int64_t> all(static_cast<size_t>(ranks.size()));
    ranks.impl->allgather(&mine, all.data(), sizeof(mine), {"bench: cache", 0});
    return *std::max_element(all.begin(), all.end());
  }

  /// One rank is enough, and alone: two would halve each other's roofs.
  void probe_round() {
    if (request_.options.comm.rank() == 0) probe_.round();
  }

  void tell(const std::string& what) const {
    if (progress_) progress_(what);
  }

  /// With given ids: the layer's own router is no part of the exchange.
  ExchangeTime time_exchange(const BenchPoint& p) {
    BenchRequest given = request_;
    given.include_router = false;
    const Rotation rotation(given, source_, p.tokens_total, first_rank_experts());
    return exchange_->time(rotation.inputs(0), std::min(request_.min_seconds, kExchangeSeconds),
                           probe_);
  }

  /// The exchange is all that there is.
  BenchPoint of_exchange(BenchPoint p) {
    const ExchangeTime& time = *p.exchange;
    p.plan = exchange_->explanation().plan;
    p.median_us = time.median_us;
    p.p5_us = time.p5_us;
    p.p95_us = time.p95_us;
    p.repeat = time.repeat;
    p.wire_bytes = std::max(0.0, time.bytes);
    p.floor_us = time.floor_us();
    probe_round();
    p.probe = probe_.best();
    return p;
  }

  int total_threads() const {
    const int usable = usable_cpus();
    const int of_rank = request_.options.num_threads > 0 ? request_.options.num_threads
                                                         : std::max(1, usable / request_.num_ranks);
    return std::min(of_rank * request_.num_ranks, std::max(usable, of_rank));
  }

  /// Better an error than the kernel's choice of a victim.
  void check_memory() const {
    const int64_t per_rank = ceil_div(capacity_, request_.num_ranks);
    const Explanation plan = explain_plan(source_, request_.options, request_.num_ranks, per_rank);
    const int64_t needed =
        (plan.plan.weights_bytes + plan.plan.workspace_bytes + plan.plan.heap_bytes) *
        request_.num_ranks;
    const int64_t available = api::look_at_memory().available_bytes;
    MOEKIT_CHECK_AS(ErrorCode::out_of_memory, !plan.chosen || available == 0 || needed < available,
                    "packed weights and workspace: expected {} bytes of memory, {} are available; "
                    "time a smaller problem or fewer tokens",
                    needed, available);
  }

  void add_copy() {
    tell("packing weights");
    copies_.emplace_back(source_, request_.options, request_.num_ranks, capacity_);
  }

  std::vector<int32_t> first_rank_experts() const {
    PlanOptions options = request_.options;
    options.max_tokens = 1;
    std::vector<CommunicatorHandle> ends;
    if (request_.num_ranks > 1) {
      ends = make_thread_ranks(request_.num_ranks, options.deadline, options.num_nodes);
      options.comm = ends.front();
    }
    return engine::make_problem(*source_.canonical, options).placement->experts_of(0);
  }

  /// Fills work and working set of `p`, and makes copies until the weights are cold.
  void describe_work(BenchPoint& p, const Rotation& rotation) {
    const MoeConfig& c = source_.config;
    const api::Touched touched =
        api::count_touched(rotation.all_ids(copies_.front()), c.num_experts);
    const Extras extras = extras_of(c, request_, static_cast<double>(p.tokens_total));
    const auto rows = static_cast<double>(p.tokens_total);
    p.active_experts = touched.active;
    p.weights_bytes = touched.active * static_cast<double>(api::expert_bytes(c)) + extras.bytes;
    // Hidden rows come as bf16 and leave as f32.
    p.activations_bytes = rows * static_cast<double>(c.hidden) * (2 + 4);
    p.flops = touched.slots * api::flops_per_slot(c) + extras.flops;
    p.wire_bytes = static_cast<double>(copies_.front().wire_bytes());
    p.wire_bytes *= rows / static_cast<double>(std::max<int64_t>(1, capacity_));
    const int64_t once = touched.in_rotation * api::expert_bytes(c);
    const int64_t wanted = kColdFactor * cache_bytes_;
    while (once > 0 && once * static_cast<int64_t>(copies_.size()) < wanted &&
           copies_.size() < kMaxCopies) {
      add_copy();
    }
    p.working_set_bytes = once * static_cast<int64_t>(copies_.size());
    p.cold = p.working_set_bytes > cache_bytes_;
  }

  void time(BenchPoint& p, const Rotation& rotation) {
    const auto num_copies = static_cast<int64_t>(copies_.size());
    std::vector<double> times;
    double elapsed = 0, since_probe = 0;
    int64_t turn = 0, next_turns = 1;
    const auto run_next = [&] {
      const int64_t copy = turn % num_copies;
      copies_[static_cast<size_t>(copy)].run(rotation.inputs(turn / num_copies + copy), outputs_, 1,
                                             0, false);
      ++turn;
    };
    // Every copy runs once untimed, and twice at least: pages and pools are then warm, weights are
    // not.
    while (turn < std::max<int64_t>(2, num_copies)) run_next();
    probe_round();
    while (static_cast<int64_t>(times.size()) < kMaxCalls) {
      run_next();
      times.push_back(outputs_.time_us.front());
      elapsed += times.back() / 1e6;
      since_probe += times.back() / 1e6;
      if (elapsed >= request_.min_seconds && times.size() >= kMinCalls) break;
      if (since_probe >= kProbeEverySeconds) {
        probe_round();
        since_probe = 0;
      }
      if (peers_ && elapsed >= static_cast<double>(next_turns) * kPeersEverySeconds) {
        ++next_turns;
        if (peers_->take_turns(elapsed)) run_next();  // untimed: the pools have slept
      }
    }
    probe_round();
    std::sort(times.begin(), times.end());
    p.repeat = static_cast<int64_t>(times.size());
    p.median_us = api::percentile(times, 0.5);
    p.p5_us = api::percentile(times, 0.05);
    p.p95_us = api::percentile(times, 0.95);
  }

  const BenchRequest& request_;
  LayerSource source_;
  const std::function<void(const std::string&)>& progress_;
  int64_t cache_bytes_ = 0;
  api::Probe probe_;
  int64_t capacity_ = 0;
  std::optional<api::ExchangeBench> exchange_;
  PackingTime packing_;
  std::vector<RankedLayer> copies_;
  std::unique_ptr<api::PeerBench> peers_;  ///< null: none are asked for
  RankedOutputs outputs_;
};

}  // namespace

void run_bench(const BenchRequest& request, const std::function<void(const BenchPoint&)>& report,
               const std::function<void(const std::string&)>& progress) {
  MOEKIT_CHECK(!request.tokens.empty(), "bench: expected at least one token count, got none");
  MOEKIT_CHECK(!request.exchange_only || request.num_ranks > 1,
               "the exchange alone: expected 2 ranks or more, got {}", request.num_ranks);
  for (int64_t tokens : request.tokens) {
    MOEKIT_CHECK(tokens >= 1, "bench: token counts must be 1 or more, got {}", tokens);
  }
  const auto time_all = [&](auto&& bench) {
    for (int64_t tokens : request.tokens) {
      if (progress) progress(fmt::format("{} tokens a rank", tokens));
      report(bench.point(tokens));
    }
  };
  if (request.options.device.type == DeviceType::cuda) {
    time_all(api::GpuBench(request, progress));
  } else {
    time_all(Bench(request, progress));
  }
}

}  // namespace moekit
