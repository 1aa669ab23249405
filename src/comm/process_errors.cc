// What a ProcessEngine says when ranks disagree or do not come.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "comm/process_engine.h"

namespace moekit::comm {
namespace {

/// Phases travel cut to kPhaseBytes.
bool same_phase(const char* a, const char* b) { return std::strncmp(a, b, kPhaseBytes - 1) == 0; }

}  // namespace

void ProcessEngine::compare(Operation& o, int peer) {
  const Incoming& theirs = incoming(o.number, peer);
  if (theirs.kind != o.kind || theirs.call != o.site.call || theirs.layer != o.site.layer ||
      !same_phase(theirs.phase, o.site.phase) ||
      (o.kind == OperationKind::allgather && theirs.sends != o.bytes)) {
    return disagree(
        fmt::format("ranks disagree about the step: rank {} is in {} ({}, {} bytes), rank {} in {} "
                    "({}, {} bytes); every rank must make the same calls in the same order",
                    rank(), to_string(o.site), to_string(o.kind), o.bytes, peer,
                    to_string({theirs.phase, theirs.call, theirs.layer}), to_string(theirs.kind),
                    theirs.kind == OperationKind::allgather ? theirs.sends : 0));
  }
  auto counts_differ = [&](int from, int64_t sent, int to, int64_t expected) {
    disagree(
        fmt::format("counts disagree in {}: rank {} sends {} bytes to rank {}, which expects "
                    "{} bytes from it; nothing was moved",
                    to_string(o.site), from, sent, to, expected));
  };
  if (theirs.sends != bytes_from(o, peer) || theirs.sends < 0) {
    counts_differ(peer, theirs.sends, rank(), bytes_from(o, peer));
  } else if (theirs.expects != bytes_to(o, peer) || theirs.expects < 0) {
    counts_differ(rank(), bytes_to(o, peer), peer, theirs.expects);
  }
}

int64_t ProcessEngine::deadline_ms() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(group_.deadline).count();
}

std::string ProcessEngine::describe_rank(int r) const {
  const auto at = static_cast<size_t>(r);
  const int member = group_.members[at], link = group_.message_links[at];
  const bool left = (member >= 0 && r != rank() && group_.island->closed(member)) ||
                    (link >= 0 && group_.messages->has_left(static_cast<size_t>(link)));
  return fmt::format("rank {} ({}{})", r, describe(last_seen(r)),
                     left ? ", has left the group" : "");
}

std::string ProcessEngine::describe_here() const {
  return to_string({here_.phase, here_.call, here_.layer});
}

std::string ProcessEngine::describe(const Position& position) {
  if (position.call < 0) return "never seen";
  return "last seen in " + to_string({position.phase, position.call, position.layer});
}

Position ProcessEngine::last_seen(int r) const {
  const int member = group_.members[static_cast<size_t>(r)];
  return member >= 0 ? group_.island->position(member) : seen_[static_cast<size_t>(r)];
}

std::string ProcessEngine::describe_chain(int r) const {
  std::string text = describe_rank(r);
  for (int length = 1; length < size(); ++length) {
    const auto at = static_cast<size_t>(r);
    r = group_.members[at] >= 0 ? group_.island->waits_for(group_.members[at]) : waits_[at];
    if (r < 0 || r >= size()) break;
    if (r == rank()) return text + fmt::format(", which in turn waits for rank {}", r);
    text += ", which waits for " + describe_rank(r);
  }
  return text;
}

std::string ProcessEngine::list_ranks(FunctionRef<bool(int)> missing) const {
  constexpr int kShown = 4;
  std::string text;
  int count = 0;
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || !missing(r) || ++count > kShown) continue;
    text += (text.empty() ? "" : ", ") + describe_rank(r);
  }
  if (count > kShown) text += fmt::format(" and {} more", count - kShown);
  return text;
}

std::string ProcessEngine::describe_wait(const Operation& o) const {
  auto no_post = [&](int r) { return incoming(o.number, r).number != o.number; };
  auto no_agreement = [&](int r) { return !incoming(o.number, r).agreement; };
  auto no_rows = [&](int r) { return incoming(o.number, r).bytes < bytes_from(o, r); };
  auto any = [](int) { return true; };
  auto from_peer = [&](int r) { return bytes_from(o, r); };
  auto to_peer = [&](int r) { return bytes_to(o, r); };
  auto all_bytes = [&](const auto& bytes) {
    int64_t all = 0;
    for (int r = 0; r < size(); ++r) all += r == rank() ? 0 : bytes(r);
    return all;
  };
  const auto where = fmt::format("in {} ({})", to_string(o.site), to_string(o.kind));
  if (o.posts < peers()) {
    return fmt::format(
        "rank {} waited {} ms for {} {}: expected {} ranks, seen {}; every rank must make the same "
        "calls, one with zero tokens included, or raise the deadline",
        rank(), deadline_ms(), list_ranks(no_post), where, size(), o.posts + 1);
  }
  if (o.kind == OperationKind::all_to_all_v && o.agreements < peers()) {
    return fmt::format(
        "rank {} waited {} ms for {} to compare counts {}: expected {} ranks, seen {}; one of them "
        "has stopped in this call, or raise the deadline",
        rank(), deadline_ms(), list_ranks(no_agreement), where, size(), o.agreements + 1);
  }
  if (o.to_receive > 0) {
    return fmt::format(
        "rank {} waited {} ms for {} to send its rows {}: expected {} bytes, seen {}; the ranks "
        "that are named have stopped in this call, or raise the deadline",
        rank(), deadline_ms(), list_ranks(no_rows), where, all_bytes(from_peer),
        all_bytes(from_peer) - o.to_receive);
  }
  return fmt::format(
      "rank {} waited {} ms for {} to take its rows {}: expected {} bytes, seen {}; a rank takes "
      "rows inside its own calls only, or raise the deadline",
      rank(), deadline_ms(), list_ranks(any), where, all_bytes(to_peer),
      all_bytes(to_peer) - o.to_send);
}

}  // namespace moekit::comm
