// Layer: one MoE layer, planned and packed once, run many times. The main class of the public API.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moekit/config.h"
#include "moekit/export.h"
#include "moekit/placement.h"
#include "moekit/plan.h"
#include "moekit/tensor.h"

namespace moekit {

class Workspace;
struct CanonicalLayer;

/// A stream of a device; null on the CPU. Opaque here so that no CUDA header is needed
/// (cudaStream_t).
using StreamHandle = void*;

/// One call. Tensors stay the caller's. In host memory everything is read and written before the
/// call returns. Where the plan is for a GPU they may all lie on it (hidden, topk_ids,
/// topk_weights, output; docs/cuda.md says which): the call is enqueued on its stream. Views are
/// checked (tensor.h); results may not overlap themselves.
struct LayerArgs {
  TensorView hidden;  ///< [T, hidden] f32, bf16 or f16, rows may be strided; or f8_e4m3 / f4_e2m1
                      ///< codes with scales
  TensorView hidden_scales;  ///< scales of quantized `hidden`, as RowFormat lists them
                             ///< (docs/numerics.md); empty otherwise
  TensorView hidden_global;  ///< nvfp4: f32 [1] or [T] multiplier; empty otherwise
  TensorView router_input;   ///< [T, hidden]: what router and shared experts read when `hidden` is
                             ///< quantized; empty: hidden
  TensorView topk_ids;       ///< [T, k] i32 or i64, precomputed; empty: the layer routes
  TensorView topk_weights;   ///< [T, k] f32, with topk_ids
  TensorView token_ids;      ///< [T] i32 or i64, hash routing only
  TensorView output;         ///< [T, hidden] f32, bf16 or f16, written; may not overlap any input
  // Optional outputs, empty = not wanted.
  TensorView out_topk_ids;         ///< [T, k] i32
  TensorView out_topk_weights;     ///< [T, k] f32
  TensorView out_router_logits;    ///< [T, E] f32
  TensorView out_routed;           ///< [T, hidden] f32: routed experts alone, without shared ones
  int64_t* out_dropped = nullptr;  ///< slots that capacity or unchecked bad ids dropped
  /// For timing the exchange alone: rows go out and come back, neither routed nor shared experts
  /// run, and the output is unspecified.
  bool skip_experts = false;
};

/// Tensors of one expert matrix in memory. Non-owning: they must outlive the layer (canonical
/// weights are not copied).
struct MatrixTensors {
  TensorView codes;        ///< [N, K] (or what WeightStorage says); f4 codes as u8 pairs or f4_e2m1
  TensorView scales;       ///< as the format defines; empty for bf16, f16, f32
  TensorView zeros;        ///< integer zero points
  TensorView global;       ///< nvfp4: f32 [] or [1]
  TensorView input_scale;  ///< static activation scale: f32 [] or [1]
  TensorView bias;         ///< [N]
};

enum class StackedOrder : uint8_t { gate_up, up_gate, interleaved };

/// Weights of a layer in host memory, either per expert (vectors of E) or stacked (leading dim E).
/// What MoeConfig announces is given, and what is given is announced: biases of gate_up and down
/// (has_gate_up_bias, has_down_bias), of the router (has_logit_bias, has_selection_bias),
/// input_scale (static_scale), shared experts and their gate, latent projections. Shared experts
/// may have biases unannounced. There is no hash_routing, as only a checkpoint brings its table.
struct LayerTensors {
  std::vector<MatrixTensors> gate, up,
      down;  ///< per expert; gate empty when the activation has none
  MatrixTensors gate_up_stacked, down_stacked;  ///< [E, 2I, H] and [E, H, I]
  StackedOrder stacked_order = StackedOrder::gate_up;
  bool transposed = false;  ///< stacked codes are [E, H, 2I] and [E, I, H]
  ScaleSense global_sense = ScaleSense::multiplier;
  TensorView router_weight, router_bias, selection_bias;
  MatrixTensors shared_gate_proj, shared_up_proj, shared_down_proj;
  TensorView shared_gate;  ///< [1, hidden]
  TensorView latent_in, latent_out;
};

/// Handles of a call whose rows are in flight.
class PendingCall;

/// Thread-safe: concurrent run() calls need a Workspace each. Move-only; one that was moved from
/// throws invalid_argument from everything but assignment and destruction.
class MOEKIT_API Layer {
 public:
  // Making a layer is collective over options.comm. Where one rank has no weights or no plan, it
  // throws its own error and the others get `comm` with its words; where plans differ, all get
  // invalid_argument. The group is as good as before.

  /// Reads decoder layer `layer` (-1: the first MoE layer) of a checkpoint directory, mapped, and
  /// packs this rank's experts.
  static Layer open(const std::string& model_dir, int layer, const PlanOptions& options);
  /// From tensors in memory. Throws invalid_argument, naming tensor and field, where they and the
  /// config do not say the same (LayerTensors).
  static Layer create(const MoeConfig& config, const LayerTensors& tensors,
                      const PlanOptions& options);
  /// From a canonical layer that the caller built (tools, tests).
  static Layer from_canonical(std::shared_ptr<const CanonicalLayer> canonical,
                              const PlanOptions& options);

  Layer(Layer&&) noexcept;
  Layer& operator=(Layer&&) noexcept;
  ~Layer();

  const MoeConfig& config() const;
  const Explanation& explanation() const;
  /// A further workspace for a second call in flight; the layer owns one of its own. Where the plan
  /// has heap_bytes, this is collective over the communicator's ranks: all make their workspaces in
  /// the same order, and call k of a workspace is call k of the peers' workspaces made with it.
  std::unique_ptr<Workspace> make_workspace() const;

  /// hidden -> output. Collective over the communicator's ranks; T may be 0 and differ between
  /// ranks.
  void run(const LayerArgs& args, StreamHandle stream = nullptr,
           Workspace* workspace = nullptr) const;

  /// The same in three steps; other work may run between them. experts() may be called once
  /// `pending` is ready or waits.
  PendingCall dispatch(const LayerArgs& args, StreamHandle stream = nullptr,
                       Workspace* workspace = nullptr) const;

  /// Which rank holds which experts now.
  Placement placement() const;

  /// Moves experts between two calls. Collective: every rank passes an equal placement, within the
  /// plan's slots_per_rank. Each rank reads and packs only the experts that it did not hold; bytes
  /// of those that stay are kept. All or nothing: where a rank refuses or fails, all ranks throw
  /// that rank's error and the old placement stays in force. Called by the thread that makes this
  /// rank's calls; while a call is in flight on any workspace of any rank it is refused. Resets the
  /// load statistics. Allocates small lists, no weights or workspaces.
  PlacementChange set_placement(const Placement& placement);

  /// Of this rank's tokens. May be called at any time from any thread. Empty when the plan has
  /// load_statistics off.
  LoadStatistics load_statistics() const;
  /// Summed over the tokens of all ranks: the same on each. Collective, like a call.
  LoadStatistics gather_load_statistics() const;
  void reset_load_statistics();

 private:
  struct Impl;
  explicit Layer(std::unique_ptr<Impl> impl);
  friend class PendingCall;
  std::unique_ptr<Impl> impl_;
};

/// dispatch() -> experts() -> combine(). Lives no longer than its Layer and Workspace, which it
/// keeps busy until combine() or its own end. Dropping it half-way on one of several ranks fails
/// the group: peers end with that reason.
class MOEKIT_API PendingCall {
 public:
  PendingCall(PendingCall&&) noexcept;
  PendingCall& operator=(PendingCall&&) noexcept;
  ~PendingCall();
  bool ready() const;  ///< the next step can run without waiting for a peer
  void wait();         ///< runs all steps that are left
  void
  experts();  ///< waits for the rows, runs the experts and the shared experts, sends results back
  void combine();  ///< waits for the results and writes the output

 private:
  struct Impl;
  explicit PendingCall(Impl* impl) : impl_(impl) {}
  friend class Layer;
  friend class Workspace;
  Impl* impl_ = nullptr;  // lives in the workspace
};

/// Everything mutable of one call in flight. Made by Layer::make_workspace.
class MOEKIT_API Workspace {
 public:
  ~Workspace();
  int64_t bytes() const;
  struct Impl;
  explicit Workspace(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moekit
