// explain_plan: the oracle's answer for one rank, without packing or running anything.
#include "engine/plan.h"
#include "engine/tensor_parallel.h"
#include "moekit/communicator.h"
#include "moekit/tools.h"
#include "select/oracle.h"

namespace moekit {

Explanation explain_plan(const LayerSource& source, const PlanOptions& options, int num_ranks,
                         int64_t tokens_per_rank) {
  PlanOptions mine = options;
  mine.max_tokens = tokens_per_rank;
  // Planning reads rank and size only, so rank 0's end may be used alone.
  std::vector<CommunicatorHandle> ends;
  if (num_ranks > 1 && mine.comm.impl == nullptr) {
    ends = make_thread_ranks(num_ranks, options.deadline, options.num_nodes);
    mine.comm = ends.front();
  }
  const auto layer = engine::rank_layer(source.canonical, mine);
  return engine::explain(*layer, engine::make_problem(*layer, mine), mine);
}

std::string refusal_of(const Explanation& explanation, const std::string& name) {
  std::vector<select::Refusal> refusals;
  for (const Candidate& candidate : explanation.candidates) {
    if (candidate.supported || (!name.empty() && candidate.name != name)) continue;
    std::string reasons;
    for (const std::string& reason : candidate.reasons) {
      reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    refusals.push_back({candidate.name, candidate.kind, reasons});
  }
  return select::join_refusals(refusals);
}

}  // namespace moekit
