#include "prepare/push_combine.h"

#include <cstring>

#include "base/check.h"
#include "prepare/parallel_rows.h"
#include "prepare/push_dispatch.h"
#include "tensor/bf16_rows.h"
#include "trace/span.h"

namespace moekit::prepare {

PushCombine::PushCombine(const FinalizeArgs& args, const PushedLayout& layout)
    : args_(args),
      problem_(*args.problem),
      layout_(layout),
      input_(combine_input(problem_, args.reduce_duty)),
      store_(sum_store_for(args.routing.num_tokens * problem_.config.routed_width() *
                           int64_t{sizeof(float)})),
      homes_(args.routing.top_k, layout.slot_rank.in<int32_t>(args.workspace),
             layout.slot_expert.in<LocalExpert>(args.workspace)),
      protocol_(push_rank(problem_, layout, *args.heap)) {}

void PushCombine::send() {
  const ExpertRows& rows = args_.rows;
  const int64_t width = args_.experts.width;
  auto* scratch = at<float>(layout_.scratch);
  const auto piece = [&](int64_t begin, int64_t end, int64_t task) {
    for (int64_t n = begin; n < end; ++n) return_row(n, scratch + task * width, true);
  };
  note_moved();
  if (layout_.lends) {
    tell_places();
  } else {
    parallel_rows(args_.threads, rows.num_rows, (rows.top_k + 1) * layout_.back_bytes, piece);
    bool all_addressable = true;
    for (int r = 0; r < problem_.num_ranks; ++r) all_addressable &= heap().peer(r) != nullptr;
    for (int64_t n = 0; n < rows.num_rows && !all_addressable; ++n) return_row(n, scratch, false);
  }
  protocol_.advance();
  while (protocol_.phase() == ep::PushPhase::publish_returns) {
    const ep::PushStep step = protocol_.next();
    heap().signal(step.peer, step.flag, step.value);
    protocol_.advance();
  }
}

void PushCombine::note_moved() const {
  if (!trace::wants_notes()) return;
  const ExpertRows& rows = args_.rows;
  int64_t all = 0, own = 0;
  for (int64_t n = 0; n < rows.num_rows; ++n) {
    int64_t returns = sends_slots() ? 0 : 1;
    for (int64_t j = 0; j < rows.top_k && sends_slots(); ++j) {
      returns += rows.ids[n * rows.top_k + j] != LocalExpert::none ? 1 : 0;
    }
    all += returns;
    const bool mine = pushed_row(layout_, args_.workspace, heap(), n).source == problem_.rank;
    own += mine ? returns : 0;
  }
  trace::note_moved((all - own) * layout_.back_bytes, own * layout_.back_bytes, all);
}

/// Writes where each result lies into the part of its owner.
void PushCombine::tell_places() const {
  const ExpertRows& rows = args_.rows;
  MOEKIT_CHECK_AS(ErrorCode::internal,
                  sends_slots() && reinterpret_cast<const std::byte*>(args_.experts.data) ==
                                       heap().base() + layout_.results.offset,
                  "rank {}: results that peers read must lie in the heap", problem_.rank);
  const auto piece = [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t n = begin; n < end; ++n) {
      const PushedRow from = pushed_row(layout_, args_.workspace, heap(), n);
      std::byte* part = heap().peer(from.source);
      for (int64_t j = 0; j < rows.top_k; ++j) {
        if (rows.ids[n * rows.top_k + j] == LocalExpert::none) continue;
        const int64_t place = slot_position(rows, n, j);
        std::memcpy(part + layout_.place_offset(from.origin.token, j), &place, sizeof(place));
      }
    }
  };
  parallel_rows(args_.threads, rows.num_rows, 16 * rows.top_k, piece);
}

/// The row's results for an owner whose memory can be addressed, or for any other.
void PushCombine::return_row(int64_t row, float* scratch, bool addressable) const {
  const ExpertRows& rows = args_.rows;
  const PushedRow from = pushed_row(layout_, args_.workspace, heap(), row);
  if ((heap().peer(from.source) != nullptr) != addressable) return;
  if (sends_slots()) {
    for (int64_t j = 0; j < rows.top_k; ++j) {
      const float* values = slot_row(rows, args_.experts, row, j);
      if (values == nullptr) continue;
      return_values(values, from.source, layout_.return_offset(from.origin.token, j));
    }
    return;
  }
  const int64_t offset = layout_.return_offset(from.origin.token, from.origin.place);
  if (input_ == CombineInput::sums) {
    return return_values(args_.experts.data + row * args_.experts.width, from.source, offset);
  }
  return_sum(row, from.source, offset, scratch);
}

void PushCombine::return_sum(int64_t row, int rank, int64_t offset, float* scratch) const {
  std::byte* part = heap().peer(rank);
  const bool straight = part != nullptr && problem_.combine_dtype == DType::f32;
  float* sum = straight ? reinterpret_cast<float*>(part + offset) : scratch;
  sum_slot_row(args_.rows, args_.experts, row, args_.reduce_duty.weigher, SumRow::f32, sum,
               straight ? store_ : SumStore::cached);
  if (!straight) return_values(sum, rank, offset);
}

void PushCombine::return_values(const float* from, int rank, int64_t offset) const {
  std::byte* part = heap().peer(rank);
  if (problem_.combine_dtype == DType::bf16) {
    std::byte* to = part != nullptr ? part + offset : at<std::byte>(layout_.staging);
    f32_to_bf16_row(from, args_.experts.width, reinterpret_cast<uint16_t*>(to));
    if (part == nullptr) heap().put(rank, offset, to, layout_.back_bytes);
  } else if (part != nullptr) {
    std::memcpy(part + offset, from, static_cast<size_t>(layout_.back_bytes));
  } else {
    heap().put(rank, offset, from, layout_.back_bytes);
  }
}

void PushCombine::receive() {
  run_protocol(protocol_, heap(), args_.site("combine rows"));
  const int64_t width = problem_.config.routed_width();
  const OwnerSum owner(args_, input_);
  const auto piece = [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t t = begin; t < end; ++t) {
      if (layout_.lends) {
        add_lent(owner, t);
      } else {
        add_token(t);
      }
    }
  };
  parallel_rows(args_.threads, args_.routing.num_tokens, (args_.routing.top_k + 1) * width * 4,
                piece);
  protocol_.advance();
}

void PushCombine::add_lent(const OwnerSum& owner, int64_t token) const {
  const int64_t top_k = args_.routing.top_k;
  const int64_t width = problem_.config.routed_width();
  const float* rows[kMaxTopK];
  for (int64_t j = 0; j < top_k; ++j) {
    rows[j] = nullptr;
    if (homes_.expert(token, j) == LocalExpert::none) continue;
    int64_t place = 0;
    std::memcpy(&place, heap().base() + layout_.place_offset(token, j), sizeof(place));
    const std::byte* part = heap().peer(homes_.rank(token, j));
    rows[j] = reinterpret_cast<const float*>(part + layout_.results.offset) + place * width;
  }
  owner.add_token(token, rows, at<int32_t>(layout_.slot_rank) + token * top_k);
}

void PushCombine::add_token(int64_t token) const {
  const int64_t top_k = args_.routing.top_k;
  const int64_t width = problem_.config.routed_width();
  const SumRow type = problem_.combine_dtype == DType::bf16 ? SumRow::bf16 : SumRow::f32;
  const bool weighs = sends_slots() && args_.reduce_duty.weigher == Weigher::combine;
  const void* pointers[kMaxTopK];
  int64_t servers = 0;
  for (int64_t j = 0; j < top_k; ++j) servers += homes_.sends_row(token, j) ? 1 : 0;
  for (int64_t j = 0; j < top_k; ++j) {
    const bool there = sends_slots() ? homes_.expert(token, j) != LocalExpert::none : j < servers;
    pointers[j] = there ? heap().base() + layout_.return_offset(token, j) : nullptr;
  }
  const float* weights = weighs ? args_.routing.weights + token * top_k : nullptr;
  sum_rows(type, pointers, weights, top_k, width, args_.sum + token * width, store_);
}

}  // namespace moekit::prepare
