// RankedLayer: one Layer a rank, on threads of this process or one rank in each of several
// processes; shares of the tokens out, results back in order.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>

#include "api/microbatches.h"
#include "api/spin_barrier.h"
#include "base/check.h"
#include "base/log.h"
#include "base/math.h"
#include "base/rank_text.h"
#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "engine/plan_agreement.h"
#include "moekit/communicator.h"
#include "moekit/tools.h"

namespace moekit {
namespace {

using Clock = std::chrono::steady_clock;

/// Tokens [first, first + count) of rank r.
struct Share {
  int64_t first = 0;
  int64_t count = 0;
};

/// The first T % R ranks take one token more.
Share share_of(int64_t total, int num_ranks, int rank) {
  const int64_t base = total / num_ranks, extra = total % num_ranks;
  return {rank * base + std::min<int64_t>(rank, extra), base + (rank < extra ? 1 : 0)};
}

/// Rows of a view; an absent tensor stays absent.
TensorView rows_of(const TensorView& whole, Share share) {
  if (whole.empty()) return {};
  TensorView part = whole;
  part.shape[0] = share.count;
  part.data =
      static_cast<char*>(whole.data) + share.first * whole.strides[0] * bytes_of(whole.dtype);
  return part;
}

/// A rank that fails makes its peers fail as well, by timeout or as a broken group; the cause is
/// the error that is neither.
int cause_of(const std::vector<std::exception_ptr>& errors) {
  int first = -1;
  for (size_t r = 0; r < errors.size(); ++r) {
    if (!errors[r]) continue;
    if (first < 0) first = static_cast<int>(r);
    try {
      std::rethrow_exception(errors[r]);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::timeout && e.code() != ErrorCode::comm) return static_cast<int>(r);
    } catch (...) {
      return static_cast<int>(r);
    }
  }
  return first;
}

void rethrow_cause(const std::vector<std::exception_ptr>& errors) {
  const int rank = cause_of(errors);
  if (rank < 0) return;
  try {
    std::rethrow_exception(errors[static_cast<size_t>(rank)]);
  } catch (const Error& e) {
    if (errors.size() == 1) throw;
    const std::string text = e.what();
    const bool says_so =
        text.starts_with(fmt::format("rank {} ", rank));  // as in "rank 0 would get"
    throw Error(e.code(), says_so ? text : rank_text(rank, text));
  }
}

/// body(rank) on a thread a rank, rank 0 on the caller. Exceptions land in the result.
template <typename Body>
std::vector<std::exception_ptr> on_ranks(ThreadPool& team, Body&& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(team.num_threads()));
  auto guarded = [&](int rank) {
    try {
      body(rank);
    } catch (...) {
      errors[static_cast<size_t>(rank)] = std::current_exception();
    }
  };
  team.run(guarded);
  return errors;
}

void check_ranks(const PlanOptions& options, int num_ranks, int64_t total_tokens) {
  MOEKIT_CHECK(num_ranks >= 1 && num_ranks <= 1024, "ranks: expected 1 to 1024, got {}", num_ranks);
  MOEKIT_CHECK(total_tokens >= 0, "tokens: expected 0 or more, got {}", total_tokens);
  MOEKIT_CHECK(options.tp >= 1 && num_ranks % options.tp == 0,
               "tensor parallelism: {} ranks are no multiple of tp = {}", num_ranks, options.tp);
  MOEKIT_CHECK(options.comm.impl == nullptr || options.comm.size() == num_ranks,
               "a layer of {} ranks needs a group of as many, got one of {}", num_ranks,
               options.comm.size());
}

}  // namespace

struct RankedLayer::Impl {
  MoeConfig config;
  int num_ranks = 1;
  int tp = 1;  ///< so many neighbouring ranks get the same share of the tokens
  int64_t capacity = 0;
  int64_t wire_bytes = 0;
  /// This process's end of ranks that are processes; empty: all ranks are here.
  CommunicatorHandle group;
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::vector<float>> copies;  ///< outputs of ranks whose neighbour's one is handed out
  std::unique_ptr<ThreadPool> team;        ///< a thread a rank
  std::vector<std::unique_ptr<api::Microbatches>> microbatches;  ///< of each rank, as last asked

  int num_shares() const { return num_ranks / tp; }
  bool hands_out(int rank) const { return rank % tp == 0; }
  void make_here(const LayerSource& source, const PlanOptions& options);
  void make_one(const LayerSource& source, PlanOptions options);
  LayerArgs args_of(int rank, const RankedInputs& inputs, RankedOutputs& outputs, int64_t* dropped,
                    bool want_routing);
  /// The parts of a rank's calls, as many as asked. Collective.
  api::Microbatches& parts_of(size_t rank, size_t layer, int count);
  void run_here(const RankedInputs& inputs, RankedOutputs& outputs, const RunOptions& options);
  void run_one(const RankedInputs& inputs, RankedOutputs& outputs, const RunOptions& options);
  template <typename T>
  void share_rows(std::vector<T>& rows, int64_t total, int64_t width, const char* phase) const;
};

RankedLayer::RankedLayer(const LayerSource& source, const PlanOptions& options, int num_ranks,
                         int64_t total_tokens)
    : impl_(std::make_unique<Impl>()) {
  try {
    check_ranks(options, num_ranks, total_tokens);
  } catch (...) {
    engine::refuse_layer(options.comm.impl.get(), std::current_exception());
  }
  impl_->config = source.config;
  impl_->num_ranks = num_ranks;
  impl_->capacity = total_tokens;
  impl_->microbatches.resize(static_cast<size_t>(num_ranks));
  PlanOptions shared = options;
  impl_->tp = options.tp;
  impl_->copies.resize(static_cast<size_t>(num_ranks));
  shared.max_tokens = std::max<int64_t>(1, ceil_div(total_tokens, impl_->num_shares()));
  if (options.comm.impl != nullptr) {
    impl_->make_one(source, std::move(shared));
  } else {
    impl_->make_here(source, shared);
  }
}

void RankedLayer::Impl::make_here(const LayerSource& source, const PlanOptions& options) {
  layers.resize(static_cast<size_t>(num_ranks));
  team = std::make_unique<ThreadPool>(num_ranks);
  PlanOptions shared = options;
  if (shared.num_threads == 0) shared.num_threads = std::max(1, usable_cpus() / num_ranks);
  std::vector<CommunicatorHandle> ends(static_cast<size_t>(num_ranks));
  if (num_ranks > 1) ends = make_thread_ranks(num_ranks, options.deadline, options.num_nodes);
  log::debug("making {} rank(s) of {} layer {}, {} thread(s) each", num_ranks, source.model,
             source.layer, shared.num_threads);
  rethrow_cause(on_ranks(*team, [&](int rank) {
    PlanOptions mine = shared;
    mine.comm = ends[static_cast<size_t>(rank)];
    if (rank > 0) mine.packing_progress = nullptr;
    layers[static_cast<size_t>(rank)] =
        std::make_unique<Layer>(Layer::from_canonical(source.canonical, mine));
  }));
  for (const auto& layer : layers) wire_bytes += layer->explanation().plan.wire_bytes;
}

void RankedLayer::Impl::make_one(const LayerSource& source, PlanOptions options) {
  group = options.comm;
  if (options.num_threads == 0) {
    // Nodes that are faked share one host.
    int neighbours = 0;
    for (int r = 0; r < num_ranks; ++r) {
      neighbours += options.num_nodes > 1 || group.node_of(r) == group.node_of(group.rank());
    }
    options.num_threads = std::max(1, usable_cpus() / neighbours);
  }
  log::debug("making rank {} of {} of {} layer {}, {} thread(s)", group.rank(), num_ranks,
             source.model, source.layer, options.num_threads);
  layers.push_back(std::make_unique<Layer>(Layer::from_canonical(source.canonical, options)));
  const int64_t mine = layers.front()->explanation().plan.wire_bytes;
  std::vector<int64_t> all(static_cast<size_t>(num_ranks));
  group.impl->allgather(&mine, all.data(), sizeof(mine), {"layer: wire bytes", 0});
  for (const int64_t bytes : all) wire_bytes += bytes;
}

RankedLayer::~RankedLayer() = default;
RankedLayer::RankedLayer(RankedLayer&&) noexcept = default;

int RankedLayer::num_ranks() const { return impl_->num_ranks; }
int64_t RankedLayer::wire_bytes() const { return impl_->wire_bytes; }

const Explanation& RankedLayer::explanation(int rank) const {
  const bool one = impl_->group.impl != nullptr;
  return impl_->layers[one ? 0 : static_cast<size_t>(rank)]->explanation();
}

LoadStatistics RankedLayer::load_statistics() const {
  if (impl_->group.impl != nullptr) return impl_->layers[0]->gather_load_statistics();
  LoadStatistics sum = impl_->layers[0]->load_statistics();
  const auto add = [](std::vector<int64_t>& to, const std::vector<int64_t>& more) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += more[i];
  };
  for (int rank = impl_->tp; rank < impl_->num_ranks; rank += impl_->tp) {
    const LoadStatistics mine = impl_->layers[static_cast<size_t>(rank)]->load_statistics();
    add(sum.per_expert, mine.per_expert);
    add(sum.per_rank, mine.per_rank);
    sum.tokens += mine.tokens;
  }
  return sum;
}

Placement RankedLayer::placement() const { return impl_->layers[0]->placement(); }

PlacementChange RankedLayer::set_placement(const Placement& placement) {
  std::vector<PlacementChange> changes(static_cast<size_t>(impl_->num_ranks));
  if (impl_->group.impl != nullptr) {
    const PlacementChange mine = impl_->layers[0]->set_placement(placement);
    impl_->group.impl->allgather(&mine, changes.data(), sizeof(mine),
                                 {"layer: change of placement", 0});
  } else {
    rethrow_cause(on_ranks(*impl_->team, [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      changes[r] = impl_->layers[r]->set_placement(placement);
    }));
  }
  PlacementChange sum;
  for (const PlacementChange& change : changes) {
    sum.experts_kept += change.experts_kept;
    sum.experts_packed += change.experts_packed;
    sum.bytes_packed += change.bytes_packed;
  }
  return sum;
}

LayerArgs RankedLayer::Impl::args_of(int rank, const RankedInputs& inputs, RankedOutputs& outputs,
                                     int64_t* dropped, bool want_routing) {
  const Share share = share_of(inputs.hidden.shape[0], num_shares(), rank / tp);
  LayerArgs args;
  args.hidden = rows_of(inputs.hidden, share);
  args.token_ids = rows_of(inputs.token_ids, share);
  args.topk_ids = rows_of(inputs.topk_ids, share);
  args.topk_weights = rows_of(inputs.topk_weights, share);
  auto rows = [&](auto& buffer, DType dtype, int64_t width) {
    return TensorView::contiguous(buffer.data() + share.first * width, dtype, {share.count, width});
  };
  if (!hands_out(rank)) {
    args.output = TensorView::contiguous(copies[static_cast<size_t>(rank)].data(), DType::f32,
                                         {share.count, config.hidden});
    return args;
  }
  args.output = rows(outputs.output, DType::f32, config.hidden);
  if (want_routing) {
    args.out_topk_ids = rows(outputs.topk_ids, DType::i32, config.top_k);
    args.out_topk_weights = rows(outputs.topk_weights, DType::f32, config.top_k);
    if (inputs.topk_ids.empty()) {
      args.out_router_logits = rows(outputs.router_logits, DType::f32, config.num_experts);
    }
  }
  args.out_dropped = dropped;
  return args;
}

void RankedLayer::run(const RankedInputs& inputs, RankedOutputs& outputs, int repeat, int warmups,
                      bool want_routing) const {
  run(inputs, outputs,
      RunOptions{.repeat = repeat, .warmups = warmups, .want_routing = want_routing});
}

void RankedLayer::run(const RankedInputs& inputs, RankedOutputs& outputs,
                      const RunOptions& options) const {
  const bool want_routing = options.want_routing;
  const int64_t total = inputs.hidden.shape[0];
  const MoeConfig& config = impl_->config;
  MOEKIT_CHECK(options.repeat >= 1 && options.warmups >= 0,
               "repeat: expected 1 or more calls, got {}", options.repeat);
  MOEKIT_CHECK(total <= impl_->capacity, "tokens: this layer was made for {}, got {}",
               impl_->capacity, total);
  // Views of zero rows need an address too: reserve one element.
  auto sized = [](auto& buffer, int64_t count) {
    buffer.reserve(static_cast<size_t>(std::max<int64_t>(1, count)));
    buffer.resize(static_cast<size_t>(count));
  };
  sized(outputs.output, checked_mul(total, config.hidden, "output"));
  if (want_routing) {
    sized(outputs.topk_ids, checked_mul(total, config.top_k, "top-k ids"));
    sized(outputs.topk_weights, total * config.top_k);
    const bool routes = inputs.topk_ids.empty();
    sized(outputs.router_logits,
          routes ? checked_mul(total, config.num_experts, "router logits") : 0);
  }
  for (int rank = 0; rank < impl_->num_ranks; ++rank) {
    if (impl_->hands_out(rank)) continue;
    sized(impl_->copies[static_cast<size_t>(rank)],
          ceil_div(total, impl_->num_shares()) * config.hidden);
  }
  outputs.time_us.assign(static_cast<size_t>(options.repeat), 0.0);
  if (impl_->group.impl != nullptr) {
    impl_->run_one(inputs, outputs, options);
  } else {
    impl_->run_here(inputs, outputs, options);
  }
}

api::Microbatches& RankedLayer::Impl::parts_of(size_t rank, size_t layer, int count) {
  auto& parts = microbatches[rank];
  if (parts == nullptr || parts->count() != count) {
    parts.reset();
    parts = std::make_unique<api::Microbatches>(*layers[layer], count);
  }
  return *parts;
}

void RankedLayer::Impl::run_here(const RankedInputs& inputs, RankedOutputs& outputs,
                                 const RunOptions& options) {
  std::vector<int64_t> dropped(static_cast<size_t>(num_ranks), 0);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(num_ranks));
  std::atomic<bool> failed{false};
  std::vector<Clock::time_point> starts(static_cast<size_t>(num_ranks));
  std::vector<Clock::time_point> ends(static_cast<size_t>(num_ranks));
  api::SpinBarrier meet(num_ranks);
  // Together: a workspace may need all ranks to be made.
  rethrow_cause(on_ranks(*team, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    parts_of(r, r, options.microbatches);
  }));

  // A rank that failed keeps meeting the others, so that nobody waits for it here; the flag is set
  // before the barrier that ends a call and read after it, so that all ranks leave after the same
  // call.
  auto fault = on_ranks(*team, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    for (int call = -options.warmups; call < options.repeat; ++call) {
      LayerArgs args = args_of(rank, inputs, outputs, &dropped[r], options.want_routing);
      args.skip_experts = options.skip_experts;
      dropped[r] = 0;
      meet.arrive_and_wait();
      starts[r] = Clock::now();
      try {
        microbatches[r]->run(args);
      } catch (...) {
        errors[r] = std::current_exception();
        failed.store(true, std::memory_order_relaxed);
      }
      ends[r] = Clock::now();
      meet.arrive_and_wait();
      if (rank == 0 && call >= 0) {
        // The others wait at the next meeting before they write these again.
        const auto first = *std::min_element(starts.begin(), starts.end());
        const auto last = *std::max_element(ends.begin(), ends.end());
        outputs.time_us[static_cast<size_t>(call)] =
            std::chrono::duration<double, std::micro>(last - first).count();
      }
      if (failed.load(std::memory_order_relaxed)) return;
    }
  });
  rethrow_cause(fault);
  rethrow_cause(errors);
  outputs.dropped = 0;
  for (int64_t d : dropped) outputs.dropped += d;
}

/// Gives every rank the rows of all.
template <typename T>
void RankedLayer::Impl::share_rows(std::vector<T>& rows, int64_t total, int64_t width,
                                   const char* phase) const {
  const auto ranks = static_cast<size_t>(num_ranks);
  const int64_t row = width * static_cast<int64_t>(sizeof(T));
  const auto handed = [&](int rank) {
    Share share = share_of(total, num_shares(), rank / tp);
    if (!hands_out(rank)) share.count = 0;
    return share;
  };
  const Share mine = handed(group.rank());
  const std::vector<int64_t> send_offset(ranks, 0), send_bytes(ranks, mine.count * row);
  std::vector<int64_t> recv_offset(ranks), recv_bytes(ranks);
  for (int r = 0; r < num_ranks; ++r) {
    const Share theirs = handed(r);
    recv_offset[static_cast<size_t>(r)] = theirs.first * row;
    recv_bytes[static_cast<size_t>(r)] = theirs.count * row;
  }
  const std::vector<T> own(rows.begin() + mine.first * width,
                           rows.begin() + (mine.first + mine.count) * width);
  group.impl->all_to_all_v(
      {own.data(), send_offset, send_bytes, rows.data(), recv_offset, recv_bytes}, {phase, 0});
}

void RankedLayer::Impl::run_one(const RankedInputs& inputs, RankedOutputs& outputs,
                                const RunOptions& options) {
  comm::Communicator& ranks = *group.impl;
  struct Call {
    double time_us;
    int64_t dropped;
  };
  std::vector<Call> all(static_cast<size_t>(num_ranks));
  api::Microbatches& parts = parts_of(static_cast<size_t>(ranks.rank()), 0, options.microbatches);
  for (int call = -options.warmups; call < options.repeat; ++call) {
    Call mine{};
    LayerArgs args = args_of(ranks.rank(), inputs, outputs, &mine.dropped, options.want_routing);
    args.skip_experts = options.skip_experts;
    ranks.barrier({"run: start", call});
    const auto start = Clock::now();
    parts.run(args);
    mine.time_us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    ranks.allgather(&mine, all.data(), sizeof(Call), {"run: times", call});
    outputs.dropped = 0;
    double slowest = 0;
    for (const Call& theirs : all) {
      slowest = std::max(slowest, theirs.time_us);
      outputs.dropped += theirs.dropped;
    }
    if (call >= 0) outputs.time_us[static_cast<size_t>(call)] = slowest;
  }
  const int64_t total = inputs.hidden.shape[0];
  share_rows(outputs.output, total, config.hidden, "run: output");
  if (!options.want_routing) return;
  share_rows(outputs.topk_ids, total, config.top_k, "run: top-k ids");
  share_rows(outputs.topk_weights, total, config.top_k, "run: top-k weights");
  if (!outputs.router_logits.empty()) {
    share_rows(outputs.router_logits, total, config.num_experts, "run: router logits");
  }
}

}  // namespace moekit
