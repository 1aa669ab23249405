// How ranks that are processes wait, fail and leave.
#include <algorithm>
#include <thread>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/rank_text.h"
#include "comm/process_engine.h"
#include "comm/wait_word.h"

namespace moekit::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Between two looks at whether the processes of peers still live.
constexpr auto kLookEvery = std::chrono::milliseconds(50);
// Messages wake nobody: a rank looks for them, first at once, later after a nap.
constexpr int kEagerLooks = 200, kYieldingLooks = 10;
constexpr auto kNap = std::chrono::microseconds(50);
constexpr auto kLongNap = std::chrono::microseconds(500);
constexpr int kNapsBeforeLong = 200;
// News of a failure takes another way than posts and may come a little later than they do.
constexpr auto kNewsTime = std::chrono::milliseconds(50);
// A rank that leaves gives its last frames this long to be taken.
constexpr auto kLeaveTime = std::chrono::seconds(2);

}  // namespace

void ProcessEngine::learn_of_failure() {
  if (failed_) return;
  if (group_.island && group_.island->failed()) {
    auto [code, reason] = group_.island->failure();
    fail_group(code, std::move(reason));
  } else if (group_.messages) {
    if (auto told = group_.messages->failure()) fail_group(told->first, std::move(told->second));
  }
}

void ProcessEngine::disagree(std::string reason) {
  // A peer that differs may be one that has failed and told so: what it failed of is the better
  // reason.
  const auto until = Clock::now() + kNewsTime;
  while (group_.messages && !failed_ && Clock::now() < until) {
    group_.messages->poll();
    learn_of_failure();
    if (!failed_) std::this_thread::sleep_for(kLongNap);
  }
  fail_group(ErrorCode::comm, std::move(reason));
}

void ProcessEngine::fail_group(ErrorCode code, std::string reason) noexcept {
  if (failed_) return;  // the first reason stays
  if (group_.island) {
    group_.island->fail(code, reason);
    // Of ranks that fail at once, one is heard by all of the island.
    try {
      std::tie(code, reason) = group_.island->failure();
    } catch (...) {
      reason.clear();
    }
  }
  failed_ = true;
  code_ = code;
  reason_ = std::move(reason);
  if (group_.messages) group_.messages->send_failure(code_, reason_);
}

void ProcessEngine::give_up(std::string_view why) noexcept {
  try {
    fail_group(ErrorCode::comm, fmt::format("{}: {} ({})", gave_up_, why, describe(here_)));
  } catch (...) {  // no memory for the words: the failure itself must still reach the peers
    fail_group(ErrorCode::comm, std::move(gave_up_));
  }
}

void ProcessEngine::refuse(const Error& error) noexcept {
  try {
    fail_group(error.code(), error.what());
  } catch (...) {  // no memory for the words: the code must still reach the peers
    fail_group(error.code(), std::string());
  }
}

void ProcessEngine::check() const {
  if (failed_) fail(code_, "{}", rank_text(rank(), reason_));
}

void ProcessEngine::look_for_the_dead() {
  const auto now = Clock::now();
  if (!group_.island || now < next_look_) return;
  next_look_ = now + kLookEvery;
  for (int r = 0; r < size(); ++r) {
    const int member = group_.members[static_cast<size_t>(r)];
    if (member < 0 || !group_.island->dead(member)) continue;
    return fail_group(ErrorCode::comm,
                      fmt::format("rank {} found in {} that {} is gone: its process {} ended "
                                  "without a word; its own output says why",
                                  rank(), to_string({here_.phase, here_.call, here_.layer}),
                                  describe_rank(r), group_.island->pid(member)));
  }
}

void ProcessEngine::idle(uint32_t seen, int round, Clock::time_point until) {
  const auto now = Clock::now();
  if (!group_.messages) {
    for (int spin = 0; spin < spins_ && group_.island->doorbell() == seen; ++spin) spin_pause();
    group_.island->sleep(seen, std::min(until, now + kLookEvery));
    return;
  }
  const int looks = spins_ > 0 ? kEagerLooks : kYieldingLooks;
  if (round < looks) return std::this_thread::yield();
  const auto nap = std::min<Clock::duration>(round < looks + kNapsBeforeLong ? kNap : kLongNap,
                                             std::max(until - now, Clock::duration::zero()));
  if (group_.island) {
    group_.island->sleep(seen, now + nap);
  } else {
    std::this_thread::sleep_for(nap);
  }
}

void ProcessEngine::wait_until(FunctionRef<bool()> done, const int64_t* progress,
                               FunctionRef<std::string()> describe) {
  auto until = Clock::now() + group_.deadline;
  int64_t reached = progress != nullptr ? *progress : 0;
  bool told = false;
  for (int round = 0;;) {
    const uint32_t seen = group_.island ? group_.island->doorbell() : 0;
    const bool moved = pump();
    check();
    if (done()) return;
    if (progress != nullptr && *progress != reached) {
      reached = *progress;
      until = Clock::now() + group_.deadline;
      told = false;
    }
    if (!told && Clock::now() >= until - group_.deadline / 2) {
      tell_wait();
      told = true;
    }
    if (Clock::now() >= until) {
      fail_group(ErrorCode::timeout, describe());
      check();
    }
    if (moved) {
      round = 0;
      continue;
    }
    look_for_the_dead();
    check();
    if (size() > 1) idle(seen, round++, until);
  }
}

void ProcessEngine::tell_wait() {
  if (waits_for_ < 0 || !group_.messages) return;
  FrameHeader header;
  header.kind = FrameKind::waits;
  header.sends = waits_for_;
  take_here(header);
  // Where there is no room, that peer names one rank less.
  for (int r = 0; r < size(); ++r) {
    const auto at = static_cast<size_t>(r);
    if (group_.message_links[at] >= 0) links_[at]->try_send(header, nullptr, 0);
  }
}

void ProcessEngine::settle() {
  if (!group_.messages) return;
  // Large messages move inside the sender's calls too; a rank that went on to its own work would
  // hold the receiver up.
  auto is_late = [&](int r) {
    const int link = group_.message_links[static_cast<size_t>(r)];
    return link >= 0 && !group_.messages->has_taken_payload(static_cast<size_t>(link));
  };
  auto num_late = [&] {
    int count = 0;
    for (int r = 0; r < size(); ++r) count += is_late(r) ? 1 : 0;
    return count;
  };
  auto done = [&] { return num_late() == 0; };
  auto describe = [&] {
    return fmt::format(
        "rank {} waited {} ms for {} to take its rows in {}: expected {} ranks, seen {}; a rank "
        "takes rows inside its own calls only, or raise the deadline",
        rank(), deadline_ms(), list_ranks(is_late), describe_here(), size(), size() - num_late());
  };
  wait_until(done, nullptr, describe);
}

void ProcessEngine::leave() noexcept {
  const bool busy = std::any_of(std::begin(operations_), std::end(operations_),
                                [](const Operation& o) { return o.number >= 0; });
  if (busy) give_up("it left with an exchange in flight");
  if (group_.island) group_.island->close();
  if (failed_ || !group_.messages) return;
  // What peers still wait for must not be taken back.
  const auto until = Clock::now() + std::min<Clock::duration>(kLeaveTime, group_.deadline);
  while (!group_.messages->settled() && !failed_ && Clock::now() < until) {
    if (!pump()) std::this_thread::sleep_for(kNap);
  }
  try {
    group_.messages->send_goodbye();
  } catch (...) {  // peers then name this rank without saying that it has left
    return;
  }
}

}  // namespace moekit::comm
