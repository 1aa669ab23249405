#include "prepare/pushed_layout.h"

#include <algorithm>

#include "base/check.h"
#include "prepare/row_reader.h"
#include "trace/span.h"

namespace moekit::prepare {

int64_t push_quota(const Problem& problem) {
  if (problem.capacity.policy == CapacityPolicy::exact) return problem.max_tokens;
  return std::min(problem.max_tokens, problem.capacity.max_rows / problem.num_ranks);
}

bool push_lends(const Problem& problem) {
  return problem.num_ranks > 1 && problem.nodes.num_nodes() == 1 &&
         problem.combine == Combine::slots;
}

PushedLayout::PushedLayout(const Problem& problem, const RowFormat& wire, QuantDuty quant_duty,
                           RowsLayout layout) {
  const int64_t ranks = problem.num_ranks;
  const int64_t tokens = problem.max_tokens;
  const int64_t top_k = problem.config.top_k;
  const int64_t width = problem.config.routed_width();
  const bool to_sums = problem.combine == Combine::rank_sums;
  const bool batches = layout == RowsLayout::batched;
  message = RowMessage(RowPath::max_travelling_bytes(wire, quant_duty), top_k);
  quota = push_quota(problem);
  // With batched rows the quota bounds the rows of an expert; a row serves several.
  slots = batches ? tokens : quota;
  copies = std::min(top_k, ranks);  // whatever the placement: the heap outlives it
  back_bytes = checked_mul(width, bits_of(problem.combine_dtype) / 8, "returned row");
  back_places = to_sums ? copies : top_k;
  message_top_k = top_k;
  lends = push_lends(problem);
  for (int r = 0; batches && r < problem.num_ranks; ++r) {
    max_experts = std::max(max_experts, units_of(problem, layout, r));
  }

  protocol = heap.add(1, sizeof(ep::PushState));
  peers = heap.add(ranks, sizeof(ep::PushPeer));
  headers = heap.add(static_cast<int64_t>(ep::kGenerations) * ranks, sizeof(PushHeader));
  rows = heap.add(checked_mul(ranks, slots, "row slots"), message.bytes);
  if (lends) {
    places = heap.add(checked_mul(tokens, top_k, "slots"), sizeof(int64_t));
    const int64_t room = batches ? checked_mul(max_experts, ranks * quota, "batched rows")
                                 : checked_mul(ranks * slots, top_k, "slot rows");
    results = heap.add(checked_mul(room, width, "results"), sizeof(float));
  } else {
    returns = heap.add(checked_mul(tokens, back_places, "return slots"), back_bytes);
  }

  const bool serves = problem.num_local_experts() > 0;
  max_rows = serves ? ranks * slots : 0;
  call = all.add(1, sizeof(PushedCall));
  out_header = all.add(1, sizeof(PushHeader));
  const int64_t num_slots = checked_mul(tokens, top_k, "slots");
  slot_rank = all.add(num_slots, sizeof(int32_t));
  slot_expert = all.add(num_slots, sizeof(LocalExpert));
  message_of = all.add(checked_mul(tokens, copies, "messages"), sizeof(int64_t));
  cursor = all.add(ranks, sizeof(int64_t));
  if (batches) {
    expert_rows = all.add(checked_mul(ranks, max_experts, "experts"), sizeof(int64_t));
  }
  staging = all.add(1, std::max(message.bytes, back_bytes));
  scratch = RowPath::add_scratch(all, width);
  message_index = all.add(max_rows, sizeof(int64_t));
  const int64_t max_slots = checked_mul(max_rows, top_k, "received slots");
  ids = all.add(max_slots, sizeof(LocalExpert));
  weights = all.add(max_slots, sizeof(float));
  const bool here = is_quantized(wire.format) && quant_duty == QuantDuty::destination;
  if (here) delivered = all.add(max_rows, wire.record_bytes);
  if (batches) {
    const int64_t experts = problem.num_local_experts();
    batched = BatchedLayout(all, experts, ranks * quota, max_rows, top_k, 0);
    batched_index = all.add(checked_mul(experts, ranks * quota, "batched rows"), sizeof(int64_t));
  }
}

ep::PushRank push_rank(const Problem& problem, const PushedLayout& layout,
                       comm::SymmetricHeap& heap) {
  return {problem.rank, problem.num_ranks, layout.protocol.in<ep::PushState>(heap.base()),
          layout.peers.in<ep::PushPeer>(heap.base())};
}

namespace {

/// While a rank waits for a call's flag, its peer can't be further (rules of ep_protocol.h).
void check_flag(uint64_t seen, const ep::PushStep& step, int rank, comm::CallSite site) {
  MOEKIT_CHECK_AS(
      ErrorCode::comm, seen == step.value,
      "rank {}: ranks disagree about the step in {}: the flag of rank {} (heap flag {}) "
      "is ahead: expected {}, seen {}; every rank must make the same calls in the same "
      "order",
      rank, to_string(site), step.peer, step.flag, step.value, seen);
}

}  // namespace

void run_protocol(ep::PushRank& rank, comm::SymmetricHeap& heap, comm::CallSite site) {
  const trace::Span span(trace::Stage::wait);
  // A rank that has nothing to wait for learns of a failure too.
  if (heap.failed()) heap.wait(0, 0, rank.rank(), site);
  for (;;) {
    const ep::PushStep step = rank.next();
    switch (step.kind) {
      case ep::PushStep::Kind::act: return;
      case ep::PushStep::Kind::wait:
        heap.wait(step.flag, step.value, step.peer, site);
        check_flag(heap.flag(step.flag), step, rank.rank(), site);
        break;
      case ep::PushStep::Kind::signal: heap.signal(step.peer, step.flag, step.value); break;
    }
    rank.advance();
  }
}

bool protocol_ready(const ep::PushRank& rank, const comm::SymmetricHeap& heap) {
  if (heap.failed()) return true;
  for (int32_t p = 0; p < rank.flags().num_ranks; ++p) {
    const ep::PushStep step = rank.wait_for(p);
    if (step.kind == ep::PushStep::Kind::wait && heap.flag(step.flag) < step.value) return false;
  }
  return true;
}

}  // namespace moekit::prepare
