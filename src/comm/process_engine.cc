#include "comm/process_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace moekit::comm {
namespace {

// As in a group of threads: about 20 µs of pauses, none where ranks outnumber the CPUs.
constexpr int kSpins = 600;
// A peer can be this many operations ahead: 16 in flight there, which need posts of operations that
// are 16 older, of which the oldest may be in flight here still.
constexpr int64_t kWindow = 2 * Communicator::kMaxInFlight;

}  // namespace

ProcessEngine::ProcessEngine(ProcessGroup group)
    : group_(std::move(group)),
      spins_(group_.size <= usable_cpus() ? kSpins : 0),
      links_(static_cast<size_t>(group_.size), nullptr),
      outgoing_(static_cast<size_t>(Communicator::kMaxInFlight * group_.size)),
      incoming_(static_cast<size_t>(kWindow * group_.size)),
      seen_(static_cast<size_t>(group_.size)),
      waits_(static_cast<size_t>(group_.size), -1),
      gave_up_(fmt::format("rank {} gave up", group_.rank)) {
  for (int r = 0; r < size(); ++r) {
    const auto at = static_cast<size_t>(r);
    if (r == rank()) continue;
    links_[at] = group_.members[at] >= 0
                     ? group_.island->link(group_.members[at])
                     : group_.messages->link(static_cast<size_t>(group_.message_links[at]));
  }
}

ProcessEngine::Outgoing& ProcessEngine::outgoing(int64_t number, int peer) {
  return outgoing_[static_cast<size_t>(number % Communicator::kMaxInFlight * size() + peer)];
}
ProcessEngine::Incoming& ProcessEngine::incoming(int64_t number, int peer) {
  return incoming_[static_cast<size_t>(number % kWindow * size() + peer)];
}
const ProcessEngine::Incoming& ProcessEngine::incoming(int64_t number, int peer) const {
  return incoming_[static_cast<size_t>(number % kWindow * size() + peer)];
}

int64_t ProcessEngine::bytes_to(const Operation& o, int peer) const {
  if (o.kind == OperationKind::barrier) return 0;
  return o.kind == OperationKind::allgather ? o.bytes
                                            : o.exchange.send_bytes[static_cast<size_t>(peer)];
}

int64_t ProcessEngine::bytes_from(const Operation& o, int peer) const {
  if (o.kind == OperationKind::barrier) return 0;
  return o.kind == OperationKind::allgather ? o.bytes
                                            : o.exchange.recv_bytes[static_cast<size_t>(peer)];
}

int64_t ProcessEngine::begin(OperationKind kind, const Exchange& exchange, int64_t bytes,
                             CallSite site) {
  check();
  const int64_t number = next_operation_;
  Operation& o = operation(number);
  MOEKIT_CHECK(o.number < 0, "rank {}: {} exchanges are in flight already ({}); finish one first",
               rank(), Communicator::kMaxInFlight, to_string(site));
  ++next_operation_;
  note(site);
  o = Operation{};
  o.number = number;
  o.kind = kind;
  o.site = site;
  o.exchange = exchange;
  o.bytes = bytes;
  for (int r = 0; r < size(); ++r) {
    outgoing(number, r) = Outgoing{};
    if (r == rank()) continue;
    o.to_send += bytes_to(o, r);
    o.to_receive += bytes_from(o, r);
  }
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && incoming(number, r).number == number) {
      ++o.posts;
      compare(o, r);
    }
  }
  if (bytes_to(o, rank()) != bytes_from(o, rank()) || bytes_to(o, rank()) < 0) {
    fail_group(
        ErrorCode::comm,
        fmt::format("counts disagree in {}: rank {} sends {} bytes to rank {}, which expects "
                    "{} bytes from it; nothing was moved",
                    to_string(site), rank(), bytes_to(o, rank()), rank(), bytes_from(o, rank())));
  }
  pump();
  return number;
}

bool ProcessEngine::in_flight(int64_t number) const {
  return number >= 0 && operation(number).number == number;
}

bool ProcessEngine::is_complete(const Operation& o) const {
  const bool agreed = o.kind != OperationKind::all_to_all_v ||
                      (o.agreements == peers() && o.agreements_sent == peers());
  return o.posts == peers() && o.posts_sent == peers() && agreed && o.to_send == 0 &&
         o.to_receive == 0;
}

bool ProcessEngine::complete(int64_t number) noexcept {
  pump();
  return failed_ || is_complete(operation(number));
}

void ProcessEngine::finish(int64_t number) {
  Operation& o = operation(number);
  auto done = [&] { return is_complete(o); };
  auto describe = [&] { return describe_wait(o); };
  wait_until(done, &o.moved, describe);
  settle();
  if (const int64_t own = bytes_to(o, rank()); own > 0) {
    const bool gather = o.kind == OperationKind::allgather;
    const auto self = static_cast<size_t>(rank());
    const int64_t from = gather ? 0 : o.exchange.send_offset[self];
    const int64_t to = gather ? rank() * o.bytes : o.exchange.recv_offset[self];
    std::memcpy(static_cast<std::byte*>(o.exchange.recv) + to,
                static_cast<const std::byte*>(o.exchange.send) + from, static_cast<size_t>(own));
  }
  o.number = -1;
  while (oldest_operation_ < next_operation_ &&
         operation(oldest_operation_).number != oldest_operation_) {
    ++oldest_operation_;
  }
}

void ProcessEngine::take(int peer, const FrameHeader& frame) {
  const auto heap = static_cast<size_t>(frame.operation);
  switch (frame.kind) {
    case FrameKind::post: return take_post(peer, frame);
    case FrameKind::data: return take_data(peer, frame);
    case FrameKind::agree:
      // The peer has this rank's post, so the operation has begun here.
      incoming(frame.operation, peer).agreement = true;
      ++operation(frame.operation).agreements;
      return;
    case FrameKind::put:
      take_position(peer, frame);
      if (heap < heaps_.size() && heaps_[heap] != nullptr) {
        heaps_[heap]->take_put(frame.sends, &frame + 1, frame.bytes);
      }
      return;
    case FrameKind::signal:
      take_position(peer, frame);
      if (heap < heaps_.size() && heaps_[heap] != nullptr) {
        heaps_[heap]->take_signal(frame.sends, frame.value);
      }
      return;
    case FrameKind::waits:
      take_position(peer, frame);
      if (frame.sends >= 0 && frame.sends < size()) {
        waits_[static_cast<size_t>(peer)] = static_cast<int>(frame.sends);
      }
      return;
    case FrameKind::goodbye:
    case FrameKind::failure: return;  // have a stream of their own
  }
}

void ProcessEngine::take_post(int peer, const FrameHeader& frame) {
  Incoming& theirs = incoming(frame.operation, peer);
  theirs = Incoming{};
  theirs.number = frame.operation;
  theirs.kind = static_cast<OperationKind>(frame.operation_kind);
  theirs.call = frame.call;
  theirs.layer = frame.layer;
  theirs.sends = frame.sends;
  theirs.expects = frame.expects;
  std::memcpy(theirs.phase, frame.phase, kPhaseBytes);
  take_position(peer, frame);
  Operation& o = operation(frame.operation);
  if (o.number != frame.operation) return;  // not begun here
  ++o.posts;
  compare(o, peer);
}

void ProcessEngine::take_position(int peer, const FrameHeader& frame) {
  Position& seen = seen_[static_cast<size_t>(peer)];
  seen.call = frame.call;
  seen.layer = frame.layer;
  std::memcpy(seen.phase, frame.phase, kPhaseBytes);
  waits_[static_cast<size_t>(peer)] = -1;
}

void ProcessEngine::take_here(FrameHeader& header) const {
  header.call = here_.call;
  header.layer = here_.layer;
  std::memcpy(header.phase, here_.phase, kPhaseBytes);
}

void ProcessEngine::take_data(int peer, const FrameHeader& frame) {
  Operation& o = operation(frame.operation);
  Incoming& theirs = incoming(frame.operation, peer);
  const int64_t bytes = frame.bytes;
  MOEKIT_CHECK_AS(
      ErrorCode::internal,
      o.number == frame.operation && theirs.bytes + bytes <= bytes_from(o, peer),
      "rank {} got {} bytes of operation {} from rank {} that it does not expect; please report "
      "this",
      rank(), bytes, frame.operation, peer);
  const int64_t offset = o.kind == OperationKind::allgather
                             ? peer * o.bytes
                             : o.exchange.recv_offset[static_cast<size_t>(peer)];
  std::memcpy(static_cast<std::byte*>(o.exchange.recv) + offset + theirs.bytes, &frame + 1,
              static_cast<size_t>(bytes));
  theirs.bytes += bytes;
  o.to_receive -= bytes;
  o.moved += bytes;
}

bool ProcessEngine::send_payload(Operation& o, int peer) {
  Outgoing& mine = outgoing(o.number, peer);
  const int64_t all = bytes_to(o, peer);
  if (mine.bytes >= all) return false;  // nothing is left, or a barrier, which has no lists
  const bool gather = o.kind == OperationKind::allgather;
  const auto* from = static_cast<const std::byte*>(o.exchange.send) +
                     (gather ? 0 : o.exchange.send_offset[static_cast<size_t>(peer)]);
  FrameHeader header;
  header.kind = FrameKind::data;
  header.operation = o.number;
  bool moved = false;
  for (; mine.bytes < all; moved = true) {
    const int64_t sent =
        links_[static_cast<size_t>(peer)]->try_send(header, from + mine.bytes, all - mine.bytes);
    if (sent < 0) break;
    mine.bytes += sent;
    o.to_send -= sent;
    o.moved += sent;
  }
  return moved;
}

bool ProcessEngine::advance_peer(Operation& o, int peer) {
  Link& link = *links_[static_cast<size_t>(peer)];
  Outgoing& mine = outgoing(o.number, peer);
  bool moved = false;
  if (!mine.post) {
    FrameHeader header;
    header.kind = FrameKind::post;
    header.operation_kind = static_cast<uint32_t>(o.kind);
    header.operation = o.number;
    header.call = o.site.call;
    header.layer = o.site.layer;
    header.sends = bytes_to(o, peer);
    header.expects = bytes_from(o, peer);
    copy_phase(header.phase, o.site.phase);
    if (link.try_send(header, nullptr, 0) < 0) return false;
    mine.post = moved = true;
    ++o.posts_sent;
  }
  if (o.kind == OperationKind::barrier) return moved;
  if (o.kind == OperationKind::all_to_all_v) {
    if (!mine.agreement && o.posts == peers()) {
      FrameHeader header;
      header.kind = FrameKind::agree;
      header.operation = o.number;
      if (link.try_send(header, nullptr, 0) < 0) return moved;
      mine.agreement = moved = true;
      ++o.agreements_sent;
    }
    if (!mine.agreement || o.agreements != peers()) return moved;
  } else if (incoming(o.number, peer).number != o.number) {
    return moved;  // the peer has no place for it yet
  }
  return send_payload(o, peer) || moved;
}

bool ProcessEngine::advance(Operation& o) {
  const bool all_sent = o.posts_sent == peers() && o.to_send == 0 &&
                        (o.kind != OperationKind::all_to_all_v || o.agreements_sent == peers());
  if (all_sent) return false;
  bool moved = false;
  // Starting behind one's own number spreads the ranks over the receivers.
  for (int step = 1; step < size(); ++step) {
    moved |= advance_peer(o, (rank() + step) % size());
  }
  return moved;
}

bool ProcessEngine::link_moves(int peer) {
  Link& link = *links_[static_cast<size_t>(peer)];
  bool moved = false;
  while (!failed_) {
    const FrameHeader* frame = link.front();
    if (frame == nullptr) break;
    take(peer, *frame);
    link.pop();
    moved = true;
  }
  return moved;
}

bool ProcessEngine::pump() noexcept {
  try {
    bool moved = group_.messages && group_.messages->poll();
    learn_of_failure();
    for (int r = 0; r < size() && !failed_; ++r) {
      if (r != rank()) moved |= link_moves(r);
    }
    for (int64_t n = oldest_operation_; n < next_operation_ && !failed_; ++n) {
      if (operation(n).number == n) moved |= advance(operation(n));
    }
    for (Link* link : links_) {
      if (link != nullptr) link->flush();
    }
    return moved;
  } catch (const Error& e) {
    fail_group(e.code(), e.what());
  } catch (...) {
    fail_group(ErrorCode::out_of_memory, {});
  }
  return true;
}

int64_t ProcessEngine::add_heap(HeapTarget* heap) {
  heaps_.push_back(heap);
  return static_cast<int64_t>(heaps_.size()) - 1;
}

void ProcessEngine::remove_heap(int64_t number) { heaps_[static_cast<size_t>(number)] = nullptr; }

void ProcessEngine::note(const CallSite& site) noexcept {
  here_.call = site.call;
  here_.layer = site.layer;
  copy_phase(here_.phase, site.phase);
  if (group_.island) group_.island->note(here_);
}

void ProcessEngine::note_wait(int peer) noexcept {
  waits_for_ = peer;
  if (group_.island) group_.island->note_wait(peer);
}

void ProcessEngine::ring(int to) {
  const int member = group_.members[static_cast<size_t>(to)];
  if (member >= 0 && to != rank()) group_.island->ring(member);
}

void ProcessEngine::send(int to, FrameHeader header, const void* payload, int64_t bytes) {
  Link& link = *links_[static_cast<size_t>(to)];
  const auto* from = static_cast<const std::byte*>(payload);
  take_here(header);
  int64_t sent = -1;
  auto room = [&] { return (sent = link.try_send(header, from, bytes)) >= 0; };
  auto describe = [&] {
    return fmt::format(
        "rank {} waited {} ms for {} to take what was put into its heap in {}: expected room for "
        "{} "
        "bytes, seen none; a rank of another node takes it inside its own calls only, or raise the "
        "deadline",
        rank(), deadline_ms(), describe_chain(to), describe_here(), bytes);
  };
  check();
  do {
    if (!room()) {
      note_wait(to);
      wait_until(room, nullptr, describe);
      note_wait(-1);
    }
    from += sent;
    header.sends += sent;
    bytes -= sent;
  } while (bytes > 0);
  link.flush();
}

}  // namespace moekit::comm
