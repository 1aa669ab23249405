// moekit::Layer, PendingCall and Workspace over engine::LayerRuntime.
#include <atomic>
#include <exception>
#include <optional>
#include <thread>

#include "api/memory_layer.h"
#include "base/check.h"
#include "engine/layer_runtime.h"
#include "engine/plan_agreement.h"
#include "moekit/checkpoint.h"
#include "moekit/layer.h"

namespace moekit {

/// A call between its steps. One lives in each workspace, so that calls need no memory of their
/// own.
struct PendingCall::Impl {
  enum class Step { idle, dispatched, experts_done };
  const engine::LayerRuntime* layer = nullptr;
  engine::CallState* state = nullptr;
  // Taken from dispatch to combine, as the layer's gate is. No mutex: several workspaces are taken
  // and given back in any order, and the last step may come from another thread.
  std::atomic<bool> busy{false};
  std::atomic<std::thread::id> holder{};  ///< who took it
  Step step = Step::idle;

  /// Waits for a call of another thread; one of this thread would never end.
  void acquire(engine::CallGate& gate) {
    MOEKIT_CHECK(holder.load(std::memory_order_relaxed) != std::this_thread::get_id(),
                 "this workspace has a call in flight: run its steps to the end first, or dispatch "
                 "with a workspace of its own (make_workspace)");
    while (busy.exchange(true, std::memory_order_acquire)) {
      busy.wait(true, std::memory_order_relaxed);
    }
    try {
      gate.enter();
    } catch (...) {
      set_free();
      throw;
    }
    holder.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }

  /// Runs one step; a failure ends the call.
  template <typename Body>
  void guarded(Body&& body) {
    try {
      body();
    } catch (...) {
      release();
      throw;
    }
  }
  void release() {
    step = Step::idle;
    holder.store({}, std::memory_order_relaxed);
    layer->gate().leave();
    set_free();
  }
  /// What the call wrote is seen by the next one.
  void set_free() {
    busy.store(false, std::memory_order_release);
    busy.notify_one();
  }
};

struct Workspace::Impl {
  explicit Impl(const engine::LayerRuntime& layer) : layer(&layer), state(layer) {}
  const engine::LayerRuntime* layer;  ///< the layer it was made for
  engine::CallState state;
  PendingCall::Impl pending;
};

Workspace::Workspace(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Workspace::~Workspace() = default;
int64_t Workspace::bytes() const {
  const comm::SymmetricHeap* heap = impl_->state.heap.get();
  return impl_->state.buffer.size() + (heap != nullptr ? heap->bytes() : 0);
}

struct Layer::Impl {
  Impl(std::shared_ptr<const CanonicalLayer> canonical, const PlanOptions& options)
      : runtime(std::move(canonical), options) {
    try {
      own.emplace(runtime);
    } catch (const std::exception& error) {
      runtime.abort(error.what());  // peers have made the layer and would wait for its first call
      throw;
    }
  }
  engine::LayerRuntime runtime;
  std::optional<Workspace::Impl> own;  ///< of calls that bring none
};

namespace {

/// What a layer holds, unless it was moved from.
template <typename T>
T& live(const std::unique_ptr<T>& impl) {
  MOEKIT_CHECK(impl != nullptr, "this layer was moved from: use the one that it was moved to");
  return *impl;
}

}  // namespace

Layer::Layer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Layer::Layer(Layer&&) noexcept = default;
Layer& Layer::operator=(Layer&&) noexcept = default;
Layer::~Layer() = default;

namespace {

/// What `load` returns; a rank that has no weights says so to those that make the layer with it.
template <typename Load>
std::shared_ptr<const CanonicalLayer> weights_or_tell(const PlanOptions& options, Load&& load) {
  try {
    std::shared_ptr<const CanonicalLayer> canonical = load();
    MOEKIT_CHECK(canonical != nullptr, "a layer needs weights, got null");
    return canonical;
  } catch (...) {
    engine::refuse_layer(options.comm.impl.get(), std::current_exception());
  }
}

}  // namespace

Layer Layer::open(const std::string& model_dir, int layer, const PlanOptions& options) {
  auto canonical = weights_or_tell(options, [&] { return load_canonical(model_dir, layer); });
  return Layer(std::make_unique<Impl>(std::move(canonical), options));
}

Layer Layer::create(const MoeConfig& config, const LayerTensors& tensors,
                    const PlanOptions& options) {
  auto canonical =
      weights_or_tell(options, [&] { return api::layer_from_tensors(config, tensors); });
  return Layer(std::make_unique<Impl>(std::move(canonical), options));
}

Layer Layer::from_canonical(std::shared_ptr<const CanonicalLayer> canonical,
                            const PlanOptions& options) {
  canonical = weights_or_tell(options, [&] { return canonical; });
  return Layer(std::make_unique<Impl>(std::move(canonical), options));
}

const MoeConfig& Layer::config() const { return live(impl_).runtime.config(); }
const Explanation& Layer::explanation() const { return live(impl_).runtime.explanation(); }

std::unique_ptr<Workspace> Layer::make_workspace() const {
  return std::make_unique<Workspace>(std::make_unique<Workspace::Impl>(live(impl_).runtime));
}

Placement Layer::placement() const { return live(impl_).runtime.plan().problem.placement->lists(); }

PlacementChange Layer::set_placement(const Placement& placement) {
  return live(impl_).runtime.set_placement(placement);
}

LoadStatistics Layer::load_statistics() const { return live(impl_).runtime.load().read(); }
LoadStatistics Layer::gather_load_statistics() const {
  return live(impl_).runtime.gather_load_statistics();
}
void Layer::reset_load_statistics() { live(impl_).runtime.load().reset(); }

void Layer::run(const LayerArgs& args, StreamHandle stream, Workspace* workspace) const {
  PendingCall call = dispatch(args, stream, workspace);
  call.experts();
  call.combine();
}

PendingCall::PendingCall(PendingCall&& other) noexcept
    : impl_(std::exchange(other.impl_, nullptr)) {}
PendingCall& PendingCall::operator=(PendingCall&& other) noexcept {
  std::swap(impl_, other.impl_);
  return *this;
}
PendingCall::~PendingCall() {
  if (impl_ == nullptr) return;
  // Peers may still read rows of this workspace: end their waits before it can go away.
  impl_->layer->abort("a call was dropped between its steps");
  impl_->release();
}

PendingCall Layer::dispatch(const LayerArgs& args, StreamHandle stream,
                            Workspace* workspace) const {
  const engine::LayerRuntime& runtime = live(impl_).runtime;
  MOEKIT_CHECK(stream == nullptr || runtime.on_device(),
               "the plan runs on the CPU: pass no stream");
  Workspace::Impl* space = workspace != nullptr ? workspace->impl_.get() : &*impl_->own;
  MOEKIT_CHECK(space->layer == &runtime, "the workspace was made by another layer");
  PendingCall::Impl& call = space->pending;
  call.acquire(runtime.gate());
  call.layer = &runtime;
  call.state = &space->state;
  call.guarded([&] { runtime.begin(space->state, args, stream); });
  call.step = PendingCall::Impl::Step::dispatched;
  return PendingCall(&call);
}

bool PendingCall::ready() const {
  if (impl_ == nullptr || impl_->state->on_device) return true;
  return impl_->step == Impl::Step::dispatched ? engine::dispatch_ready(impl_->state->call)
                                               : engine::combine_ready(impl_->state->call);
}

void PendingCall::wait() {
  if (impl_ != nullptr && impl_->step == Impl::Step::dispatched) experts();
  if (impl_ != nullptr) combine();
}

void PendingCall::experts() {
  MOEKIT_CHECK(impl_ != nullptr && impl_->step == Impl::Step::dispatched,
               "experts() follows dispatch() once");
  Impl* call = std::exchange(impl_, nullptr);  // a failure has released it
  call->guarded([&] { call->layer->middle(*call->state); });
  call->step = Impl::Step::experts_done;
  impl_ = call;
}

void PendingCall::combine() {
  MOEKIT_CHECK(impl_ != nullptr && impl_->step == Impl::Step::experts_done,
               "combine() follows experts() once");
  Impl* call = std::exchange(impl_, nullptr);
  call->guarded([&] { call->layer->end(*call->state); });
  call->release();
}

}  // namespace moekit
