#include "engine/layer_runtime.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/math.h"
#include "engine/device_store.h"
#include "engine/pack_cache.h"
#include "linear/cpu_isa.h"
#include "quant/stored_codec.h"

namespace moekit::engine {
namespace {

// Progress is told after so many packed bytes, but not after more than this share of all.
constexpr int64_t kPartBytes = int64_t{16} << 20;
constexpr int64_t kMostParts = 32;

Buffer widen(const StoredVector& v, Allocator* allocator) {
  Buffer buffer(v.size * static_cast<int64_t>(sizeof(float)), allocator);
  for (int64_t i = 0; i < v.size; ++i) buffer.as<float>()[i] = quant::element(v, i);
  return buffer;
}

}  // namespace

CallState::CallState(const LayerRuntime& layer)
    : buffer(layer.workspace_bytes(), layer.allocator()),
      heap(layer.make_heap()),
      device(layer.make_device_workspace()),
      threads(layer.plan().num_threads),
      trace(layer.make_trace_context()) {}

std::unique_ptr<comm::SymmetricHeap> LayerRuntime::make_heap() const {
  const prepare::HeapNeed& need = plan_->heap;
  if (!need.any()) return nullptr;
  return tp_.rows().make_heap(need.bytes, need.num_flags, {"plan: symmetric heap", 0, number_});
}

trace::Context LayerRuntime::make_trace_context() const {
  trace::Context context;
  context.call = -1;  // the first call counts up to 0
  context.workspace = num_workspaces_.fetch_add(1, std::memory_order_relaxed);
  context.recorder = options_.trace.recorder().get();
  if (context.recorder != nullptr) {
    context.rings = context.recorder->add_rank(options_.comm.impl->rank(), plan_->num_threads,
                                               device_ != nullptr);
  }
  return context;
}

LayerRuntime::LayerRuntime(std::shared_ptr<const CanonicalLayer> canonical,
                           const PlanOptions& options)
    : canonical_(std::move(canonical)), options_(options) {
  if (options_.comm.impl == nullptr) options_.comm.impl = comm::make_self();
  number_ = options_.comm.impl->number_layer();
  options_.max_tokens = agree_on_capacity(*options_.comm.impl, number_, options.max_tokens);
  make_plan_together();
  tp_ = TensorParallel(options_.comm.impl, options_.tp);
  or_abort(FaultsOf::this_rank, [&] { pack(); });
}

/// A rank without a plan says so to the others, which would wait for its first call.
void LayerRuntime::make_plan_together() {
  std::exception_ptr failure;
  std::vector<PlanField> fields;
  try {
    MOEKIT_CHECK(options_.arch.empty(),
                 "arch {} plans for a GPU that need not be here, which only explain does; leave it "
                 "out to run",
                 options_.arch);
    const std::shared_ptr<const CanonicalLayer> whole = canonical_;
    canonical_ = rank_layer(whole, options_);
    config_ = make_problem(*whole, options_).config;
    const Problem problem = make_problem(*canonical_, options_);
    explanation_ = explain(*canonical_, problem, options_, &plan_);
    if (plan_ == nullptr) make_plan(*canonical_, problem, options_);  // throws with every reason
    fields = plan_->fields;
    if (plan_->problem.tp_size > 1) add_sliced_parts(config_, fields);
  } catch (...) {
    failure = std::current_exception();
  }
  agree_on_plan(*options_.comm.impl, number_, fields, failure);
}

void LayerRuntime::pack() {
  ThreadPool threads(plan_->num_threads);
  const MoeConfig& config = plan_->problem.config;
  Allocator* allocator = options_.allocator;
  store_ = ExpertStore(*plan_, allocator);
  pack_experts(threads);
  if (options_.load_statistics) load_.start(config.num_experts, plan_->problem.num_ranks);
  const CanonicalRouter& router = canonical_->router;
  if (!router.weight.empty()) router_ = DenseMatrix::make(router.weight, threads, allocator);
  if (!router.logit_bias.empty()) logit_bias_ = widen(router.logit_bias, allocator);
  if (!router.selection_bias.empty()) selection_bias_ = widen(router.selection_bias, allocator);
  if (config.latent > 0) {
    latent_in_ = DenseMatrix::make(canonical_->latent_in, threads, allocator);
    latent_out_ = DenseMatrix::make(canonical_->latent_out, threads, allocator);
  }
  if (config.shared.inter > 0) {
    shared_ = SharedExpert(*canonical_, config, threads, allocator);
    if (config.shared.sigmoid_gate) {
      shared_gate_ = DenseMatrix::make(canonical_->shared_gate, threads, allocator);
    }
  }
  regions_ = plan_->layer_regions;
}

void LayerRuntime::pack_experts(ThreadPool& threads) {
  const WeightLayout& layout = plan_->layout;
  auto pack = [&] {
    if (options_.packing_progress) return pack_in_parts(threads);
    plan_->choice.experts->pack(*canonical_, plan_->local_experts(), layout, store_.blob(),
                                threads);
  };
  PackOutcome outcome = PackOutcome::off;
  if (layout.on_device) {
    device_ =
        std::move(upload_experts(*canonical_, *plan_, 1, threads, options_.allocator).front());
  } else if (layout.total_bytes() == 0) {
    // Read in place.
  } else if (options_.pack_cache.empty()) {
    pack();
  } else {
    const PackCache cache(options_.pack_cache);
    const Digest key = PackCache::key_of(*canonical_, plan_->local_experts(), layout,
                                         to_string(linear::default_isa()), threads);
    outcome = cache.fill(key, store_.blob(), layout.total_bytes(), threads, pack);
  }
  explanation_.plan.pack_cache = to_string(outcome);
  options_.packing_progress = nullptr;  // what it refers to may end before the layer
}

void LayerRuntime::pack_in_parts(ThreadPool& threads) {
  const experts::Experts& member = *plan_->choice.experts;
  const std::span<const int32_t> local = plan_->local_experts();
  const WeightLayout& layout = plan_->layout;
  const int64_t total = layout.total_bytes(), count = layout.num_local_experts;
  const int64_t parts = std::clamp<int64_t>(total / kPartBytes, 1, kMostParts);
  const int64_t step = std::max<int64_t>(1, ceil_div(count, parts));
  std::vector<std::byte*> places(local.size(), nullptr);
  options_.packing_progress(0, total);
  member.pack_head(*canonical_, local, layout, store_.blob());
  for (int64_t first = 0; first < count; first += step) {
    const int64_t last = std::min(count, first + step);
    std::fill(places.begin(), places.end(), nullptr);
    for (int64_t e = first; e < last; ++e) {
      const auto at = static_cast<size_t>(e);
      places[at] = store_.blob() + layout.expert_offset[at];
    }
    member.pack_experts(*canonical_, local, layout, places, threads);
    options_.packing_progress(layout.expert_offset[static_cast<size_t>(last)], total);
  }
}

template <typename Body>
void LayerRuntime::or_abort(FaultsOf faults, Body&& body) const {
  const auto end_waits = [&](const std::exception& error) {
    if (options_.comm.impl->size() > 1) abort(error.what());
  };
  try {
    body();
  } catch (const Error& error) {
    // What all ranks refuse alike leaves their groups as they were.
    if (faults == FaultsOf::this_rank || error.code() != ErrorCode::invalid_argument) {
      end_waits(error);
    } else {
      note_refusal(error);
    }
    throw;
  } catch (const std::exception& error) {
    end_waits(error);
    throw;
  }
}

void LayerRuntime::note_refusal(const Error& error) const noexcept {
  // With slices the ranks meet in groups that nobody else holds an end of.
  if (!tp_.on()) options_.comm.impl->note_refusal(error);
}

template <typename Step>
void LayerRuntime::in_groups(Step&& step) const {
  try {
    step();
  } catch (const Error& error) {
    const bool lost = error.code() == ErrorCode::comm || error.code() == ErrorCode::timeout;
    if (lost && tp_.on()) abort(error.what());
    // A rank that fails alone has failed its group before.
    if (error.code() == ErrorCode::invalid_argument) note_refusal(error);
    throw;
  }
}

void LayerRuntime::begin(CallState& state, const LayerArgs& args, void* stream) const {
  ++state.trace.call;
  const trace::Attach attach(state.trace);
  state.on_device = device_ != nullptr && args.hidden.device.type == DeviceType::cuda;
  if (state.on_device) {
    check_device_args(args);
    state.args = args;
    return enqueue(state, stream);
  }
  or_abort(FaultsOf::this_rank, [&] { set_up(state, args); });
  state.call.stream = stream;
  in_groups([&] { dispatch(state.call); });  // tells the other ranks of this one's faults by itself
  load_.count(plan_->problem, state.call.routing);
  if (args.out_dropped != nullptr) *args.out_dropped = state.call.dropped;
}

/// Everything of a call that needs no other rank.
void LayerRuntime::set_up(CallState& state, const LayerArgs& args) const {
  check_args(args);
  state.args = args;
  state.call = Call{.plan = plan_.get(),
                    .blob = store_.blob(),
                    .canonical = canonical_.get(),
                    .workspace = state.buffer.data(),
                    .threads = &state.threads,
                    .comm = &tp_.rows(),
                    .heap = state.heap.get(),
                    .device = state.device.get(),
                    .number = next_call_.fetch_add(1, std::memory_order_relaxed),
                    .layer = number_,
                    .skip_experts = args.skip_experts,
                    .trace = &state.trace};
  load_input(state);
  if (args.topk_ids.empty()) {
    route(state);
  } else {
    take_routing(state);
  }
  write_routing(state);
  set_rows(state);
  state.call.routed = routed_rows(state);
}

void LayerRuntime::middle(CallState& state) const {
  if (state.on_device) return;
  const trace::Attach attach(state.trace);
  or_abort(FaultsOf::all_ranks, [&] {
    experts(state.call);
    run_shared(state);  // while results are on their way
  });
}

void LayerRuntime::end(CallState& state) const {
  if (state.on_device) return;
  const trace::Attach attach(state.trace);
  or_abort(FaultsOf::all_ranks, [&] {
    combine(state.call);
    if (tp_.on()) sum_slices(state);
    write_output(state);
  });
}

void LayerRuntime::sum_slices(CallState& state) const {
  const trace::Span span(trace::Stage::slices);
  std::byte* base = state.buffer.data();
  tp_.sum({.routed = state.call.routed,
           .width = config_.routed_width(),
           .shared = has_shared() ? regions_.shared.in<float>(base) : nullptr,
           .hidden = config_.hidden,
           .tokens = state.args.hidden.shape[0],
           .call = state.call.number,
           .layer = number_},
          regions_.slices, base, state.threads);
}

void LayerRuntime::route(CallState& state) const {
  const MoeConfig& config = plan_->problem.config;
  const int64_t tokens = state.args.hidden.shape[0];
  trace::Span span(trace::Stage::route);
  span.facts().tokens = tokens;
  std::byte* base = state.buffer.data();
  float* logits = regions_.logits.in<float>(base);
  router_.run(state.x, state.x_stride, tokens, logits, base + regions_.scratch.offset,
              state.threads);
  if (config.router.has_logit_bias) {
    const float* bias = logit_bias_.as<float>();
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = 0; e < config.num_experts; ++e)
        logits[t * config.num_experts + e] += bias[e];
    }
  }
  load_token_ids(state);
  layer_router().run({.spec = &config.router,
                      .num_tokens = tokens,
                      .num_experts = config.num_experts,
                      .top_k = config.top_k,
                      .logits = logits,
                      .selection_bias = selection_bias_.as<float>(),
                      .token_ids = regions_.token_ids.in<int64_t>(base),
                      .hash_table = canonical_->router.hash_table,
                      .hash_rows = canonical_->router.hash_rows,
                      .ids = regions_.ids.in<GlobalExpert>(base),
                      .weights = regions_.weights.in<float>(base),
                      .workspace = base + regions_.scratch.offset,
                      .threads = &state.threads});
  state.call.routing = {tokens, config.top_k, regions_.ids.in<GlobalExpert>(base),
                        regions_.weights.in<float>(base)};
}

void LayerRuntime::run_shared(CallState& state) const {
  if (shared_.empty() || state.args.skip_experts) return;
  const int64_t tokens = state.args.hidden.shape[0];
  trace::Span span(trace::Stage::shared);
  span.facts().tokens = tokens;
  std::byte* base = state.buffer.data();
  float* out = regions_.shared.in<float>(base);
  shared_.run(state.x, state.x_stride, tokens, out, base + regions_.scratch.offset, state.threads);
  if (shared_gate_.empty()) return;
  float* gate = regions_.gate.in<float>(base);
  const int64_t hidden = plan_->problem.config.hidden;
  shared_gate_.run(state.x, state.x_stride, tokens, gate, base + regions_.scratch.offset,
                   state.threads);
  auto scale = [&](int64_t t, int) {
    const float factor = 1.0f / (1.0f + std::exp(-gate[t]));
    for (int64_t i = 0; i < hidden; ++i) out[t * hidden + i] *= factor;
  };
  state.threads.parallel_for(tokens, scale);
}

}  // namespace moekit::engine
