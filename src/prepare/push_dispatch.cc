#include "prepare/push_dispatch.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "prepare/dispatch.h"
#include "prepare/format_agreement.h"
#include "prepare/parallel_rows.h"
#include "trace/span.h"

namespace moekit::prepare {

PushDispatch::PushDispatch(const PrepareArgs& args, const PushedLayout& layout, RowsLayout rows)
    : args_(args),
      problem_(*args.problem),
      layout_(layout),
      rows_(rows),
      ranks_(problem_.num_ranks),
      me_(problem_.rank),
      call_(*layout.call.in<PushedCall>(args.workspace)),
      homes_(args.routing.top_k, layout.slot_rank.in<int32_t>(args.workspace),
             layout.slot_expert.in<LocalExpert>(args.workspace)),
      protocol_(0, 1, nullptr, nullptr) {
  MOEKIT_CHECK(args.heap != nullptr && args.heap->bytes() >= layout.heap.total(),
               "rank {}: pushed rows need a heap of {} bytes, made for the workspace", me_,
               layout.heap.total());
  protocol_ = push_rank(problem_, layout, *args.heap);
}

void PushDispatch::send() {
  try {
    check_ends();
    call_ = PushedCall{layout_, 0, {}};
    header_.fault = find_fault(problem_, args_.routing);
    // A faulty rank takes part with nothing to send, so that all ranks learn of it.
    tokens_ = header_.fault.kind == RoutingFault::Kind::none ? args_.routing.num_tokens : 0;
    const RowPath path(args_, true);
    call_.format = path.travelling();
    header_.format = tokens_ > 0 ? static_cast<int64_t>(call_.format.format) : -1;
    header_.call = args_.call;
    header_.shape = shape_digest(args_, 4 + static_cast<int64_t>(rows_));
    dropped_ = homes_.assign(problem_, args_.routing, tokens_);
    if (problem_.capacity.policy != CapacityPolicy::exact) limit_rows();
    place_messages();
    protocol_.begin();
    run_protocol(protocol_, heap(), args_.site("dispatch slots"));
    note_moved();
    write_rows(path);
    write_headers();
  } catch (const std::exception& e) {
    if (args_.comm != nullptr) args_.comm->abort(e.what());
    throw;
  }
  if (args_.dropped != nullptr) *args_.dropped = dropped_;
  protocol_.advance();
  // Row flags alone: the wait for the peers' rows belongs to receive().
  while (protocol_.phase() == ep::PushPhase::publish_rows) {
    const ep::PushStep step = protocol_.next();
    heap().signal(step.peer, step.flag, step.value);
    protocol_.advance();
  }
}

void PushDispatch::check_ends() const {
  MOEKIT_CHECK(args_.comm != nullptr && args_.comm->size() == ranks_ && args_.comm->rank() == me_,
               "rank {} of {} needs a communicator of its group", me_, ranks_);
  // A failed group says why before anything else does.
  if (heap().failed()) heap().wait(0, 0, me_, args_.site("dispatch slots"));
  MOEKIT_CHECK(protocol_.phase() == ep::PushPhase::idle,
               "rank {}: the last call on this workspace has not been finished (call {})", me_,
               args_.call);
  for (int r = 0; r < ranks_ && layout_.lends; ++r) {
    MOEKIT_CHECK_AS(ErrorCode::internal, heap().peer(r) != nullptr,
                    "rank {} was planned on the node of rank {}, but can't read its memory", me_,
                    r);
  }
}

void PushDispatch::limit_rows() {
  const bool batches = rows_ == RowsLayout::batched;
  auto* cursor = at<int64_t>(layout_.cursor);
  auto* of_expert = batches ? at<int64_t>(layout_.expert_rows) : nullptr;
  std::fill_n(cursor, ranks_, 0);
  if (batches) std::fill_n(of_expert, ranks_ * layout_.max_experts, 0);
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t j = 0; j < args_.routing.top_k; ++j) {
      if (homes_.expert(t, j) == LocalExpert::none || homes_.is_repeat(t, j, batches)) continue;
      const int64_t rank = homes_.rank(t, j);
      limit_unit(t, j,
                 batches ? of_expert[rank * layout_.max_experts + index_of(homes_.expert(t, j))]
                         : cursor[rank]);
    }
  }
  if (header_.wanted <= layout_.quota) return;
  tokens_ = 0;  // refused: nothing travels
  dropped_ = 0;
}

/// Counts one more row for the unit of (token, slot), or takes its slots away.
void PushDispatch::limit_unit(int64_t token, int64_t slot, int64_t& rows) {
  if (problem_.capacity.policy == CapacityPolicy::refuse) {
    if (++rows <= header_.wanted) return;
    header_.wanted = rows;
    header_.wanted_by = homes_.rank(token, slot);
    return;
  }
  if (rows < layout_.quota) {
    ++rows;
    return;
  }
  // With batched rows a later slot of the token may still need the row; one that needs nothing is
  // not sent, as its rank is taken away too.
  dropped_ += homes_.drop(token, slot, rows_ == RowsLayout::batched, false);
}

void PushDispatch::place_messages() {
  auto* cursor = at<int64_t>(layout_.cursor);
  auto* message_of = at<int64_t>(layout_.message_of);
  std::fill_n(cursor, ranks_, 0);
  for (int64_t t = 0; t < tokens_; ++t) {
    int64_t* mine = message_of + t * layout_.copies;
    int64_t count = 0;
    for (int64_t j = 0; j < args_.routing.top_k; ++j) {
      if (homes_.sends_row(t, j)) mine[count++] = cursor[homes_.rank(t, j)]++;
    }
  }
  for (int r = 0; r < ranks_; ++r) protocol_.peer(r).rows_out = cursor[r];
}

void PushDispatch::note_moved() const {
  if (!trace::wants_notes()) return;
  int64_t rows = 0;
  for (int r = 0; r < ranks_; ++r) rows += protocol_.peer(r).rows_out;
  const int64_t own = protocol_.peer(me_).rows_out;
  trace::note_moved((rows - own) * layout_.message.bytes, own * layout_.message.bytes, rows);
}

void PushDispatch::write_rows(const RowPath& path) const {
  const int64_t width = path.travelling().width;
  auto* scratch = at<float>(layout_.scratch);
  const auto piece = [&](int64_t begin, int64_t end, int64_t task) {
    for (int64_t t = begin; t < end; ++t) write_row(path, t, scratch + task * width, true);
  };
  parallel_rows(args_.threads, tokens_, layout_.copies * layout_.message.bytes, piece);
  bool all_addressable = true;
  for (int r = 0; r < ranks_; ++r) all_addressable &= heap().peer(r) != nullptr;
  if (all_addressable) return;
  // Puts come from one thread, through one staged message.
  for (int64_t t = 0; t < tokens_; ++t) write_row(path, t, scratch, false);
}

/// The token's messages for ranks whose memory can be addressed, or for all others.
void PushDispatch::write_row(const RowPath& path, int64_t token, float* scratch,
                             bool addressable) const {
  const int64_t* slot = at<int64_t>(layout_.message_of) + token * layout_.copies;
  const std::byte* first = nullptr;
  for (int64_t j = 0; j < args_.routing.top_k; ++j) {
    if (!homes_.sends_row(token, j)) continue;
    const int rank = homes_.rank(token, j);
    const int64_t offset = layout_.row_offset(me_, *slot++);
    std::byte* part = heap().peer(rank);
    if ((part != nullptr) != addressable) continue;
    std::byte* to = addressable ? part + offset : at<std::byte>(layout_.staging);
    if (first == nullptr || path.in_place()) {
      path.write(token, scratch, to);
    } else if (to != first) {
      std::memcpy(to, first, static_cast<size_t>(call_.format.record_bytes));
    }
    first = to;
    write_meta(token, rank, to);
    if (!addressable) heap().put(rank, offset, to, layout_.message.bytes);
  }
}

/// rank_sums: servers of the token before `rank`.
int32_t PushDispatch::place_of(int64_t token, int rank) const {
  if (problem_.combine != Combine::rank_sums) return 0;
  int32_t place = 0;
  for (int64_t j = 0; j < args_.routing.top_k; ++j) {
    place += homes_.sends_row(token, j) && homes_.rank(token, j) < rank ? 1 : 0;
  }
  return place;
}

void PushDispatch::write_meta(int64_t token, int rank, std::byte* bytes) const {
  const int64_t top_k = args_.routing.top_k;
  const RowMessage& message = layout_.message;
  const PushOrigin origin{static_cast<int32_t>(token), place_of(token, rank)};
  std::memcpy(bytes + message.token_offset, &origin, sizeof(origin));
  auto* ids = reinterpret_cast<LocalExpert*>(bytes + message.ids_offset);
  for (int64_t j = 0; j < top_k; ++j) {
    ids[j] = homes_.rank(token, j) == rank ? homes_.expert(token, j) : LocalExpert::none;
  }
  std::memcpy(bytes + message.weights_offset, args_.routing.weights + token * top_k,
              static_cast<size_t>(top_k) * sizeof(float));
}

void PushDispatch::write_headers() {
  auto* staged = at<PushHeader>(layout_.out_header);
  for (int r = 0; r < ranks_; ++r) {
    *staged = header_;
    staged->rows = protocol_.peer(r).rows_out;
    heap().put(r, layout_.header_offset(ranks_, me_, protocol_.call()), staged, sizeof(PushHeader));
  }
}

const PushHeader& PushDispatch::header_of(int source) const {
  return *reinterpret_cast<const PushHeader*>(
      heap().base() + layout_.header_offset(ranks_, source, protocol_.call()));
}

ExpertRows PushDispatch::receive() {
  run_protocol(protocol_, heap(), args_.site("dispatch rows"));
  for (int r = 0; r < ranks_; ++r) protocol_.peer(r).rows_in = header_of(r).rows;
  try {
    check_headers();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::comm) throw;  // peers may see it otherwise
    protocol_.give_up();
    run_protocol(protocol_, heap(), args_.site("dispatch rows"));
    throw;
  }
  list_rows();
  unpack_rows();
  ExpertRows rows;
  rows.format = call_.format;
  rows.records = heap().base() + layout_.rows.offset;
  rows.record_stride = layout_.message.bytes;
  rows.record_index = at<int64_t>(layout_.message_index);
  rows.num_rows = call_.num_rows;
  rows.top_k = args_.routing.top_k;
  rows.ids = at<LocalExpert>(layout_.ids);
  rows.weights = at<float>(layout_.weights);
  if (quantizes_here(args_, call_.format)) {
    rows = quantize_rows(args_, rows, at<float>(layout_.scratch), at<std::byte>(layout_.delivered));
  }
  if (rows_ == RowsLayout::standard) return rows;
  ExpertRows batched = place_rows(rows, layout_.batched, args_.workspace, [&](int64_t row) {
    const PushedRow from = pushed_row(layout_, args_.workspace, heap(), row);
    return RowSource{from.source, from.origin.token};
  });
  point_at_records(rows, at<int64_t>(layout_.batched_index), batched);
  return batched;
}

void PushDispatch::check_headers() const {
  // Every rank sees the same headers in the same order, so all ranks throw the same.
  for (int r = 0; r < ranks_; ++r) {
    const PushHeader& header = header_of(r);
    MOEKIT_CHECK_AS(ErrorCode::comm, header.shape == header_of(0).shape,
                    "rank {}: ranks 0 and {} run different plans ({}): shapes, placement, wire "
                    "format, duties, combine and capacity must be the same on all ranks",
                    me_, r, to_string(args_.site("dispatch rows")));
    MOEKIT_CHECK_AS(
        ErrorCode::comm, header.call == header_of(0).call,
        "rank {}: ranks disagree about the step in {}: rank 0 is in call {}, rank {} in "
        "call {}; every rank must make the same calls in the same order",
        me_, to_string(args_.site("dispatch rows")), header_of(0).call, r, header.call);
    MOEKIT_CHECK_AS(ErrorCode::comm, header.rows >= 0 && header.rows <= layout_.slots,
                    "rank {}: rank {} announces {} rows to rank {} in {}, it has room for {}", me_,
                    r, header.rows, me_, to_string(args_.site("dispatch rows")), layout_.slots);
  }
  FormatAgreement formats;
  for (int r = 0; r < ranks_; ++r) {
    const PushHeader& header = header_of(r);
    throw_fault(problem_, r, header.fault);
    MOEKIT_CHECK(header.wanted <= layout_.quota,
                 "rank {} has {} {} for rank {}, its share of the capacity of {} is {} and the "
                 "policy is to refuse: plan with more rows, with --capacity drop, or with the "
                 "exact worst case",
                 r, header.wanted, rows_ == RowsLayout::standard ? "rows" : "rows of one expert",
                 header.wanted_by, problem_.capacity.max_rows, layout_.quota);
    formats.take(r, header.format, args_.site("dispatch rows"));
  }
  call_.format = formats.rows(args_.wire);
}

/// Rows by source, in the order in which each source has put them.
void PushDispatch::list_rows() {
  auto* index = at<int64_t>(layout_.message_index);
  int64_t next = 0;
  for (int r = 0; r < ranks_; ++r) {
    const int64_t count = protocol_.peer(r).rows_in;
    for (int64_t i = 0; i < count; ++i) index[next++] = r * layout_.slots + i;
  }
  call_.num_rows = next;
}

void PushDispatch::unpack_rows() const {
  const int64_t top_k = args_.routing.top_k;
  auto* ids = at<LocalExpert>(layout_.ids);
  auto* weights = at<float>(layout_.weights);
  const auto piece = [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t n = begin; n < end; ++n) {
      const std::byte* message = pushed_message(layout_, args_.workspace, heap(), n);
      std::memcpy(ids + n * top_k, message + layout_.message.ids_offset,
                  static_cast<size_t>(top_k) * sizeof(LocalExpert));
      std::memcpy(weights + n * top_k, message + layout_.message.weights_offset,
                  static_cast<size_t>(top_k) * sizeof(float));
    }
  };
  parallel_rows(args_.threads, call_.num_rows, 16 * top_k, piece);
}

const std::byte* pushed_message(const PushedLayout& layout, std::byte* workspace,
                                const comm::SymmetricHeap& heap, int64_t row) {
  const int64_t slot = layout.message_index.in<int64_t>(workspace)[row];
  return heap.base() + layout.rows.offset + slot * layout.message.bytes;
}

PushedRow pushed_row(const PushedLayout& layout, std::byte* workspace,
                     const comm::SymmetricHeap& heap, int64_t row) {
  PushedRow out;
  const int64_t slot = layout.message_index.in<int64_t>(workspace)[row];
  out.source = static_cast<int32_t>(slot / layout.slots);
  std::memcpy(&out.origin,
              pushed_message(layout, workspace, heap, row) + layout.message.token_offset,
              sizeof(out.origin));
  return out;
}

}  // namespace moekit::prepare
