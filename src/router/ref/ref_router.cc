// The definition of routing: one token after the other, k passes over the experts. Slow and plain;
// the other members are held to it bit for bit.
#include "router/ref/ref_router.h"

#include <algorithm>
#include <cmath>

#include "problem/workspace_layout.h"
#include "router/scoring.h"
#include "router/selection.h"

namespace moekit::router {
namespace {

struct RefScratch {
  Region scores, selection, allowed, groups, slots;
  int64_t bytes = 0;
  RefScratch(const RouterSpec& spec, int64_t num_experts, int64_t top_k) {
    WorkspaceLayout layout;
    scores = layout.add(num_experts, sizeof(float));
    selection = layout.add(num_experts, sizeof(float));
    allowed = layout.add(num_experts, sizeof(bool));
    groups = layout.add(std::max(spec.num_groups, 1), sizeof(Ranked));
    slots = layout.add(top_k, sizeof(Ranked));
    bytes = layout.total();
  }
};

void score(Scoring scoring, const float* logits, int64_t num_experts, float* scores) {
  if (scoring == Scoring::softmax) {
    softmax(logits, num_experts, scores);
    return;
  }
  for (int64_t e = 0; e < num_experts; ++e) {
    scores[e] = scoring == Scoring::sigmoid         ? sigmoid(logits[e])
                : scoring == Scoring::sqrt_softplus ? sqrt_softplus(logits[e])
                                                    : logits[e];
  }
}

// The best and, for top2_sum, the second best of a group's values that are not NaN.
float group_score(GroupScore kind, const float* values, int64_t count) {
  float best = std::nanf(""), second = std::nanf("");
  for (int64_t i = 0; i < count; ++i) {
    const float v = values[i];
    if (std::isnan(v)) continue;
    if (std::isnan(best) || v > best) {
      second = best;
      best = v;
    } else if (std::isnan(second) || v > second) {
      second = v;
    }
  }
  return kind == GroupScore::max || std::isnan(second) ? best : best + second;
}

void allow_groups(const RouterSpec& spec, const float* selection, int64_t num_experts,
                  Ranked* groups, bool* allowed) {
  const int64_t size = num_experts / spec.num_groups;
  for (int32_t g = 0; g < spec.num_groups; ++g) {
    groups[g] = {group_score(spec.group_score, selection + g * size, size), g};
  }
  std::sort(groups, groups + spec.num_groups, ranks_before);
  std::fill(allowed, allowed + num_experts, false);
  for (int32_t i = 0; i < spec.topk_groups; ++i) {
    std::fill_n(allowed + groups[i].id * size, size, true);
  }
}

// Takes the best allowed expert k times.
void select(const float* selection, int64_t num_experts, bool* allowed, Ranked* slots,
            int64_t top_k) {
  for (int64_t j = 0; j < top_k; ++j) {
    Ranked best{0.0f, -1};
    for (int64_t e = 0; e < num_experts; ++e) {
      const Ranked candidate{selection[e], static_cast<int32_t>(e)};
      if (allowed[e] && (best.id < 0 || ranks_before(candidate, best))) best = candidate;
    }
    slots[j] = best;
    allowed[best.id] = false;
  }
}

class RefRouter final : public Router {
 public:
  std::string_view name() const override { return "ref"; }

  int64_t workspace_bytes(const RouterSpec& spec, int64_t num_experts, int64_t top_k,
                          int /*num_threads*/) const override {
    return RefScratch(spec, num_experts, top_k).bytes;
  }

  void run(const Args& args) const override {
    check_run(args);
    const RouterSpec& spec = *args.spec;
    const RefScratch scratch(spec, args.num_experts, args.top_k);
    auto* scores = scratch.scores.in<float>(args.workspace);
    auto* selection = scratch.selection.in<float>(args.workspace);
    auto* allowed = scratch.allowed.in<bool>(args.workspace);
    auto* groups = scratch.groups.in<Ranked>(args.workspace);
    auto* slots = scratch.slots.in<Ranked>(args.workspace);
    for (int64_t t = 0; t < args.num_tokens; ++t) {
      const float* logits = args.logits + t * args.num_experts;
      score(spec.scoring, logits, args.num_experts, scores);
      if (spec.hash_routing) {
        read_hash_row(args, t, slots);
      } else {
        const float* base = spec.select_on == SelectOn::scores ? scores : logits;
        for (int64_t e = 0; e < args.num_experts; ++e) {
          selection[e] = spec.has_selection_bias ? base[e] + args.selection_bias[e] : base[e];
        }
        std::fill(allowed, allowed + args.num_experts, true);
        if (is_grouped(spec)) allow_groups(spec, selection, args.num_experts, groups, allowed);
        select(selection, args.num_experts, allowed, slots, args.top_k);
      }
      finish_row(spec, logits, scores, slots, args.top_k);
      write_row(args, t, slots);
      report_nan_rows(args, std::any_of(logits, logits + args.num_experts,
                                        [](float l) { return std::isnan(l); }));
    }
  }
};

}  // namespace

const Router& ref_router() {
  static const RefRouter router;
  return router;
}

}  // namespace moekit::router
