// LayerRuntime: one planned and packed layer on one rank: routing, latent projections, shared
// experts around the modular kernel.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "base/buffer.h"
#include "engine/call_gate.h"
#include "engine/dense_matrix.h"
#include "engine/expert_store.h"
#include "engine/load_counters.h"
#include "engine/modular_kernel.h"
#include "engine/plan.h"
#include "engine/shared_expert.h"
#include "engine/tensor_parallel.h"
#include "moekit/layer.h"

namespace moekit::engine {

/// Everything mutable of one call in flight. Making one is collective where the plan needs a heap.
struct CallState {
  explicit CallState(const class LayerRuntime& layer);
  Buffer buffer;
  std::unique_ptr<comm::SymmetricHeap> heap;         ///< null where the plan needs none
  std::unique_ptr<device::ExpertsWorkspace> device;  ///< likewise
  ThreadPool threads;
  trace::Context trace;
  Call call;
  LayerArgs args;
  bool on_device = false;    ///< the call's tensors lie there: begin() enqueues all of it
  const float* x = nullptr;  ///< fp32 rows for router and shared experts
  int64_t x_stride = 0;
};

/// Changes by set_placement() only; each concurrent call needs a CallState of its own.
class LayerRuntime {
 public:
  /// Plans and packs. Collective over options.comm. Throws as make_problem and make_plan do, on all
  /// ranks; invalid_argument on all of them where their plans differ.
  LayerRuntime(std::shared_ptr<const CanonicalLayer> canonical, const PlanOptions& options);

  const Plan& plan() const { return *plan_; }
  bool on_device() const { return device_ != nullptr; }
  const Explanation& explanation() const { return explanation_; }
  /// Of the whole layer; the plan's own is that of this rank's slice.
  const MoeConfig& config() const { return config_; }
  const CanonicalLayer& canonical() const { return *canonical_; }
  int64_t workspace_bytes() const { return plan_->workspace.total(); }
  /// The heap of a new workspace, or null. Collective where not null.
  std::unique_ptr<comm::SymmetricHeap> make_heap() const;
  /// The device's part of a new workspace, or null.
  std::unique_ptr<device::ExpertsWorkspace> make_device_workspace() const {
    return device_ != nullptr ? device_->make_workspace() : nullptr;
  }
  Allocator* allocator() const { return options_.allocator; }
  /// Of a further workspace: numbered in the order in which they are made.
  trace::Context make_trace_context() const;

  // The three steps of a call; each is collective. Throws invalid_argument for bad tensors before
  // anything is sent. begin: routing, projection, rows on their way out. middle: rows arrive, the
  // experts run, results leave, and while they travel the shared experts run. end: results arrive,
  // are summed, and the shared rows are added. Calls in flight take these steps in the same order
  // on all ranks.
  // Where all tensors lie on the plan's device, begin() enqueues the call on `stream` and the other
  // steps do nothing. With tensors on the host, the experts use `stream` (null: their own) and
  // wait.
  void begin(CallState& state, const LayerArgs& args, void* stream = nullptr) const;
  void middle(CallState& state) const;
  void end(CallState& state) const;

  /// Ends the waits of all ranks that this one meets.
  void abort(std::string_view reason) const noexcept { tp_.abort(reason); }

  /// Held open by each call from before begin() until it has ended or failed.
  CallGate& gate() const { return gate_; }

  /// Layer::set_placement.
  PlacementChange set_placement(const Placement& wanted);
  /// Counts of this rank's tokens, and Layer::gather_load_statistics.
  LoadCounters& load() const { return load_; }
  LoadStatistics gather_load_statistics() const;

 private:
  void make_plan_together();
  void pack();
  /// Packs this rank's experts into the store, or takes them from the pack cache.
  void pack_experts(ThreadPool& threads);
  /// The same bytes, some experts at a time, telling options.packing_progress.
  void pack_in_parts(ThreadPool& threads);
  /// Whose faults `body` throws as invalid_argument: this rank's own, or those that all ranks see.
  enum class FaultsOf { this_rank, all_ranks };
  /// A rank that fails alone fails its groups: peers would wait for its rows.
  template <typename Body>
  void or_abort(FaultsOf faults, Body&& body) const;
  /// Of an error that all ranks throw alike in a call: comm::Communicator::note_refusal.
  void note_refusal(const Error& error) const noexcept;
  void set_up(CallState& state, const LayerArgs& args) const;
  /// T, where the plan takes so many tokens.
  int64_t check_tokens(const TensorView& hidden) const;
  static void check_views(const LayerArgs& args);
  void check_args(const LayerArgs& args) const;
  void check_device_args(const LayerArgs& args) const;
  void enqueue(CallState& state, void* stream) const;
  void load_input(CallState& state) const;
  void route(CallState& state) const;
  void take_routing(CallState& state) const;
  void load_token_ids(CallState& state) const;
  void set_rows(CallState& state) const;
  void run_shared(CallState& state) const;
  /// Where combine writes: the caller's output where nothing follows that needs rows of its own.
  float* routed_rows(const CallState& state) const;
  void write_output(CallState& state) const;
  void write_routing(const CallState& state) const;
  void sum_slices(CallState& state) const;
  /// Runs a step of a call; a failed exchange ends the waits in the rank's other group too.
  template <typename Step>
  void in_groups(Step&& step) const;
  bool has_shared() const { return config_.shared.inter > 0; }

  std::shared_ptr<const CanonicalLayer> canonical_;
  PlanOptions options_;
  MoeConfig config_;
  TensorParallel tp_;
  Explanation explanation_;
  std::unique_ptr<Plan> plan_;
  ExpertStore store_;
  std::unique_ptr<device::DeviceExperts> device_;  // null: weights in host memory
  mutable CallGate gate_;
  mutable LoadCounters load_;  // calls are const to their callers
  DenseMatrix router_, latent_in_, latent_out_, shared_gate_;
  SharedExpert shared_;
  Buffer logit_bias_, selection_bias_;  // fp32 copies: [E] each
  LayerRegions regions_;                // the plan's
  mutable std::atomic<int32_t> num_workspaces_{0};
  int64_t number_ = -1;  // in its group
  // One count over all workspaces: calls are told apart by their order, which ranks must share, not
  // by the workspace that a rank happens to use.
  mutable std::atomic<int64_t> next_call_{0};
};

}  // namespace moekit::engine
