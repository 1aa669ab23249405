#include "api/bench_peers.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "api/bench_parts.h"
#include "api/doctor.h"
#include "base/check.h"
#include "base/thread_pool.h"
#include "engine/plan.h"
#include "problem/canonical_layer.h"
#include "quant/stored_codec.h"

namespace moekit::api {
namespace {

// A peer's turn: long against its first call, short against the minutes in which the machine
// drifts.
constexpr double kTurnSeconds = 0.15;
// Calls are not repeated untimed at the start of a turn when one takes longer than this.
constexpr double kShortCallSeconds = 0.05;
constexpr int64_t kMostCalls = 1000;
constexpr int64_t kFewestCalls = 3;
// OpenMP's workers spin for a while after a loop (libgomp: 300,000 pauses, up to 15 ms) and would
// take the next one's CPUs.
constexpr auto kPause = std::chrono::milliseconds(20);
// Rows that are held to the reference.
constexpr int64_t kCheckedRows = 8;
// A bf16 peer rounds weights (where they are no bf16 values), both products, the intermediate and
// the router weight: five times by 2^-8 at most. An f32 peer differs by the order of its sums.
constexpr double kBoundBf16 = 5 * 0x1p-8;
constexpr double kBoundF32 = 1e-3;

/// Why no peer can stand beside this bench; empty: they can.
std::string misfit(const BenchRequest& request, const MoeConfig& config) {
  if (request.num_ranks > 1) {
    return fmt::format("peers run on one rank, this bench has {}", request.num_ranks);
  }
  if (request.include_router || (request.include_shared && config.shared.inter > 0))
    return "peers compute the routed experts alone; leave --include out";
  if (config.latent > 0) return "peers have no latent projections";
  if (config.weight_on_input) return "peers weight the experts' output, this layer their input";
  return {};
}

/// Operands that lose nothing of what our own back-end reads.
DType operand_of(const MoeConfig& resolved) {
  const bool f32 = resolved.gate_up_input.format == ActivationFormat::f32 ||
                   resolved.down_input.format == ActivationFormat::f32;
  return f32 ? DType::f32 : DType::bf16;
}

/// Decoded matrices of one expert.
class DecodedExpert {
 public:
  explicit DecodedExpert(int num_threads) : threads_(num_threads) {}

  PeerExpert decode(const StoredExpert& expert) {
    PeerExpert view;
    view.gate = matrix(expert.gate, gate_);
    view.up = matrix(expert.up, up_);
    view.down = matrix(expert.down, down_);
    view.gate_bias = vector(expert.gate_bias, gate_bias_);
    view.up_bias = vector(expert.up_bias, up_bias_);
    view.down_bias = vector(expert.down_bias, down_bias_);
    return view;
  }

 private:
  std::span<const float> matrix(const StoredMatrix& m, std::vector<float>& out) {
    if (m.empty()) return {};
    out.resize(static_cast<size_t>(m.rows * m.cols));
    auto row = [&](int64_t n, int) {
      quant::decode_weights(m, n, 0, m.cols, out.data() + n * m.cols);
    };
    threads_.parallel_for(m.rows, row);
    return out;
  }
  static std::span<const float> vector(const StoredVector& v, std::vector<float>& out) {
    out.resize(static_cast<size_t>(v.empty() ? 0 : v.size));
    for (size_t i = 0; i < out.size(); ++i) out[i] = quant::element(v, static_cast<int64_t>(i));
    return out;
  }

  ThreadPool threads_;
  std::vector<float> gate_, up_, down_, gate_bias_, up_bias_, down_bias_;
};

/// Runs `step` and returns what it threw.
template <typename Step>
std::string reason_of(Step&& step) {
  try {
    step();
    return {};
  } catch (const std::bad_alloc&) {
    return "expected memory for its weights and rows, there is none";
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace

PeerBench::PeerBench(const BenchRequest& request, const LayerSource& source, int64_t most_tokens,
                     std::function<void(const std::string&)> tell)
    : request_(request), source_(source), tell_(std::move(tell)) {
  for (const auto& peer : request.peers) contenders_.push_back({.peer = peer});
  const std::string reason = misfit(request, source.config);
  for (Contender& contender : contenders_) contender.broken = reason;
  if (!reason.empty()) return;
  PlanOptions options = request.options;
  options.max_tokens = 1;
  const MoeConfig resolved = engine::make_problem(*source.canonical, options).config;
  PeerLayer layer;
  layer.config = source.config;
  layer.dtype = operand_of(resolved);
  layer.device = options.device;
  layer.num_threads = options.num_threads > 0 ? options.num_threads : usable_cpus();
  layer.rows_per_expert =
      std::max(1.0, static_cast<double>(most_tokens * source.config.top_k) /
                        static_cast<double>(std::max<int64_t>(1, source.config.num_experts)));
  layer.reserve = [this](int64_t bytes) {
    const int64_t seen = look_at_memory().available_bytes;
    const int64_t available = seen - reserved_;
    if (seen > 0 && bytes > available / 10 * 9) {
      fail(ErrorCode::out_of_memory,
           "expected {} bytes of memory for its weights, {} are available", bytes,
           std::max<int64_t>(0, available));
    }
    reserved_ += bytes;
  };
  open(source, layer);
}

void PeerBench::open(const LayerSource& source, const PeerLayer& layer) {
  for (Contender& c : contenders_) {
    tell_(fmt::format("{}: looking for it", c.peer->name()));
    c.broken = reason_of([&] { c.peer->open(layer); });
  }
  const auto usable = [](const Contender& c) { return c.broken.empty(); };
  if (std::none_of(contenders_.begin(), contenders_.end(), usable)) return;
  DecodedExpert decoded(layer.num_threads);
  const std::vector<StoredExpert>& experts = source.canonical->experts;
  for (size_t e = 0; e < experts.size(); ++e) {
    tell_(fmt::format("peers: weights of expert {} of {}", e + 1, experts.size()));
    const PeerExpert weights = decoded.decode(experts[e]);
    for (Contender& c : contenders_) {
      if (!c.broken.empty()) continue;
      c.broken = reason_of([&] { c.peer->add_expert(static_cast<int64_t>(e), weights); });
    }
  }
  for (Contender& c : contenders_) {
    if (c.broken.empty()) c.broken = reason_of([&] { c.peer->set_copies(1); });
  }
}

/// The first rows by the reference back-end, with activations that nothing rounds.
std::vector<float> PeerBench::reference(const RankedInputs& inputs, int64_t rows) const {
  RankedInputs first = inputs;
  for (TensorView* view : {&first.hidden, &first.topk_ids, &first.topk_weights})
    view->shape[0] = rows;
  PlanOptions options = request_.options;
  options.device = {};
  options.backend = "ref";
  options.activations = ActivationFormat::f32;
  options.pack_cache.clear();
  options.combine_dtype = DType::f32;
  options.wire = Wire::automatic;
  const RankedLayer layer(source_, options, 1, rows);
  RankedOutputs outputs;
  layer.run(first, outputs, 1, 0, false);
  return std::move(outputs.output);
}

void PeerBench::begin(const std::vector<RankedInputs>& calls, int num_copies) {
  num_calls_ = static_cast<int>(calls.size());
  num_copies_ = num_copies;
  num_tokens_ = calls.front().hidden.shape[0];
  std::vector<PeerCall> peer_calls;
  for (const RankedInputs& in : calls)
    peer_calls.push_back({in.hidden, in.topk_ids, in.topk_weights});
  const int64_t rows = std::min(num_tokens_, kCheckedRows);
  std::vector<float> expected;
  for (Contender& c : contenders_) {
    c.result = {.name = c.peer->name(), .reason = c.broken};
    c.times.clear();
    c.seconds = 0;
    c.turns = 0;
    if (!c.active()) continue;
    tell_(fmt::format("{}: preparing {} tokens", c.peer->name(), num_tokens_));
    c.result.reason = reason_of([&] {
      reserved_ = 0;  // what was reserved before is taken
      c.peer->set_copies(num_copies);
      c.peer->set_calls(peer_calls);
      if (expected.empty()) expected = reference(calls.front(), rows);
      try_out(c, expected, rows);
    });
  }
}

/// One call whose values are right, and the others that warm up.
void PeerBench::try_out(Contender& c, const std::vector<float>& expected, int64_t rows) {
  const int64_t width = source_.config.hidden;
  std::vector<float> output(static_cast<size_t>(num_tokens_ * width));
  c.peer->run(output);
  c.result.identity = c.peer->identity();
  const Errors errors = compare(output.data(), expected.data(), rows, width);
  c.result.rel_rms = errors.rel_rms;
  const double bound = c.result.identity.dtype == "f32" ? kBoundF32 : kBoundBf16;
  if (errors.nonfinite_mismatches > 0 || !(errors.rel_rms <= bound)) {
    fail(ErrorCode::unsupported,
         "computes something else: relative RMS {:.2e} from the reference where {:.2e} is the "
         "bound, {} values finite in one of the two only; not timed",
         errors.rel_rms, bound, errors.nonfinite_mismatches);
  }
  if (!on_gpu()) run(c, 1);
}

PeerTurn PeerBench::turn_of(int64_t number) const {
  const int64_t copy = number % num_copies_;
  return {static_cast<int>(copy), static_cast<int>((number / num_copies_ + copy) % num_calls_)};
}

std::vector<double> PeerBench::run(Contender& c, int64_t count) {
  std::vector<PeerTurn> turns;
  for (int64_t i = 0; i < count; ++i) turns.push_back(turn_of(c.turns++));
  std::vector<double> times = c.peer->time(turns);
  c.last_seconds = times.back() / 1e6;
  return times;
}

void PeerBench::take_turn(Contender& c, double seconds) {
  if (c.last_seconds < kShortCallSeconds) run(c, 1);
  const auto count = static_cast<int64_t>(seconds / std::max(1e-6, c.last_seconds));
  for (const double us : run(c, std::clamp<int64_t>(count, 1, kMostCalls))) {
    c.times.push_back(us);
    c.seconds += us / 1e6;
  }
}

bool PeerBench::take_turns(double own_seconds) {
  bool ran = false;
  for (Contender& c : contenders_) {
    if (!c.active() || c.seconds >= own_seconds) continue;
    std::this_thread::sleep_for(kPause);
    c.result.reason = reason_of([&] { take_turn(c, kTurnSeconds); });
    ran = true;
  }
  if (ran) std::this_thread::sleep_for(kPause);
  return ran;
}

void PeerBench::time_graphs(int untimed, int timed) {
  std::vector<PeerTurn> turns;
  for (int i = 0; i < num_calls_; ++i) turns.push_back({i % num_copies_, i});
  for (Contender& c : contenders_) {
    if (!c.active()) continue;
    tell_(fmt::format("{}: {} tokens", c.peer->name(), num_tokens_));
    c.result.reason = reason_of([&] {
      c.times = c.peer->time_graph(turns, untimed, timed);
      MOEKIT_CHECK_AS(ErrorCode::unsupported, !c.times.empty(), "it does not run on a GPU");
    });
  }
}

DenseRate PeerBench::dense_rate(bool fp8) {
  DenseRate rate;
  for (Contender& c : contenders_) {
    if (!c.broken.empty() || rate.tflops > 0) continue;
    rate.peer = c.peer->name();
    // A peer without this product may still have the layer's.
    reason_of([&] { rate.tflops = c.peer->dense_tflops(fp8); });
  }
  return rate;
}

std::vector<PeerTime> PeerBench::finish() {
  std::vector<PeerTime> results;
  for (Contender& c : contenders_) {
    while (!on_gpu() && c.active() && static_cast<int64_t>(c.times.size()) < kFewestCalls) {
      std::this_thread::sleep_for(kPause);
      c.result.reason = reason_of([&] { take_turn(c, kTurnSeconds); });
    }
    if (c.active()) {
      std::sort(c.times.begin(), c.times.end());
      c.result.repeat = static_cast<int64_t>(c.times.size());
      c.result.median_us = percentile(c.times, 0.5);
      c.result.p5_us = percentile(c.times, 0.05);
      c.result.p95_us = percentile(c.times, 0.95);
    }
    results.push_back(c.result);
  }
  return results;
}

}  // namespace moekit::api
