// Timings beside the whole layer's: the exchange alone, and packing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "api/probe.h"
#include "moekit/bench.h"

namespace moekit::api {

/// The layer without what dispatch and combine do not touch: expert matrices of a few columns,
/// no shared expert, no router. Same experts, width, activations and duties.
LayerSource exchange_source(const MoeConfig& config, int tp, uint64_t seed);

/// Times dispatch and combine of `num_ranks` ranks, and of one rank with a local prepare.
class ExchangeBench {
 public:
  /// For up to `tokens` tokens a rank. Throws as RankedLayer does.
  ExchangeBench(const LayerSource& source, const PlanOptions& options, int num_ranks,
                int64_t tokens);

  /// Inputs hold the tokens of all ranks with their ids and weights.
  ExchangeTime time(const RankedInputs& inputs, double min_seconds, Probe& probe);
  const Explanation& explanation() const { return ranks_.explanation(); }

 private:
  void count_bytes(const RankedInputs& inputs, ExchangeTime& time);

  int num_ranks_;
  int64_t capacity_;  ///< tokens of all ranks
  Trace trace_;
  CommunicatorHandle group_;  ///< of ranks that are processes
  RankedLayer ranks_, local_;
  RankedOutputs outputs_;
};

/// Packs rank 0's experts into fresh memory of its own; the memory is given back.
PackingTime time_packing(const LayerSource& source, const PlanOptions& options, int num_ranks,
                         Probe& probe);

/// Of sorted values; p in [0, 1].
double percentile(const std::vector<double>& sorted, double p);

}  // namespace moekit::api
