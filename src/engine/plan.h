// Plan: the oracle's result for one problem on one rank, immutable and shareable: members, duties,
// one weight layout, the ladder of buckets and the workspace's regions.
#pragma once

#include <span>
#include <vector>

#include "engine/plan_agreement.h"
#include "engine/tensor_parallel.h"
#include "moekit/plan.h"
#include "problem/canonical_layer.h"
#include "problem/problem.h"
#include "problem/workspace_layout.h"
#include "router/router.h"
#include "select/oracle.h"

namespace moekit::engine {

/// Calls of up to max_tokens live tokens run with these knobs.
struct Bucket {
  int64_t max_tokens = 0;
  experts::Knobs knobs;
};

/// Regions of the modular kernel in a workspace.
struct Regions {
  Region prepare;     ///< PrepareFinalize's state and rows
  Region experts;     ///< Experts' scratch
  Region expert_out;  ///< slot rows or summed rows
  Region reduced;     ///< WeightAndReduce's output
};

/// What the layer around the modular kernel adds.
struct LayerRegions {
  Region input;         ///< [T, hidden] f32 where the caller's rows are not
  Region records;       ///< [T] records of quantized hidden rows
  Region logits;        ///< [T, E]
  Region ids;           ///< [T, k] GlobalExpert
  Region weights;       ///< [T, k]
  Region token_ids;     ///< [T] int64
  Region latent;        ///< [T, latent]
  Region routed;        ///< [T, routed_width]
  Region hidden;        ///< [T, hidden] routed rows back from the latent space
  Region shared;        ///< [T, hidden]
  SliceRegions slices;  ///< with tensor parallelism
  Region gate;          ///< [T] shared gate
  Region scratch;       ///< router, linear and shared expert in turn
};

/// Memory of the packed experts: a head, places for experts, and places where a change of placement
/// packs those that come.
struct StorePlan {
  int64_t head_bytes = 0;    ///< largest head
  int64_t expert_bytes = 0;  ///< largest expert
  int64_t slots = 0;
  int64_t staged = 0;  ///< with one more to move experts around; 0: the placement is fixed
  int64_t total_bytes() const;
};

struct Plan {
  Problem problem;
  select::Choice choice;
  WeightLayout layout;
  StorePlan store;
  std::vector<Bucket> buckets;  ///< ascending max_tokens; the last holds problem.max_tokens
  Regions regions;
  LayerRegions layer_regions;
  WorkspaceLayout workspace;
  int64_t device_workspace_bytes = 0;  ///< beside it, in the device's memory
  prepare::HeapNeed heap;              ///< of each workspace
  int num_threads = 1;
  bool moves_rows = false;        ///< rows cross ranks
  std::vector<PlanField> fields;  ///< on which all ranks agree
  uint64_t hash = 0;              ///< of `fields`

  std::span<const int32_t> local_experts() const {
    return problem.placement->experts_of(problem.rank);
  }
  const Bucket& bucket_of(int64_t num_tokens) const {
    for (const Bucket& bucket : buckets) {
      if (num_tokens <= bucket.max_tokens) return bucket;
    }
    return buckets.back();
  }
};

/// Payload bytes that a rank of `problem` sends in a full call.
int64_t wire_bytes_of(const Plan& plan, const Problem& problem);

/// What the caller asked for, turned into a Problem: activation schemes resolved, placement made,
/// options validated. Throws invalid_argument or unsupported. `layer` is what rank_layer gives; it
/// may be hollow (no weight data).
Problem make_problem(const CanonicalLayer& layer, const PlanOptions& options);

/// Plans, or throws unsupported with every member's reasons.
Plan make_plan(const CanonicalLayer& layer, const Problem& problem, const PlanOptions& options);

/// Never throws for lack of a back-end; `plan` (may be null) receives the plan when there is one.
Explanation explain(const CanonicalLayer& layer, const Problem& problem, const PlanOptions& options,
                    std::unique_ptr<Plan>* plan = nullptr);

/// Adds the layer's own regions to plan.workspace, so that a plan's bytes are all that a call
/// needs.
void lay_out_layer(const CanonicalLayer& layer, Plan& plan);

/// The member that routes.
const router::Router& layer_router();

/// A layer of `config` without weight data: shapes and schemes only, enough to plan. Router, shared
/// expert and latent projections are plain bf16, as in synthetic layers.
CanonicalLayer hollow_layer(const MoeConfig& config);

/// Threads of one rank: options.num_threads, or the usable CPUs divided by the ranks of this host.
int resolve_threads(const PlanOptions& options);

}  // namespace moekit::engine
