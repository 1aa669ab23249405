// ModularKernel: one PrepareFinalize and one Experts, joined. The main path of the engine; read
// modular_kernel.cc first.
#pragma once

#include "comm/communicator.h"
#include "engine/plan.h"
#include "problem/canonical_layer.h"
#include "trace/span.h"

namespace moekit::engine {

/// One call in flight: the caller's rows, what the plan's weights are, and the workspace's regions.
/// Views only.
struct Call {
  const Plan* plan = nullptr;
  const std::byte* blob = nullptr;
  const CanonicalLayer* canonical = nullptr;
  std::byte* workspace = nullptr;
  ThreadPool* threads = nullptr;
  comm::Communicator* comm = nullptr;
  comm::SymmetricHeap* heap = nullptr;         ///< of this workspace, where the plan needs one
  device::ExpertsWorkspace* device = nullptr;  ///< likewise
  void* stream = nullptr;                      ///< of the device
  int64_t number = 0;  ///< of this layer's calls, over all workspaces; the same on all ranks
  int64_t layer = -1;  ///< the layer's number in its group

  TensorView rows;                     ///< [T, routed_width] of this rank's tokens
  const std::byte* records = nullptr;  ///< already quantized rows instead
  RoutingTable routing;
  float* routed = nullptr;  ///< [T, routed_width] f32, written by combine()
  int64_t dropped =
      0;  ///< written by dispatch(): slots of this rank's tokens that no expert serves

  /// For timing the exchange alone: rows go out and come back, the experts do not run.
  bool skip_experts = false;
  const trace::Context* trace = nullptr;  ///< of the workspace, never null in a call

  // Carried from step to step.
  trace::Window in_flight;
  prepare::PrepareArgs prepare_args;
  prepare::FinalizeArgs finalize_args;
};

/// dispatch -> experts -> combine; other work may run between the steps. Collective over the ranks
/// of the plan.
void dispatch(Call& call);
bool dispatch_ready(const Call& call);
void experts(Call& call);
bool combine_ready(const Call& call);
void combine(Call& call);

}  // namespace moekit::engine
