#include "prepare/distributed.h"

#include <algorithm>
#include <exception>

#include "prepare/combine.h"
#include "prepare/dispatch.h"

namespace moekit::prepare {

Traits Distributed::traits(const Problem& problem) const {
  Traits t;
  t.rows = rows_;
  t.max_rows = max_unit_rows(problem);
  t.max_sum_rows =
      rows_ == RowsLayout::standard ? t.max_rows : problem.num_ranks * problem.max_tokens;
  t.moves_rows = true;
  t.takes_partial_sums = true;
  return t;
}

Support Distributed::supports(const Problem& problem) const { return supports_ranks(problem); }

int64_t Distributed::workspace_bytes(const Problem& problem, const RowFormat& wire,
                                     QuantDuty quant_duty) const {
  return DistributedLayout(problem, wire, quant_duty, spread_, rows_).all.total();
}

int64_t Distributed::wire_bytes(const Problem& problem, const RowFormat& wire) const {
  return wire_bytes_of(problem, wire, spread_);
}

void Distributed::prepare_send(const PrepareArgs& args) const {
  const DistributedLayout layout(*args.problem, args.wire, args.quant_duty, spread_, rows_);
  Dispatch(args, layout, spread_, rows_).send();
}

bool Distributed::prepare_ready(const PrepareArgs& args) const {
  return args.comm->ready(state_of(args.workspace).ticket);
}

ExpertRows Distributed::prepare_receive(const PrepareArgs& args) const {
  try {
    return Dispatch(args, state_of(args.workspace).layout, spread_, rows_).receive();
  } catch (const std::exception& error) {
    args.comm->abort(error.what());  // where this rank fails alone, peers would wait for its rows
    throw;
  }
}

void Distributed::finalize_send(const FinalizeArgs& args) const {
  CombineCall(args, state_of(args.workspace).layout).send();
}

bool Distributed::finalize_ready(const FinalizeArgs& args) const {
  return args.comm->ready(state_of(args.workspace).ticket);
}

void Distributed::finalize_receive(const FinalizeArgs& args) const {
  CombineCall(args, state_of(args.workspace).layout).receive();
}

}  // namespace moekit::prepare
