#include "prepare/dispatch.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "comm/traffic.h"
#include "prepare/node_relays.h"
#include "prepare/parallel_rows.h"
#include "prepare/replica_turn.h"
#include "trace/span.h"

namespace moekit::prepare {

Dispatch::Dispatch(const PrepareArgs& args, const DistributedLayout& layout, Spread spread,
                   RowsLayout rows)
    : args_(args),
      problem_(*args.problem),
      layout_(layout),
      spread_(spread),
      rows_(rows),
      ranks_(problem_.num_ranks),
      me_(problem_.rank),
      state_(*layout.state.in<CallState>(args.workspace)),
      homes_(args.routing.top_k, layout.slot_rank.in<int32_t>(args.workspace),
             layout.slot_expert.in<LocalExpert>(args.workspace)) {}

void Dispatch::send() {
  MOEKIT_CHECK(args_.comm != nullptr && args_.comm->size() == ranks_ && args_.comm->rank() == me_,
               "rank {} of {} needs a communicator of its group", me_, ranks_);
  try {
    state_ = CallState{.layout = layout_};
    fault_ = find_fault(problem_, args_.routing);
    // A faulty rank takes part in the counts with nothing to send, so that all ranks learn of it.
    tokens_ = fault_.kind == RoutingFault::Kind::none ? args_.routing.num_tokens : 0;
    const RowPath path(args_, true);
    if (tokens_ > 0) format_ = static_cast<int64_t>(path.travelling().format);
    lay_out_counts();
    dropped_ = homes_.assign(problem_, args_.routing, tokens_);
    if (spread_ == Spread::nodes) send_to_relays(problem_, tokens_, homes_);
    count_rows();
  } catch (const std::exception& e) {
    args_.comm->abort(e.what());
    throw;
  }
  exchange();
  const RowPath path(args_, true);
  write_messages(&path, {});
  begin_rows(&path);
}

void Dispatch::send_on(const ExpertRows& rows) {
  state_ = CallState{.layout = layout_};
  tokens_ = rows.num_rows;
  if (tokens_ > 0) format_ = static_cast<int64_t>(rows.format.format);
  lay_out_counts();
  count_rows();
  exchange();
  write_messages(nullptr, rows);
  begin_rows(nullptr);
}

void Dispatch::exchange() {
  exchange_counts();
  check_headers();
  check_rows();
  settle_capacity();
  if (args_.dropped != nullptr) *args_.dropped = dropped_;
  place_messages();
}

void Dispatch::place_messages() {
  const auto cursor = list<int64_t>(layout_.cursor);
  const auto send_offset = list<int64_t>(layout_.send_offset);
  const auto send_bytes = list<int64_t>(layout_.send_bytes);
  const RowMessage message(state_.format.record_bytes, args_.routing.top_k);
  if (spread_ == Spread::all_rows) {
    // One block for all; under CapacityPolicy::drop it ends where the receivers' room ends.
    const int64_t rows = problem_.capacity.policy == CapacityPolicy::exact
                             ? tokens_
                             : units_after(far_header(me_))[0];
    std::fill(send_offset.begin(), send_offset.end(), 0);
    std::fill(send_bytes.begin(), send_bytes.end(), rows * message.bytes);
    return;
  }
  const int64_t top_k = args_.routing.top_k;
  std::fill(cursor.begin(), cursor.end(), 0);
  for (int64_t t = 0; t < tokens_; ++t) {
    for (int64_t j = 0; j < top_k; ++j) {
      if (homes_.sends_row(t, j)) ++cursor[homes_.rank(t, j)];
    }
  }
  int64_t next = 0;
  for (int r = 0; r < ranks_; ++r) {
    send_offset[r] = next * message.bytes;
    send_bytes[r] = cursor[r] * message.bytes;
    next += cursor[r];
    cursor[r] = next - cursor[r];
  }
  auto* message_of = at<int64_t>(layout_.message_of);
  for (int64_t t = 0; t < tokens_; ++t) {
    int64_t* mine = message_of + t * layout_.copies;
    std::fill_n(mine, layout_.copies, -1);
    int64_t count = 0;
    for (int64_t j = 0; j < top_k; ++j) {
      if (homes_.sends_row(t, j)) mine[count++] = cursor[homes_.rank(t, j)]++;
    }
  }
}

void Dispatch::write_meta(int64_t token, int rank, std::byte* bytes) const {
  const int64_t top_k = args_.routing.top_k;
  const RowMessage message(state_.format.record_bytes, top_k);
  std::memcpy(bytes + message.token_offset, &token, sizeof(token));
  auto* ids = reinterpret_cast<int32_t*>(bytes + message.ids_offset);
  const auto* slot_rank = at<int32_t>(layout_.slot_rank) + token * top_k;
  const auto* slot_expert = at<LocalExpert>(layout_.slot_expert) + token * top_k;
  for (int64_t j = 0; j < top_k; ++j) {
    ids[j] = -1;
    if (slot_expert[j] == LocalExpert::none) continue;
    if (spread_ != Spread::all_rows && slot_rank[j] != rank) continue;
    ids[j] = spread_ == Spread::needed_rows ? index_of(slot_expert[j])
                                            : index_of(args_.routing.ids[token * top_k + j]);
  }
  std::memcpy(bytes + message.weights_offset, args_.routing.weights + token * top_k,
              static_cast<size_t>(top_k) * sizeof(float));
  const int64_t end = message.weights_offset + 4 * top_k;
  std::memset(bytes + end, 0, static_cast<size_t>(message.bytes - end));
}

bool Dispatch::lends_records(const RowPath* path) const {
  return args_.comm->lends() && path != nullptr && path->in_place();
}

void Dispatch::write_messages(const RowPath* path, const ExpertRows& given) const {
  const int64_t top_k = args_.routing.top_k;
  const RowMessage message(state_.format.record_bytes, top_k);
  const int64_t width = args_.wire.width;
  const auto record_bytes = static_cast<size_t>(state_.format.record_bytes);
  auto* messages = at<std::byte>(layout_.send_rows);
  auto* scratch = at<float>(layout_.scratch);
  const auto* message_of = at<int64_t>(layout_.message_of);
  const int64_t copies = spread_ == Spread::all_rows ? 1 : layout_.copies;
  const int64_t rows = spread_ == Spread::all_rows
                           ? list<int64_t>(layout_.send_bytes)[me_] / message.bytes
                           : tokens_;
  const bool lends = lends_records(path);
  const auto piece = [&](int64_t begin, int64_t end, int64_t task) {
    for (int64_t t = begin; t < end; ++t) {
      if (spread_ == Spread::all_rows) {
        if (!lends) path->write(t, scratch + task * width, messages + t * message.bytes);
        write_meta(t, me_, messages + t * message.bytes);
        continue;
      }
      const std::byte* first = nullptr;
      int64_t count = 0;
      for (int64_t j = 0; j < top_k; ++j) {
        if (!homes_.sends_row(t, j)) continue;
        std::byte* to = messages + message_of[t * layout_.copies + count++] * message.bytes;
        if (lends) {
          // Whoever gets the message reads the record from the caller's tensor.
        } else if (first == nullptr && path != nullptr) {
          path->write(t, scratch + task * width, to);
        } else {
          std::memcpy(to, first != nullptr ? first : given.record(t), record_bytes);
        }
        first = to;
        write_meta(t, homes_.rank(t, j), to);
      }
    }
  };
  parallel_rows(args_.threads, rows, copies * message.bytes, piece);
}

void Dispatch::begin_rows(const RowPath* path) {
  const RowMessage message(state_.format.record_bytes, args_.routing.top_k);
  const auto recv_offset = list<int64_t>(layout_.recv_offset);
  const auto recv_bytes = list<int64_t>(layout_.recv_bytes);
  const auto* row_begin = at<int64_t>(layout_.row_begin);
  for (int r = 0; r < ranks_; ++r) {
    recv_offset[r] = row_begin[r] * message.bytes;
    recv_bytes[r] = (row_begin[r + 1] - row_begin[r]) * message.bytes;
  }
  state_.num_rows = row_begin[ranks_];
  const comm::Exchange exchange{at<std::byte>(layout_.send_rows),
                                list<int64_t>(layout_.send_offset),
                                list<int64_t>(layout_.send_bytes),
                                at<std::byte>(layout_.recv_rows),
                                recv_offset,
                                recv_bytes,
                                args_.comm->lends() ? &state_.lent_messages : nullptr};
  state_.lent_messages = {at<std::byte>(layout_.send_rows),
                          list<int64_t>(layout_.send_offset).data()};
  if (lends_records(path)) {
    state_.lent_messages.records = path->rows();
    state_.lent_messages.record_stride = path->row_stride();
  }
  comm::note_traffic(exchange.send_bytes, me_, message.bytes);
  state_.ticket = args_.comm->begin_all_to_all_v(exchange, args_.site("dispatch rows"));
}

RowSource Dispatch::source_of(int64_t row) const {
  const RowMessage message(state_.format.record_bytes, args_.routing.top_k);
  const auto* row_begin = at<int64_t>(layout_.row_begin);
  const auto* after = std::upper_bound(row_begin, row_begin + ranks_ + 1, row);
  RowSource source{static_cast<int32_t>(after - row_begin - 1), 0};
  std::memcpy(&source.token,
              at<std::byte>(layout_.recv_rows) + row * message.bytes + message.token_offset,
              sizeof(source.token));
  return source;
}

void Dispatch::unpack_rows(const RowMessage& message) const {
  const int64_t top_k = args_.routing.top_k;
  const auto* messages = at<std::byte>(layout_.recv_rows);
  auto* ids = at<LocalExpert>(layout_.ids);
  auto* weights = at<float>(layout_.weights);
  const auto piece = [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t n = begin; n < end; ++n) {
      const std::byte* bytes = messages + n * message.bytes;
      const auto* sent = reinterpret_cast<const int32_t*>(bytes + message.ids_offset);
      std::memcpy(weights + n * top_k, bytes + message.weights_offset,
                  static_cast<size_t>(top_k) * sizeof(float));
      if (spread_ != Spread::all_rows) {
        for (int64_t j = 0; j < top_k; ++j) ids[n * top_k + j] = LocalExpert{sent[j]};
        continue;
      }
      const RowSource source = source_of(n);
      const int64_t turn = replica_turn(problem_, source.rank, source.token, weights + n * top_k);
      for (int64_t j = 0; j < top_k; ++j) {
        LocalExpert& id = ids[n * top_k + j];
        id = LocalExpert::none;
        if (sent[j] < 0) continue;
        const ExpertHome home = problem_.placement->home(sent[j], turn);
        if (home.rank == me_) id = LocalExpert{home.slot};
      }
    }
  };
  parallel_rows(args_.threads, state_.num_rows, 16 * top_k, piece);
}

/// Copies what peers have for this rank.
void Dispatch::read_messages(std::span<const void* const> lent) const {
  const RowMessage message(state_.format.record_bytes, args_.routing.top_k);
  const auto* row_begin = at<int64_t>(layout_.row_begin);
  const int64_t row_bytes = state_.format.row_bytes();
  trace::Span span(trace::Stage::copy);
  span.facts().bytes = row_begin[ranks_] * message.bytes;
  // Starting at one's own number spreads the ranks over the senders' memory.
  for (int step = 0; step < ranks_; ++step) {
    const int from = (me_ + step) % ranks_;
    const auto& theirs = *static_cast<const LentMessages*>(lent[static_cast<size_t>(from)]);
    const std::byte* sent = theirs.messages + theirs.offset[me_];
    std::byte* got = at<std::byte>(layout_.recv_rows) + row_begin[from] * message.bytes;
    const auto piece = [&](int64_t begin, int64_t end, int64_t) {
      if (theirs.records == nullptr) {
        std::memcpy(got + begin * message.bytes, sent + begin * message.bytes,
                    static_cast<size_t>((end - begin) * message.bytes));
        return;
      }
      for (int64_t n = begin; n < end; ++n) {
        const std::byte* in = sent + n * message.bytes;
        std::byte* out = got + n * message.bytes;
        int64_t token = 0;
        std::memcpy(&token, in + message.token_offset, sizeof(token));
        std::memcpy(out, theirs.records + token * theirs.record_stride,
                    static_cast<size_t>(row_bytes));
        std::memset(out + row_bytes, 0, static_cast<size_t>(message.token_offset - row_bytes));
        std::memcpy(out + message.token_offset, in + message.token_offset,
                    static_cast<size_t>(message.bytes - message.token_offset));
      }
    };
    parallel_rows(args_.threads, row_begin[from + 1] - row_begin[from], message.bytes, piece);
  }
}

ExpertRows Dispatch::receive_messages() {
  if (args_.comm->lends()) {
    const auto read = [&](std::span<const void* const> lent) { read_messages(lent); };
    args_.comm->finish_reading(state_.ticket, read);
  } else {
    args_.comm->finish(state_.ticket);
  }
  const RowMessage message(state_.format.record_bytes, args_.routing.top_k);
  unpack_rows(message);
  ExpertRows rows;
  rows.format = state_.format;
  rows.records = at<std::byte>(layout_.recv_rows);
  rows.record_stride = message.bytes;
  rows.num_rows = state_.num_rows;
  rows.top_k = args_.routing.top_k;
  rows.ids = at<LocalExpert>(layout_.ids);
  rows.weights = at<float>(layout_.weights);
  return rows;
}

ExpertRows Dispatch::receive() {
  ExpertRows rows = receive_messages();
  if (quantizes_here(args_, state_.format)) {
    rows = quantize_rows(args_, rows, at<float>(layout_.scratch), at<std::byte>(layout_.delivered));
  }
  if (rows_ == RowsLayout::standard) return rows;
  const ExpertRows batched = place_rows(rows, layout_.batched, args_.workspace,
                                        [&](int64_t row) { return source_of(row); });
  copy_records(rows, batched, args_.threads);
  return batched;
}

}  // namespace moekit::prepare
