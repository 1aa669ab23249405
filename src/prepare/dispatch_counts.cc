// Counts before rows: every rank tells every other what it will send and whether its routing is
// sound; where capacity is bounded, receivers answer with what they take.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "prepare/dispatch.h"
#include "prepare/format_agreement.h"

namespace moekit::prepare {

CountHeader& Dispatch::far_header(int rank) const {
  return *reinterpret_cast<CountHeader*>(at<std::byte>(layout_.far_counts) +
                                         list<int64_t>(layout_.send_offset)[rank]);
}

CountHeader& Dispatch::near_header(int rank) const {
  return *reinterpret_cast<CountHeader*>(at<std::byte>(layout_.near_counts) +
                                         list<int64_t>(layout_.recv_offset)[rank]);
}

void Dispatch::lay_out_counts() {
  const auto send_offset = list<int64_t>(layout_.send_offset);
  const auto send_bytes = list<int64_t>(layout_.send_bytes);
  const auto recv_offset = list<int64_t>(layout_.recv_offset);
  const auto recv_bytes = list<int64_t>(layout_.recv_bytes);
  const int64_t header = sizeof(CountHeader);
  for (int r = 0; r < ranks_; ++r) {
    send_bytes[r] = header + 8 * units_of(problem_, rows_, r);
    recv_bytes[r] = header + 8 * units_of(problem_, rows_, me_);
  }
  comm::exclusive_offsets(send_bytes, send_offset);
  comm::exclusive_offsets(recv_bytes, recv_offset);
}

int64_t shape_digest(const PrepareArgs& args, int64_t kind) {
  const Problem& problem = *args.problem;
  int64_t digest = 17;
  for (const int64_t value :
       {kind, args.routing.top_k, problem.max_tokens, args.wire.width,
        static_cast<int64_t>(args.wire.format), problem.config.num_experts,
        static_cast<int64_t>(problem.capacity.policy), problem.capacity.max_rows,
        static_cast<int64_t>(args.quant_duty), static_cast<int64_t>(problem.combine),
        static_cast<int64_t>(problem.combine_dtype), static_cast<int64_t>(args.plan)}) {
    digest = static_cast<int64_t>((static_cast<uint64_t>(digest) ^ static_cast<uint64_t>(value)) *
                                  0x9E3779B97F4A7C15ull);
  }
  return digest;
}

void Dispatch::count_rows() {
  const int64_t shape =
      shape_digest(args_, 2 * static_cast<int64_t>(rows_) + static_cast<int64_t>(spread_));
  for (int r = 0; r < ranks_; ++r) {
    CountHeader& header = far_header(r);
    header = {fault_, spread_ == Spread::all_rows ? tokens_ : 0, format_, shape, 0};
    std::fill_n(units_after(header), units_of(problem_, rows_, r),
                spread_ == Spread::all_rows ? tokens_ : 0);
  }
  if (spread_ == Spread::all_rows) return;
  const auto* slot_rank = at<int32_t>(layout_.slot_rank);
  const auto* slot_expert = at<LocalExpert>(layout_.slot_expert);
  const int64_t top_k = args_.routing.top_k;
  const bool batched = rows_ == RowsLayout::batched;
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t i = t * top_k + j;
      if (slot_rank[i] < 0) continue;
      CountHeader& header = far_header(slot_rank[i]);
      if (!homes_.is_repeat(t, j, false)) {
        ++header.rows;
        if (!batched) ++units_after(header)[0];
      }
      if (batched && !homes_.is_repeat(t, j, true)) ++units_after(header)[index_of(slot_expert[i])];
    }
  }
}

void Dispatch::exchange_counts() {
  const comm::Exchange exchange{
      at<std::byte>(layout_.far_counts),  list<int64_t>(layout_.send_offset),
      list<int64_t>(layout_.send_bytes),  at<std::byte>(layout_.near_counts),
      list<int64_t>(layout_.recv_offset), list<int64_t>(layout_.recv_bytes)};
  args_.comm->all_to_all_v(exchange, args_.site("dispatch counts"));
}

void Dispatch::check_headers() const {
  // Every rank sees the same headers in the same order, so all ranks throw the same.
  for (int r = 0; r < ranks_; ++r) {
    MOEKIT_CHECK_AS(
        ErrorCode::comm, near_header(r).shape == near_header(0).shape,
        "ranks 0 and {} run different plans ({}): shapes, placement, wire format, duties, "
        "combine and capacity must be the same on all ranks",
        r, to_string(args_.site("dispatch counts")));
  }
  FormatAgreement formats;
  for (int r = 0; r < ranks_; ++r) {
    const CountHeader& header = near_header(r);
    throw_fault(problem_, r, header.fault);
    formats.take(r, header.format, args_.site("dispatch counts"));
  }
  state_.format = formats.rows(args_.wire);
}

void Dispatch::check_rows() const {
  // What a rank announces to this one is seen by no other. A bounded capacity has its own answer.
  const bool exact = problem_.capacity.policy == CapacityPolicy::exact;
  int64_t room = layout_.max_rows;
  for (int r = 0; r < ranks_; ++r) {
    const int64_t rows = near_header(r).rows;
    if (rows >= 0 && (!exact || rows <= room)) {
      room -= rows;
      continue;
    }
    const std::string reason = fmt::format(
        "rank {} announces {} rows to rank {} in {}, which has room for {} more; nothing was moved",
        r, rows, me_, to_string(args_.site("dispatch counts")), room);
    args_.comm->abort(reason);
    fail(ErrorCode::comm, "rank {}: {}", me_, reason);
  }
}

void Dispatch::settle_capacity() {
  const bool bounded = problem_.capacity.policy != CapacityPolicy::exact;
  if (bounded) answer_capacity();
  auto* row_begin = at<int64_t>(layout_.row_begin);
  int64_t next = 0;
  for (int r = 0; r < ranks_; ++r) {
    row_begin[r] = next;
    CountHeader& header = near_header(r);
    next += bounded && rows_ == RowsLayout::standard ? units_after(header)[0] : header.rows;
  }
  row_begin[ranks_] = next;
  if (!bounded) return;
  // The answers travel back over the lists of the counts, exchanged.
  const comm::Exchange answers{
      at<std::byte>(layout_.near_counts), list<int64_t>(layout_.recv_offset),
      list<int64_t>(layout_.recv_bytes),  at<std::byte>(layout_.far_counts),
      list<int64_t>(layout_.send_offset), list<int64_t>(layout_.send_bytes)};
  args_.comm->all_to_all_v(answers, args_.site("dispatch capacity"));
  check_capacity();
  drop_beyond_capacity();
}

void Dispatch::answer_capacity() {
  const int64_t units = units_of(problem_, rows_, me_);
  int64_t wanted = 0;
  for (int64_t u = 0; u < units; ++u) {
    int64_t offered = 0;
    for (int r = 0; r < ranks_; ++r) {  // lower ranks come first
      int64_t& rows = units_after(near_header(r))[u];
      const int64_t room = std::max<int64_t>(0, layout_.rows_per_unit - offered);
      offered += rows;
      rows = std::min(rows, room);
    }
    wanted = std::max(wanted, offered);
  }
  for (int r = 0; r < ranks_; ++r) near_header(r).wanted = wanted;
}

void Dispatch::check_capacity() const {
  if (problem_.capacity.policy != CapacityPolicy::refuse) return;
  const char* unit = rows_ == RowsLayout::standard ? "rows" : "rows of one expert";
  for (int r = 0; r < ranks_; ++r) {
    const int64_t wanted = far_header(r).wanted;
    if (wanted > layout_.rows_per_unit) fail_capacity(r, unit, wanted, layout_.rows_per_unit);
  }
}

void Dispatch::drop_beyond_capacity() {
  const auto* slot_rank = at<int32_t>(layout_.slot_rank);
  const auto* slot_expert = at<LocalExpert>(layout_.slot_expert);
  const int64_t top_k = args_.routing.top_k;
  const bool batched = rows_ == RowsLayout::batched;
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t i = t * top_k + j;
      if (slot_expert[i] == LocalExpert::none || homes_.is_repeat(t, j, batched)) continue;
      // The units count down what the receiver still takes.
      int64_t* units = units_after(far_header(slot_rank[i]));
      if (spread_ == Spread::all_rows) {
        if (t >= units[0]) dropped_ += homes_.drop(t, j, false, false);
        continue;
      }
      int64_t& room = units[batched ? index_of(slot_expert[i]) : 0];
      if (room > 0) {
        --room;
      } else {
        dropped_ += homes_.drop(t, j, batched, batched);
      }
    }
  }
}

}  // namespace moekit::prepare
