#include "prepare/combine.h"

#include <algorithm>
#include <cstring>

#include "comm/traffic.h"
#include "prepare/owner_sum.h"
#include "prepare/parallel_rows.h"
#include "tensor/bf16_rows.h"

namespace moekit::prepare {

CombineCall::CombineCall(const FinalizeArgs& args, const DistributedLayout& layout, bool moves_rows)
    : args_(args),
      problem_(*args.problem),
      layout_(layout),
      input_(combine_input(problem_, args.reduce_duty)),
      ranks_(problem_.num_ranks),
      lends_(args.comm->lends() && !moves_rows),
      state_(*layout.state.in<CallState>(args.workspace)) {}

void CombineCall::send() {
  count_returns();
  count_arrivals();
  if (!lends_) {
    if (sends_slots()) {
      place_slots();
    } else {
      place_sums();
    }
    return begin(pack_returns(), nullptr);
  }
  list_lent();
  place_lent();
  state_.lent = {args_.experts.data, args_.experts.width, at<int64_t>(layout_.lent_rows),
                 at<int64_t>(layout_.lent_begin)};
  begin(nullptr, &state_.lent);
}

/// Sizes are those of the rows that would travel, lent or not.
void CombineCall::begin(const std::byte* rows, const void* lent) {
  const comm::Exchange exchange{rows,
                                list<int64_t>(layout_.send_offset),
                                list<int64_t>(layout_.send_bytes),
                                at<std::byte>(layout_.recv_back),
                                list<int64_t>(layout_.recv_offset),
                                list<int64_t>(layout_.recv_bytes),
                                lent};
  comm::note_traffic(exchange.send_bytes, problem_.rank, layout_.back_bytes);
  state_.ticket = args_.comm->begin_all_to_all_v(exchange, args_.site("combine rows"));
}

void CombineCall::count_returns() {
  const ExpertRows& rows = args_.rows;
  auto* begin = at<int64_t>(layout_.return_begin);
  int64_t next = 0;
  for (int64_t n = 0; n < rows.num_rows; ++n) {
    begin[n] = next;
    int64_t served = 0;
    for (int64_t j = 0; j < rows.top_k; ++j) {
      served += rows.ids[n * rows.top_k + j] == LocalExpert::none ? 0 : 1;
    }
    next += sends_slots() ? served : std::min<int64_t>(served, 1);
  }
  begin[rows.num_rows] = next;
  const auto* row_begin = at<int64_t>(layout_.row_begin);
  const auto send_offset = list<int64_t>(layout_.send_offset);
  const auto send_bytes = list<int64_t>(layout_.send_bytes);
  for (int r = 0; r < ranks_; ++r) {
    send_offset[r] = begin[row_begin[r]] * layout_.back_bytes;
    send_bytes[r] = begin[row_begin[r + 1]] * layout_.back_bytes - send_offset[r];
  }
}

const std::byte* CombineCall::pack_returns() {
  const ExpertRows& rows = args_.rows;
  const auto* begin = at<int64_t>(layout_.return_begin);
  const int64_t places = rows.num_rows * (sends_slots() ? rows.top_k : 1);
  const bool as_they_lie =
      input_ == CombineInput::sums || (sends_slots() && rows.layout == RowsLayout::standard);
  if (problem_.combine_dtype == DType::f32 && as_they_lie && begin[rows.num_rows] == places) {
    // Every row goes back, in the order in which the experts wrote them.
    return reinterpret_cast<const std::byte*>(args_.experts.data);
  }
  auto* packed = at<std::byte>(layout_.send_back);
  const auto piece = [&](int64_t first, int64_t last, int64_t task) {
    for (int64_t n = first; n < last; ++n) {
      if (begin[n + 1] > begin[n]) pack_row(n, task, packed + begin[n] * layout_.back_bytes);
    }
  };
  parallel_rows(args_.threads, rows.num_rows, (rows.top_k + 1) * layout_.back_bytes, piece);
  return packed;
}

void CombineCall::pack_row(int64_t row, int64_t task, std::byte* to) const {
  const ExpertRows& rows = args_.rows;
  const int64_t width = args_.experts.width;
  const bool as_bf16 = problem_.combine_dtype == DType::bf16;
  const auto put = [&](const float* from) {
    if (as_bf16) {
      f32_to_bf16_row(from, width, reinterpret_cast<uint16_t*>(to));
    } else if (reinterpret_cast<const std::byte*>(from) != to) {
      std::memcpy(to, from, static_cast<size_t>(layout_.back_bytes));
    }
    to += layout_.back_bytes;
  };
  if (input_ == CombineInput::sums) return put(args_.experts.data + row * width);
  if (input_ == CombineInput::slot_rows_to_sums) {
    float* sum = as_bf16 ? at<float>(layout_.scratch) + task * width : reinterpret_cast<float*>(to);
    sum_slot_row(rows, args_.experts, row, args_.reduce_duty.weigher, SumRow::f32, sum);
    return put(sum);
  }
  for (int64_t j = 0; j < rows.top_k; ++j) {
    if (const float* from = slot_row(rows, args_.experts, row, j)) put(from);
  }
}

void CombineCall::count_arrivals() {
  const auto recv_offset = list<int64_t>(layout_.recv_offset);
  const auto recv_bytes = list<int64_t>(layout_.recv_bytes);
  const auto* slot_rank = at<int32_t>(layout_.slot_rank);
  const auto* slot_expert = at<LocalExpert>(layout_.slot_expert);
  const int64_t top_k = args_.routing.top_k;
  std::fill(recv_bytes.begin(), recv_bytes.end(), 0);
  for (int64_t t = 0; t < args_.routing.num_tokens; ++t) {
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t i = t * top_k + j;
      if (slot_expert[i] == LocalExpert::none) continue;
      bool counts = true;
      for (int64_t p = t * top_k; p < i && !sends_slots(); ++p) {
        if (slot_expert[p] != LocalExpert::none && slot_rank[p] == slot_rank[i]) counts = false;
      }
      recv_bytes[slot_rank[i]] += counts ? layout_.back_bytes : 0;
    }
  }
  comm::exclusive_offsets(recv_bytes, recv_offset);
  const auto cursor = list<int64_t>(layout_.cursor);
  for (int r = 0; r < ranks_; ++r) cursor[r] = recv_offset[r] / layout_.back_bytes;
}

/// Rows by the rank that sent them here, so by owner; a row's slots in order, or its sum.
void CombineCall::list_lent() {
  const ExpertRows& rows = args_.rows;
  const auto* row_begin = at<int64_t>(layout_.row_begin);
  auto* lent = at<int64_t>(layout_.lent_rows);
  const auto begin = list<int64_t>(layout_.lent_begin);
  int64_t next = 0;
  for (int r = 0; r < ranks_; ++r) {
    begin[r] = next;
    for (int64_t n = row_begin[r]; n < row_begin[r + 1]; ++n) {
      for (int64_t j = 0; j < rows.top_k; ++j) {
        if (rows.ids[n * rows.top_k + j] == LocalExpert::none) continue;
        lent[next++] = input_ == CombineInput::sums ? n : slot_position(rows, n, j);
        if (input_ == CombineInput::sums) break;
      }
    }
  }
}

/// back_source: which of the rows that the slot's rank lends to this one; -1 where the slot has
/// none, or where an earlier slot has the same rank's sum.
void CombineCall::place_lent() {
  const auto cursor = list<int64_t>(layout_.cursor);
  std::fill(cursor.begin(), cursor.end(), 0);
  place_slots();
  if (input_ != CombineInput::sums) return;
  const auto* slot_rank = at<int32_t>(layout_.slot_rank);
  auto* source = at<int64_t>(layout_.back_source);
  std::fill(cursor.begin(), cursor.end(), 0);
  const int64_t top_k = args_.routing.top_k;
  for (int64_t t = 0; t < args_.routing.num_tokens; ++t) {
    for (int64_t i = t * top_k; i < (t + 1) * top_k; ++i) {
      if (source[i] < 0) continue;
      bool first = true;
      for (int64_t p = t * top_k; p < i && first; ++p) {
        first = source[p] < 0 || slot_rank[p] != slot_rank[i];
      }
      source[i] = first ? cursor[slot_rank[i]]++ : -1;
    }
  }
}

void CombineCall::add_up_lent(std::span<const void* const> lent) const {
  const auto* source = at<int64_t>(layout_.back_source);
  const auto* slot_rank = at<int32_t>(layout_.slot_rank);
  const int64_t top_k = args_.routing.top_k;
  const OwnerSum owner(args_, input_);
  const auto piece = [&](int64_t begin, int64_t end, int64_t) {
    const float* rows[kMaxTopK];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < top_k; ++j) {
        const int64_t from = source[t * top_k + j];
        rows[j] = nullptr;
        if (from < 0) continue;
        const auto& results =
            *static_cast<const LentResults*>(lent[static_cast<size_t>(slot_rank[t * top_k + j])]);
        const int64_t row = results.rows[results.begin[problem_.rank] + from];
        rows[j] = results.data + row * results.width;
      }
      owner.add_token(t, rows, slot_rank + t * top_k);
    }
  };
  const int64_t width = problem_.config.routed_width();
  parallel_rows(args_.threads, args_.routing.num_tokens, (top_k + 1) * width * 4, piece);
}

void CombineCall::place_slots() {
  // A rank returns a token's slots in slot order and tokens in the order in which it got them.
  const auto cursor = list<int64_t>(layout_.cursor);
  const auto* slot_rank = at<int32_t>(layout_.slot_rank);
  const auto* slot_expert = at<LocalExpert>(layout_.slot_expert);
  auto* source = at<int64_t>(layout_.back_source);
  for (int64_t i = 0; i < args_.routing.num_tokens * args_.routing.top_k; ++i) {
    source[i] = slot_expert[i] == LocalExpert::none ? -1 : cursor[slot_rank[i]]++;
  }
}

void CombineCall::place_sums() {
  const auto cursor = list<int64_t>(layout_.cursor);
  const auto* slot_rank = at<int32_t>(layout_.slot_rank);
  const auto* slot_expert = at<LocalExpert>(layout_.slot_expert);
  auto* source = at<int64_t>(layout_.back_source);
  const int64_t top_k = args_.routing.top_k;
  for (int64_t t = 0; t < args_.routing.num_tokens; ++t) {
    int64_t* mine = source + t * top_k;
    std::fill_n(mine, top_k, -1);
    int64_t count = 0;
    // In rank order: each round takes the lowest rank above the last one.
    for (int32_t last = -1;;) {
      int32_t lowest = ranks_;
      for (int64_t i = t * top_k; i < (t + 1) * top_k; ++i) {
        const bool candidate = slot_expert[i] != LocalExpert::none && slot_rank[i] > last;
        if (candidate) lowest = std::min(lowest, slot_rank[i]);
      }
      if (lowest == ranks_) break;
      mine[count++] = cursor[lowest]++;
      last = lowest;
    }
  }
}

void CombineCall::receive() {
  if (lends_) {
    const auto read = [&](std::span<const void* const> lent) { add_up_lent(lent); };
    return args_.comm->finish_reading(state_.ticket, read);
  }
  receive_rows();
  add_up();
}

void CombineCall::receive_rows() { args_.comm->finish(state_.ticket); }

void CombineCall::add_up() {
  const auto* source = at<int64_t>(layout_.back_source);
  const auto* rows = at<std::byte>(layout_.recv_back);
  const int64_t top_k = args_.routing.top_k;
  const int64_t width = problem_.config.routed_width();
  const SumRow type = problem_.combine_dtype == DType::bf16 ? SumRow::bf16 : SumRow::f32;
  const bool weighs = sends_slots() && args_.reduce_duty.weigher == Weigher::combine;
  const SumStore store = sum_store_for(args_.routing.num_tokens * width * int64_t{sizeof(float)});
  const auto piece = [&](int64_t begin, int64_t end, int64_t) {
    const void* pointers[kMaxTopK];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < top_k; ++j) {
        const int64_t from = source[t * top_k + j];
        pointers[j] = from < 0 ? nullptr : rows + from * layout_.back_bytes;
      }
      const float* weights = weighs ? args_.routing.weights + t * top_k : nullptr;
      sum_rows(type, pointers, weights, top_k, width, args_.sum + t * width, store);
    }
  };
  parallel_rows(args_.threads, args_.routing.num_tokens, (top_k + 1) * width * 4, piece);
}

}  // namespace moekit::prepare
