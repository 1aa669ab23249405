#include "prepare/pushed.h"

#include <limits>

#include "prepare/push_combine.h"
#include "prepare/push_dispatch.h"

namespace moekit::prepare {
namespace {

PushedCall& call_of(std::byte* workspace) { return *reinterpret_cast<PushedCall*>(workspace); }

bool ready(const Problem& problem, std::byte* workspace, comm::SymmetricHeap& heap) {
  return protocol_ready(push_rank(problem, call_of(workspace).layout, heap), heap);
}

/// What all ranks refuse alike leaves their group as it was; for anything else peers would wait.
template <typename Body>
auto or_fail_group(comm::Communicator& comm, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::invalid_argument) comm.abort(error.what());
    throw;
  }
}

}  // namespace

Traits Pushed::traits(const Problem& problem) const {
  Traits t;
  t.rows = rows_;
  t.max_rows = problem.num_ranks * push_quota(problem);
  t.max_sum_rows =
      rows_ == RowsLayout::standard ? t.max_rows : problem.num_ranks * problem.max_tokens;
  t.moves_rows = true;
  t.takes_partial_sums = true;
  t.holds_results = push_lends(problem);
  return t;
}

Support Pushed::supports(const Problem& problem) const {
  Support s = supports_ranks(problem);
  const Capacity& capacity = problem.capacity;
  s.require(capacity.policy == CapacityPolicy::exact || capacity.max_rows >= problem.num_ranks,
            ReasonCode::capacity,
            "every rank has an equal share of the capacity, known before rows move: {} rows over "
            "{} ranks are none; all2all counts first",
            capacity.max_rows, problem.num_ranks);
  s.require(problem.max_tokens <= std::numeric_limits<int32_t>::max(), ReasonCode::shape,
            "a call may have {} tokens, at most {} can be named in a message", problem.max_tokens,
            std::numeric_limits<int32_t>::max());
  return s;
}

int64_t Pushed::workspace_bytes(const Problem& problem, const RowFormat& wire,
                                QuantDuty quant_duty) const {
  return PushedLayout(problem, wire, quant_duty, rows_).all.total();
}

HeapNeed Pushed::heap_need(const Problem& problem, const RowFormat& wire,
                           QuantDuty quant_duty) const {
  return {PushedLayout(problem, wire, quant_duty, rows_).heap.total(),
          ep::PushFlags{problem.num_ranks}.total()};
}

int64_t Pushed::wire_bytes(const Problem& problem, const RowFormat& wire) const {
  return wire_bytes_of(problem, wire, Spread::needed_rows);
}

void Pushed::prepare_send(const PrepareArgs& args) const {
  const PushedLayout layout(*args.problem, args.wire, args.quant_duty, rows_);
  PushDispatch(args, layout, rows_).send();
}

bool Pushed::prepare_ready(const PrepareArgs& args) const {
  return ready(*args.problem, args.workspace, *args.heap);
}

ExpertRows Pushed::prepare_receive(const PrepareArgs& args) const {
  return or_fail_group(*args.comm, [&] {
    return PushDispatch(args, call_of(args.workspace).layout, rows_).receive();
  });
}

float* Pushed::results(const PrepareArgs& args) const {
  const PushedLayout& layout = call_of(args.workspace).layout;
  return layout.lends ? layout.results.in<float>(args.heap->base()) : nullptr;
}

void Pushed::finalize_send(const FinalizeArgs& args) const {
  PushCombine(args, call_of(args.workspace).layout).send();
}

bool Pushed::finalize_ready(const FinalizeArgs& args) const {
  return ready(*args.problem, args.workspace, *args.heap);
}

void Pushed::finalize_receive(const FinalizeArgs& args) const {
  or_fail_group(*args.comm, [&] { PushCombine(args, call_of(args.workspace).layout).receive(); });
}

}  // namespace moekit::prepare
