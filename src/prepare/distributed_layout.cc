#include "prepare/distributed_layout.h"

#include <algorithm>

#include "base/check.h"
#include "prepare/row_reader.h"
#include "prepare/slot_rows.h"

namespace moekit::prepare {

RowMessage::RowMessage(int64_t record_bytes, int64_t top_k) {
  token_offset = round_up(record_bytes, 8);
  ids_offset = token_offset + 8;
  weights_offset = ids_offset + 4 * top_k;
  bytes = round_up(weights_offset + 4 * top_k, 16);
}

int64_t units_of(const Problem& problem, RowsLayout rows, int rank) {
  if (rows == RowsLayout::standard) return 1;
  return static_cast<int64_t>(problem.placement->experts_of(rank).size());
}

int64_t ranks_with_experts(const Problem& problem) {
  int64_t count = 0;
  for (int r = 0; r < problem.num_ranks; ++r) {
    count += problem.placement->experts_of(r).empty() ? 0 : 1;
  }
  return count;
}

int64_t max_unit_rows(const Problem& problem) {
  const int64_t worst = checked_mul(problem.num_ranks, problem.max_tokens, "rows of all ranks");
  if (problem.capacity.policy == CapacityPolicy::exact) return worst;
  return std::min(worst, problem.capacity.max_rows);
}

int64_t wire_bytes_of(const Problem& problem, const RowFormat& wire, Spread spread) {
  if (problem.num_ranks == 1) return 0;
  const int64_t peers = problem.num_ranks - 1;
  const int64_t top_k = problem.config.top_k;
  const int64_t needed = std::min({top_k, peers, ranks_with_experts(problem)});
  const int64_t copies = spread == Spread::all_rows ? peers : needed;
  const int64_t returns = problem.combine == Combine::slots ? top_k : needed;
  const int64_t row = RowMessage(wire.record_bytes, top_k).bytes;
  const int64_t back = problem.config.routed_width() * (bits_of(problem.combine_dtype) / 8);
  return checked_mul(problem.max_tokens, copies * row + returns * back, "bytes on the wire");
}

Support supports_ranks(const Problem& problem) {
  const Capacity& capacity = problem.capacity;
  Support s;
  s.require(problem.device.type == DeviceType::cpu, ReasonCode::device,
            "runs on the CPU, the plan asks for CUDA device {}", problem.device.index);
  s.require(problem.num_ranks <= comm::Communicator::kMaxRanks, ReasonCode::parallel,
            "serves at most {} ranks, the plan has {}", comm::Communicator::kMaxRanks,
            problem.num_ranks);
  s.require(problem.config.top_k <= kMaxTopK, ReasonCode::shape, "top_k is {}, at most {} fit",
            problem.config.top_k, kMaxTopK);
  s.require(problem.combine_dtype == DType::f32 || problem.combine_dtype == DType::bf16,
            ReasonCode::combine, "rows come back as f32 or bf16, the plan asks for {}",
            to_string(problem.combine_dtype));
  s.require(capacity.policy == CapacityPolicy::exact || capacity.max_rows > 0, ReasonCode::capacity,
            "a bounded capacity needs room for a row, the plan gives {}", capacity.max_rows);
  return s;
}

DistributedLayout::DistributedLayout(const Problem& problem, const RowFormat& wire,
                                     QuantDuty quant_duty, Spread spread, RowsLayout rows) {
  const int64_t ranks = problem.num_ranks;
  const int64_t tokens = problem.max_tokens;
  const int64_t top_k = problem.config.top_k;
  const int64_t width = problem.config.routed_width();
  const bool to_sums = problem.combine == Combine::rank_sums;
  const RowMessage message(RowPath::max_travelling_bytes(wire, quant_duty), top_k);
  rows_per_unit = max_unit_rows(problem);
  // Batched capacity bounds the rows of an expert; the rows that bring them are not dropped.
  max_rows = rows == RowsLayout::standard ? rows_per_unit : ranks * tokens;
  if (spread == Spread::needed_rows && problem.num_local_experts() == 0) max_rows = 0;
  copies = std::min(top_k, ranks_with_experts(problem));
  back_bytes = checked_mul(width, bits_of(problem.combine_dtype) / 8, "returned row");

  state = all.add(1, sizeof(CallState));
  for (Region* list : {&send_offset, &send_bytes, &recv_offset, &recv_bytes, &cursor}) {
    *list = all.add(ranks, sizeof(int64_t));
  }
  row_begin = all.add(ranks + 1, sizeof(int64_t));
  int64_t far_units = 0;
  for (int r = 0; r < problem.num_ranks; ++r) far_units += units_of(problem, rows, r);
  const int64_t header = sizeof(CountHeader);
  const int64_t near = header + 8 * units_of(problem, rows, problem.rank);
  far_counts = all.add(1, ranks * header + 8 * far_units);
  near_counts = all.add(ranks, near);

  const int64_t num_slots = checked_mul(tokens, top_k, "slots");
  slot_rank = all.add(num_slots, sizeof(int32_t));
  slot_expert = all.add(num_slots, sizeof(LocalExpert));
  scratch = RowPath::add_scratch(all, width);
  int64_t messages = tokens;
  if (spread != Spread::all_rows) {
    messages = checked_mul(tokens, copies, "messages");
    message_of = all.add(messages, sizeof(int64_t));
  }
  send_rows = all.add(messages, message.bytes);
  recv_rows = all.add(max_rows, message.bytes);
  const int64_t max_slots = checked_mul(max_rows, top_k, "received slots");
  ids = all.add(max_slots, sizeof(LocalExpert));
  weights = all.add(max_slots, sizeof(float));
  const bool here = is_quantized(wire.format) && quant_duty == QuantDuty::destination;
  if (here) delivered = all.add(max_rows, wire.record_bytes);
  if (rows == RowsLayout::batched) {
    batched = BatchedLayout(all, problem.num_local_experts(), rows_per_unit, max_rows, top_k,
                            wire.record_bytes);
  }
  return_begin = all.add(max_rows + 1, sizeof(int64_t));
  // A rank between nodes sends back what the ranks of its node return.
  const bool relays = spread == Spread::nodes;
  const int64_t sums = relays ? checked_mul(max_rows, copies, "relayed sums") : max_rows;
  const bool returns = relays || problem.num_local_experts() > 0;
  const int64_t returned = !returns ? 0 : to_sums ? sums : max_slots;
  send_back = all.add(returned, back_bytes);
  recv_back =
      all.add(to_sums ? checked_mul(tokens, copies, "returned sums") : num_slots, back_bytes);
  back_source = all.add(num_slots, sizeof(int64_t));
  if (!relays) lent_rows = all.add(max_slots, sizeof(int64_t));
  lent_begin = all.add(ranks, sizeof(int64_t));
}

}  // namespace moekit::prepare
