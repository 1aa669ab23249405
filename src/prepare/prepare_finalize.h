// PrepareFinalize: input quantization and dispatch before the experts, combine after them. Each
// half is a send and a receive, so that other work (shared experts, the second microbatch) runs
// while rows are in flight.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "comm/symmetric_heap.h"
#include "moekit/tensor.h"
#include "problem/duty.h"
#include "problem/expert_rows.h"
#include "problem/problem.h"
#include "problem/routing_table.h"
#include "problem/support.h"

namespace moekit::prepare {

/// What a member promises and needs at the joint with the experts.
struct Traits {
  RowsLayout rows = RowsLayout::standard;
  int64_t max_rows =
      0;  ///< most rows (standard) or rows per expert (batched) that prepare can deliver
  int64_t max_sum_rows = 0;    ///< most rows [num_rows, width] of sums over slots; batched rows are
                               ///< bounded by expert, their tokens are not
  bool moves_rows = false;     ///< rows cross ranks, so a wire format matters
  bool combine_weighs = true;  ///< finalize can weigh and sum slot rows itself
  bool takes_partial_sums = false;  ///< rank_sums: takes [num_rows, width] partial sums
  bool holds_results = false;       ///< what finalize combines must be written where results() says
};

/// The symmetric heap that one call in flight needs, the same on all ranks.
struct HeapNeed {
  int64_t bytes = 0;
  int64_t num_flags = 0;
  bool any() const { return num_flags > 0; }
};

/// The experts' input as the layer got it: hidden (or latent) rows of this rank's tokens.
struct PrepareArgs {
  const Problem* problem = nullptr;
  TensorView hidden;                   ///< [T, width] f32, bf16 or f16, rows may be strided
  const std::byte* records = nullptr;  ///< already quantized rows instead of `hidden` (RowFormat
                                       ///< config.gate_up_input), or null
  RoutingTable routing;
  QuantDuty quant_duty = QuantDuty::experts;
  ReduceDuty reduce_duty;
  /// Format of the rows that leave prepare. A quantized one is encoded by the source unless
  /// quant_duty is `destination`. f32 and bf16 rows that need no conversion are passed as they are.
  RowFormat wire;
  float input_scale = 1.0f;  ///< static scale where source or destination quantizes with one, in
                             ///< the sense of config.gate_up_input
  /// Written by prepare_send where not null: slots of this rank's tokens that no expert will serve,
  /// because their id is out of range (unchecked) or their row is beyond the capacity (drop).
  int64_t* dropped = nullptr;
  std::byte* workspace = nullptr;
  ThreadPool* threads = nullptr;
  comm::Communicator* comm = nullptr;
  comm::SymmetricHeap* heap = nullptr;  ///< of this workspace, where the member needs one
  int64_t call = 0;                     ///< number of this layer's calls, the same on all ranks
  int64_t layer = -1;                   ///< the layer's number in its group
  uint64_t plan = 0;  ///< hash of all that ranks' plans have in common, compared in every call

  comm::CallSite site(const char* phase) const { return {phase, call, layer}; }
};

struct FinalizeArgs {
  const Problem* problem = nullptr;
  RoutingTable routing;
  ReduceDuty reduce_duty;
  ExpertRows rows;       ///< as prepare delivered them
  ExpertOutput experts;  ///< what the experts (or the WeightAndReduce member) wrote
  float* sum = nullptr;  ///< [T, width] f32, written
  std::byte* workspace = nullptr;
  ThreadPool* threads = nullptr;
  comm::Communicator* comm = nullptr;
  comm::SymmetricHeap* heap = nullptr;
  int64_t call = 0;
  int64_t layer = -1;

  comm::CallSite site(const char* phase) const { return {phase, call, layer}; }
};

class PrepareFinalize {
 public:
  virtual ~PrepareFinalize() = default;
  virtual std::string_view name() const = 0;
  virtual Traits traits(const Problem& problem) const = 0;
  virtual Support supports(const Problem& problem) const = 0;
  /// Enough for every routing of at most problem.max_tokens tokens on every rank, or for the rows
  /// that problem.capacity admits; no call allocates anything else.
  virtual int64_t workspace_bytes(const Problem& problem, const RowFormat& wire,
                                  QuantDuty quant_duty) const = 0;
  /// For a duty that is not known yet: as much as any needs.
  int64_t workspace_bytes(const Problem& problem, const RowFormat& wire) const {
    return workspace_bytes(problem, wire, QuantDuty::destination);
  }
  /// What Communicator::make_heap must give, all ranks together, for each workspace: calls on one
  /// workspace share its heap, one after the other, from its beginning on.
  virtual HeapNeed heap_need(const Problem&, const RowFormat& /*wire*/, QuantDuty) const {
    return {};
  }
  /// Payload bytes that this rank sends to other ranks in one full call, dispatch and combine
  /// together, when every slot is remote and the load is balanced.
  virtual int64_t wire_bytes(const Problem& problem, const RowFormat& wire) const = 0;

  // Dispatch and combine in two halves each; ready() never blocks. A call is send, (ready)*,
  // receive, in this order, the same on all ranks. Members that exchange counts first meet the
  // other ranks in prepare_send; rows travel until prepare_receive. Faults that a rank finds in its
  // routing or that the counts show (ids, capacity) are thrown on all ranks, by prepare_send where
  // it meets, else by prepare_receive; all may go on with the next call. Any other fault of one
  // rank fails its group.
  virtual void prepare_send(const PrepareArgs& args) const = 0;
  virtual bool prepare_ready(const PrepareArgs&) const { return true; }
  virtual ExpertRows prepare_receive(const PrepareArgs& args) const = 0;
  /// Traits::holds_results: where ExpertOutput::data must lie in a call that prepare_receive() has
  /// begun, for as many rows as it may bring. It may be written until finalize_send(), and read by
  /// peers until the next call on this workspace gets its rows.
  virtual float* results(const PrepareArgs&) const { return nullptr; }
  virtual void finalize_send(const FinalizeArgs& args) const = 0;
  virtual bool finalize_ready(const FinalizeArgs&) const { return true; }
  virtual void finalize_receive(const FinalizeArgs& args) const = 0;
};

/// Ordered registry, best first. Objects live for the whole process.
std::span<const PrepareFinalize* const> registry();

}  // namespace moekit::prepare
