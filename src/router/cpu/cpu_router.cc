// Tokens in parallel; a row is scored with vector code, turned into integer keys of the total
// order, and partially selected. The arithmetic is the reference's, so its ids and weights are too.
#include "router/cpu/cpu_router.h"

#include <algorithm>
#include <functional>

#include "base/math.h"
#include "problem/workspace_layout.h"
#include "router/cpu/row_kernels.h"
#include "router/selection.h"

namespace moekit::router {
namespace {

// Up to this k a sorted list of the best is kept while scanning; above it, its quadratic cost loses
// against a partial sort of all candidates.
constexpr int64_t kListLimit = 48;

// Logits a task: 20 to 40 µs of work several times the cost of waking a
// parked thread; smaller calls stay on the calling thread.
constexpr int64_t kTaskLogits = 8192;

// One thread's scratch.
struct Scratch {
  Region scores, keys, ranked, group_keys, kept, slots;
  int64_t bytes = 0;
  Scratch(const RouterSpec& spec, int64_t num_experts, int64_t top_k) {
    const int64_t num_groups = std::max(spec.num_groups, 1);
    WorkspaceLayout layout;
    scores = layout.add(num_experts, sizeof(float));
    keys = layout.add(num_experts, sizeof(int32_t));
    // Candidates of a partial sort: experts, or groups before them.
    ranked = layout.add(num_experts, sizeof(RankedKey));
    group_keys = layout.add(num_groups, sizeof(int32_t));
    kept = layout.add(num_groups, sizeof(int32_t));
    slots = layout.add(top_k, sizeof(Ranked));
    bytes = layout.total();
  }
};

struct Row {
  const Args& args;
  const RowKernels& kernels;
  float* scores;
  int32_t* keys;
  RankedKey* ranked;
  int32_t* group_keys;
  int32_t* kept;
  Ranked* slots;

  Row(const Args& a, const Scratch& scratch, std::byte* base)
      : args(a),
        kernels(row_kernels()),
        scores(scratch.scores.in<float>(base)),
        keys(scratch.keys.in<int32_t>(base)),
        ranked(scratch.ranked.in<RankedKey>(base)),
        group_keys(scratch.group_keys.in<int32_t>(base)),
        kept(scratch.kept.in<int32_t>(base)),
        slots(scratch.slots.in<Ranked>(base)) {}

  // The best `count` of the keys in `segments` segments of `segment_size`, ascending by number;
  // segment i starts at starts(i). They end up in ranked[0, count), best first.
  template <typename Starts>
  void select(const int32_t* from, int64_t segments, int64_t segment_size, int64_t count,
              Starts starts) {
    if (count <= kListLimit) {
      TopList list{ranked, count, 0};
      for (int64_t s = 0; s < segments; ++s) {
        kernels.offer(from, starts(s), starts(s) + segment_size, list);
      }
      return;
    }
    int64_t candidates = 0;
    for (int64_t s = 0; s < segments; ++s) {
      for (int64_t i = starts(s); i < starts(s) + segment_size; ++i) {
        ranked[candidates++] = make_ranked_key(from[i], static_cast<int32_t>(i));
      }
    }
    if (count < candidates) {
      std::nth_element(ranked, ranked + count, ranked + candidates, std::greater<>());
    }
    std::sort(ranked, ranked + count, std::greater<>());
  }

  void select_experts() {
    const RouterSpec& spec = *args.spec;
    if (!is_grouped(spec)) {
      select(keys, 1, args.num_experts, args.top_k, [](int64_t) { return int64_t{0}; });
      return;
    }
    const int64_t size = args.num_experts / spec.num_groups;
    kernels.order_groups(spec.group_score, keys, spec.num_groups, size, group_keys);
    select(group_keys, 1, spec.num_groups, spec.topk_groups, [](int64_t) { return int64_t{0}; });
    std::transform(ranked, ranked + spec.topk_groups, kept, id_of);
    std::sort(kept, kept + spec.topk_groups);
    select(keys, spec.topk_groups, size, args.top_k, [&](int64_t s) { return kept[s] * size; });
  }

  // Returns whether the row held a NaN logit.
  bool route(int64_t token) {
    const RouterSpec& spec = *args.spec;
    const float* logits = args.logits + token * args.num_experts;
    if (needs_scores(spec)) kernels.score(spec.scoring, logits, args.num_experts, scores);
    if (spec.hash_routing) {
      read_hash_row(args, token, slots);
    } else {
      kernels.order(spec.select_on == SelectOn::scores ? scores : logits,
                    spec.has_selection_bias ? args.selection_bias : nullptr, args.num_experts,
                    keys);
      select_experts();
      for (int64_t j = 0; j < args.top_k; ++j) slots[j] = {0.0f, id_of(ranked[j])};
    }
    finish_row(spec, logits, scores, slots, args.top_k);
    write_row(args, token, slots);
    return args.nan_rows != nullptr && kernels.has_nan(logits, args.num_experts);
  }
};

class CpuRouter final : public Router {
 public:
  std::string_view name() const override { return "cpu"; }

  int64_t workspace_bytes(const RouterSpec& spec, int64_t num_experts, int64_t top_k,
                          int num_threads) const override {
    return checked_mul(Scratch(spec, num_experts, top_k).bytes, num_threads, "router workspace");
  }

  void run(const Args& args) const override {
    check_run(args);
    const Scratch scratch(*args.spec, args.num_experts, args.top_k);
    const int64_t tokens_per_task = std::max<int64_t>(1, kTaskLogits / args.num_experts);
    auto task = [&](int64_t index, int thread) {
      Row row(args, scratch, args.workspace + thread * scratch.bytes);
      const int64_t begin = index * tokens_per_task;
      const int64_t end = std::min(args.num_tokens, begin + tokens_per_task);
      int64_t nan_rows = 0;
      for (int64_t t = begin; t < end; ++t) nan_rows += row.route(t) ? 1 : 0;
      report_nan_rows(args, nan_rows);
    };
    const int64_t tasks = ceil_div(args.num_tokens, tokens_per_task);
    if (args.threads != nullptr) {
      args.threads->parallel_for(tasks, task);
      return;
    }
    for (int64_t i = 0; i < tasks; ++i) task(i, 0);
  }
};

}  // namespace

const Router& cpu_router() {
  static const CpuRouter router;
  return router;
}

}  // namespace moekit::router
