// LayerRuntime::set_placement: two votes of all ranks, then a step that can't fail.
#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <optional>

#include "base/check.h"
#include "base/log.h"
#include "base/rank_text.h"
#include "engine/layer_runtime.h"

namespace moekit::engine {
namespace {

/// What a rank says about a step of the change.
struct Vote {
  uint64_t digest = 0;
  int64_t code = 0;  ///< ErrorCode; ok: the rank can go on
  char text[496] = {};
};

Vote vote_of(ErrorCode code, const char* text) {
  Vote vote;
  vote.code = static_cast<int64_t>(code);
  std::strncpy(vote.text, text, sizeof(vote.text) - 1);
  return vote;
}

void check_votes(const std::vector<Vote>& votes) {
  for (size_t r = 0; r < votes.size(); ++r) {
    if (votes[r].code == static_cast<int64_t>(ErrorCode::ok)) continue;
    fail(static_cast<ErrorCode>(votes[r].code), "{}; the old placement stays in force",
         rank_text(static_cast<int64_t>(r), votes[r].text));
  }
  for (size_t r = 1; r < votes.size(); ++r) {
    MOEKIT_CHECK(votes[r].digest == votes[0].digest,
                 "rank {} asks for another placement than rank 0 (digests {:016x} and {:016x}): "
                 "pass equal placements on all ranks; the old placement stays in force",
                 r, votes[r].digest, votes[0].digest);
  }
}

/// Runs `body`, which returns the rank's digest, and tells all ranks how it went. Throws on all of
/// them unless it went well everywhere with one digest.
template <typename Body>
void agree(comm::Communicator& comm, int64_t layer, const char* phase, Body&& body) {
  Vote mine;
  try {
    mine.digest = body();
  } catch (const Error& e) {
    mine = vote_of(e.code(), e.what());
  } catch (const std::bad_alloc&) {
    mine = vote_of(ErrorCode::out_of_memory, "no memory left");
  } catch (const std::exception& e) {
    mine = vote_of(ErrorCode::internal, e.what());
  }
  std::vector<Vote> votes(static_cast<size_t>(comm.size()));
  comm.allgather(&mine, votes.data(), sizeof(Vote), {phase, 0, layer});
  try {
    check_votes(votes);
  } catch (const Error& error) {
    comm.note_refusal(error);  // every rank has the same votes
    throw;
  }
}

/// The gate is closed while this lives.
class ClosedGate {
 public:
  explicit ClosedGate(CallGate& gate) : gate_(gate), closed_(gate.try_close()) {}
  ~ClosedGate() {
    if (closed_) gate_.open();
  }
  ClosedGate(const ClosedGate&) = delete;
  ClosedGate& operator=(const ClosedGate&) = delete;
  bool closed() const { return closed_; }

 private:
  CallGate& gate_;
  const bool closed_;
};

/// Throws unless a layer of `problem` can take `next`.
void check_fits(const Problem& problem, const ExpertPlacement& next) {
  MOEKIT_CHECK(problem.slots_per_rank > 0,
               "the layer was planned with a fixed placement: set slots_per_rank of the plan "
               "options to the most experts that a rank shall ever hold");
  MOEKIT_CHECK(next.num_ranks() == problem.num_ranks,
               "the placement lists experts of {} ranks, the layer runs on {}", next.num_ranks(),
               problem.num_ranks);
  MOEKIT_CHECK(next.max_slots() <= problem.slots_per_rank,
               "the placement gives a rank {} experts, the layer was planned for {} slots a rank",
               next.max_slots(), problem.slots_per_rank);
}

}  // namespace

PlacementChange LayerRuntime::set_placement(const Placement& wanted) {
  comm::Communicator& comm = *options_.comm.impl;
  Problem& problem = plan_->problem;
  const ClosedGate gate(gate_);
  std::shared_ptr<const ExpertPlacement> next;
  agree(comm, number_, "placement: proposal", [&] {
    MOEKIT_CHECK(gate.closed(),
                 "{} call(s) are in flight: a placement changes between two calls only",
                 gate_.in_flight());
    next = std::make_shared<const ExpertPlacement>(
        ExpertPlacement::from_lists(problem.config.num_experts, wanted.experts_of_rank));
    check_fits(problem, *next);
    return next->digest();
  });
  ExpertStore::Staged staged;
  PlanSummary summary = explanation_.plan;
  std::vector<PlanField> fields;
  agree(comm, number_, "placement: packed", [&] {
    ThreadPool threads(plan_->num_threads);
    staged = store_.stage(*plan_, *canonical_, plan_->local_experts(),
                          next->experts_of(problem.rank), threads);
    Plan changed = *plan_;
    changed.problem.placement = next;
    fields = plan_fields(*canonical_, changed);
    summary.weights_bytes = staged.layout.total_bytes();
    summary.placement_bytes = plan_->store.total_bytes() - summary.weights_bytes;
    summary.wire_bytes = wire_bytes_of(*plan_, changed.problem);
    summary.hash = hash_text(hash_of(fields));
    return uint64_t{0};
  });
  // From here on nothing can fail: all ranks have what they need.
  store_.commit(staged);
  problem.placement = std::move(next);
  plan_->hash = hash_of(fields);
  plan_->fields = std::move(fields);
  plan_->layout = std::move(staged.layout);
  explanation_.plan = std::move(summary);
  load_.reset();
  return staged.change;
}

LoadStatistics LayerRuntime::gather_load_statistics() const {
  comm::Communicator& comm = tp_.rows();  // slices of one share see the same tokens
  LoadStatistics sum = load_.read();
  std::vector<int64_t> mine = sum.per_expert;
  mine.insert(mine.end(), sum.per_rank.begin(), sum.per_rank.end());
  mine.push_back(sum.tokens);
  std::vector<int64_t> all(mine.size() * static_cast<size_t>(comm.size()));
  comm.allgather(mine.data(), all.data(), static_cast<int64_t>(mine.size() * sizeof(int64_t)),
                 {"load statistics", 0, number_});
  std::fill(mine.begin(), mine.end(), 0);
  for (size_t i = 0; i < all.size(); ++i) mine[i % mine.size()] += all[i];
  const auto ranks = mine.begin() + static_cast<int64_t>(sum.per_expert.size());
  sum.per_expert.assign(mine.begin(), ranks);
  sum.per_rank.assign(ranks, mine.end() - 1);
  sum.tokens = mine.back();
  return sum;
}

}  // namespace moekit::engine
