// The rebalancer: replicas for hot experts, then shares packed so that ranks carry alike. Loads are
// exact integers on entry and every tie goes to the lower number, so that all ranks of a program
// that call it with equal loads get one placement.
#include <algorithm>
#include <numeric>
#include <queue>
#include <utility>

#include "base/check.h"
#include "base/math.h"
#include "moekit/placement.h"
#include "problem/placement.h"

namespace moekit {
namespace {

/// Things with a load, each `copies` times, on bins (ranks, or nodes) of `slots` slots; no bin
/// holds a thing twice.
class Packing {
 public:
  Packing(std::vector<double> loads, int64_t bins, int64_t slots)
      : loads_(std::move(loads)),
        slots_(slots),
        copies_(loads_.size(), 1),
        bins_(static_cast<size_t>(bins)),
        bin_load_(static_cast<size_t>(bins), 0.0),
        holds_(static_cast<size_t>(bins), std::vector<bool>(loads_.size(), false)) {
    // Without any load all things count alike.
    const double total = std::accumulate(loads_.begin(), loads_.end(), 0.0);
    if (total <= 0.0) std::fill(loads_.begin(), loads_.end(), 1.0);
    mean_ = (total > 0.0 ? total : static_cast<double>(loads_.size())) / static_cast<double>(bins);
  }

  const std::vector<std::vector<int32_t>>& bins() const { return bins_; }
  double heaviest() const { return *std::max_element(bin_load_.begin(), bin_load_.end()); }

  /// Gives every slot beyond the first copies to the thing whose share is the largest by then.
  void replicate() {
    using Hot = std::pair<double, int32_t>;  // share, minus the number: ties to the lower one
    std::priority_queue<Hot> hottest;
    for (int32_t e = 0; e < size(); ++e) hottest.push({share(e), -e});
    int64_t spare = num_bins() * slots_ - size();
    for (; spare > 0 && !hottest.empty(); --spare) {
      const int32_t e = -hottest.top().second;
      hottest.pop();
      if (copies_[e] == num_bins()) {
        ++spare;  // on every bin already
        continue;
      }
      ++copies_[e];
      hottest.push({share(e), -e});
    }
  }

  /// Largest share first, to the lightest bin that can take it.
  void pack() {
    std::vector<int32_t> order(loads_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return share(a) > share(b); });
    for (const int32_t e : order) {
      for (int64_t copy = 0; copy < copies_[e]; ++copy) {
        const int64_t bin = lightest_for(e);
        bin >= 0 ? put(e, bin) : make_room(e);
      }
    }
    even_out();
  }

  /// Contiguous shares, one copy each.
  void pack_linear() {
    const ExpertPlacement linear = ExpertPlacement::linear(size(), static_cast<int>(num_bins()));
    for (int64_t b = 0; b < num_bins(); ++b) {
      for (const int32_t e : linear.experts_of(static_cast<int>(b))) put(e, b);
    }
  }

  /// Fills free slots as far as no bin becomes heavier than the heaviest is.
  void fill_gently() {
    while (add_gently()) {
    }
  }

 private:
  int64_t size() const { return static_cast<int64_t>(loads_.size()); }
  int64_t num_bins() const { return static_cast<int64_t>(bins_.size()); }
  double share(int32_t e) const { return loads_[e] / static_cast<double>(copies_[e]); }
  int64_t filled(int64_t bin) const { return static_cast<int64_t>(bins_[bin].size()); }

  void put(int32_t e, int64_t bin) {
    bins_[bin].push_back(e);
    bin_load_[bin] += share(e);
    holds_[bin][e] = true;
  }
  void take(int32_t e, int64_t bin) {
    bins_[bin].erase(std::find(bins_[bin].begin(), bins_[bin].end(), e));
    bin_load_[bin] -= share(e);
    holds_[bin][e] = false;
  }

  /// The lightest bin with a free slot and without `e`, or -1.
  int64_t lightest_for(int32_t e) const {
    int64_t best = -1;
    for (int64_t b = 0; b < num_bins(); ++b) {
      if (filled(b) >= slots_ || holds_[b][e]) continue;
      if (best < 0 || std::pair(bin_load_[b], filled(b)) < std::pair(bin_load_[best], filled(best)))
        best = b;
    }
    return best;
  }

  /// Only bins that hold `e` already have a slot: one of them takes something else over from a full
  /// bin. That bin holds more than the open one, so it has something that the open one lacks.
  void make_room(int32_t e) {
    int64_t open = 0;
    while (filled(open) >= slots_) ++open;
    int64_t full = -1;
    for (int64_t b = 0; b < num_bins(); ++b) {
      if (!holds_[b][e] && (full < 0 || bin_load_[b] < bin_load_[full])) full = b;
    }
    int32_t moved = -1;
    for (const int32_t f : bins_[full]) {
      if (!holds_[open][f] && (moved < 0 || share(f) > share(moved))) moved = f;
    }
    take(moved, full);
    put(moved, open);
    put(e, full);
  }

  /// Swaps between the heaviest and the lightest bin until they differ by no more than the largest
  /// share. There always is one until then: both hold as many things, so in some pair of them the
  /// heavier bin's is the larger, and that pair differs by less than the bins do. Each swap lowers
  /// the sum of squares.
  void even_out() {
    const double least_gain = 1e-6 * mean_ / static_cast<double>(slots_);
    while (true) {
      const auto [low, high] = std::minmax_element(bin_load_.begin(), bin_load_.end());
      const int64_t light = low - bin_load_.begin(), heavy = high - bin_load_.begin();
      const double gap = *high - *low;
      const auto [f, g] = best_swap(heavy, light, gap, least_gain);
      if (f < 0) return;
      take(f, heavy);
      if (g >= 0) {
        take(g, light);
        put(g, heavy);
      }
      put(f, light);
    }
  }

  /// What to move from `heavy` and what to take back (-1: nothing, into a free slot); {-1, -1}
  /// where nothing lowers the heavier of the two.
  std::pair<int32_t, int32_t> best_swap(int64_t heavy, int64_t light, double gap,
                                        double least_gain) const {
    std::vector<std::pair<double, int32_t>> back;
    for (const int32_t g : bins_[light]) {
      if (!holds_[heavy][g]) back.push_back({share(g), g});
    }
    if (filled(light) < slots_) back.push_back({0.0, -1});
    std::sort(back.begin(), back.end());
    std::pair<int32_t, int32_t> best{-1, -1};
    double best_distance = gap / 2 - least_gain;
    for (const int32_t f : bins_[heavy]) {
      if (holds_[light][f]) continue;
      const auto near = std::lower_bound(back.begin(), back.end(),
                                         std::pair<double, int32_t>{share(f) - gap / 2, -1});
      for (auto g = near == back.begin() ? near : near - 1; g != back.end() && g <= near; ++g) {
        const double distance = std::abs(share(f) - g->first - gap / 2);
        if (distance >= best_distance) continue;
        best_distance = distance;
        best = {f, g->second};
      }
    }
    return best;
  }

  bool add_gently() {
    const double bound = heaviest();
    std::vector<int32_t> order(loads_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return share(a) > share(b); });
    for (const int32_t e : order) {
      const int64_t bin = lightest_for(e);
      const double smaller = loads_[e] / static_cast<double>(copies_[e] + 1);
      if (bin < 0 || bin_load_[bin] + smaller > bound) continue;
      const double relief = share(e) - smaller;
      for (int64_t b = 0; b < num_bins(); ++b) bin_load_[b] -= holds_[b][e] ? relief : 0.0;
      ++copies_[e];
      put(e, bin);
      return true;
    }
    return false;
  }

  std::vector<double> loads_;
  int64_t slots_;
  double mean_ = 0.0;
  std::vector<int64_t> copies_;
  std::vector<std::vector<int32_t>> bins_;
  std::vector<double> bin_load_;
  std::vector<std::vector<bool>> holds_;
};

/// Numbers of `loads` on `bins` bins: balanced with replicas, or what is better than that.
std::vector<std::vector<int32_t>> balance(const std::vector<double>& loads, int64_t bins,
                                          int64_t slots) {
  Packing full(loads, bins, slots);
  full.replicate();
  full.pack();
  Packing linear(loads, bins, slots);
  linear.pack_linear();
  if (full.heaviest() <= linear.heaviest()) return full.bins();
  Packing once(loads, bins, slots);
  once.pack();
  Packing& best = once.heaviest() <= linear.heaviest() ? once : linear;
  best.fill_gently();
  return best.bins();
}

std::vector<double> as_doubles(const std::vector<int64_t>& loads) {
  return {loads.begin(), loads.end()};
}

Placement balance_greedily(const std::vector<int64_t>& loads, const RebalanceOptions& o) {
  return {balance(as_doubles(loads), o.num_ranks, o.slots_per_rank)};
}

/// Whole groups on nodes, then each node's experts on its ranks.
Placement balance_by_node(const std::vector<int64_t>& loads, const RebalanceOptions& o) {
  const auto num_experts = static_cast<int64_t>(loads.size());
  const int64_t groups = o.num_groups > 0 ? o.num_groups : num_experts;
  const int64_t group_size = num_experts / groups;
  const int64_t ranks = o.num_ranks / o.num_nodes;
  std::vector<double> group_loads(static_cast<size_t>(groups), 0.0);
  for (int64_t e = 0; e < num_experts; ++e) {
    group_loads[e / group_size] += static_cast<double>(loads[e]);
  }
  Packing nodes(group_loads, o.num_nodes, ceil_div(groups, o.num_nodes));
  nodes.pack();
  Placement placement;
  for (const std::vector<int32_t>& mine : nodes.bins()) {
    std::vector<int32_t> experts;
    std::vector<double> expert_loads;
    for (const int32_t group : mine) {
      for (int64_t i = 0; i < group_size; ++i) {
        const int64_t e = group * group_size + i;
        experts.push_back(static_cast<int32_t>(e));
        expert_loads.push_back(static_cast<double>(loads[e]));
      }
    }
    for (std::vector<int32_t>& list : balance(expert_loads, ranks, o.slots_per_rank)) {
      for (int32_t& index : list) index = experts[index];
      placement.experts_of_rank.push_back(std::move(list));
    }
  }
  return placement;
}

RebalanceOptions checked_options(const std::vector<int64_t>& loads, RebalanceOptions o) {
  const auto num_experts = static_cast<int64_t>(loads.size());
  MOEKIT_CHECK(num_experts >= 1, "rebalance needs the load of each expert, got none");
  MOEKIT_CHECK(o.num_ranks >= 1, "rebalance needs at least 1 rank, got {}", o.num_ranks);
  for (int64_t e = 0; e < num_experts; ++e) {
    MOEKIT_CHECK(loads[e] >= 0, "the load of expert {} is {}, expected 0 or more", e, loads[e]);
  }
  int64_t needed = ceil_div(num_experts, o.num_ranks);
  if (o.policy == RebalancePolicy::hierarchical) {
    MOEKIT_CHECK(o.num_nodes >= 1 && o.num_ranks % o.num_nodes == 0,
                 "hierarchical balance needs as many ranks on every node, got {} ranks on {} "
                 "nodes; use greedy",
                 o.num_ranks, o.num_nodes);
    MOEKIT_CHECK(o.num_groups >= 0 && (o.num_groups == 0 || num_experts % o.num_groups == 0),
                 "{} experts don't form {} equal groups; use greedy", num_experts, o.num_groups);
    const int64_t groups = o.num_groups > 0 ? o.num_groups : num_experts;
    MOEKIT_CHECK(
        groups >= o.num_nodes,
        "hierarchical balance needs a group for every node, got {} groups on {} nodes; use "
        "greedy",
        groups, o.num_nodes);
    needed =
        ceil_div(ceil_div(groups, o.num_nodes) * (num_experts / groups), o.num_ranks / o.num_nodes);
  }
  if (o.slots_per_rank == 0) o.slots_per_rank = needed;
  MOEKIT_CHECK(o.slots_per_rank >= needed,
               "{} slots a rank can't hold {} experts on {} ranks; at least {} are needed",
               o.slots_per_rank, num_experts, o.num_ranks, needed);
  return o;
}

}  // namespace

Placement rebalance(const std::vector<int64_t>& loads, const RebalanceOptions& options) {
  const RebalanceOptions o = checked_options(loads, options);
  Placement placement = o.policy == RebalancePolicy::hierarchical ? balance_by_node(loads, o)
                                                                  : balance_greedily(loads, o);
  for (std::vector<int32_t>& list : placement.experts_of_rank) std::sort(list.begin(), list.end());
  return placement;
}

std::vector<double> rank_loads(const Placement& placement, const std::vector<int64_t>& loads) {
  const auto map =
      ExpertPlacement::from_lists(static_cast<int64_t>(loads.size()), placement.experts_of_rank);
  std::vector<double> sums(static_cast<size_t>(map.num_ranks()), 0.0);
  for (int32_t e = 0; e < map.num_experts(); ++e) {
    const auto& homes = map.homes_of(e);
    for (const ExpertHome& home : homes) {
      sums[home.rank] += static_cast<double>(loads[e]) / static_cast<double>(homes.size());
    }
  }
  return sums;
}

double LoadStatistics::imbalance() const {
  if (per_rank.empty()) return 1.0;
  const int64_t most = *std::max_element(per_rank.begin(), per_rank.end());
  const int64_t all = std::accumulate(per_rank.begin(), per_rank.end(), int64_t{0});
  if (all == 0) return 1.0;
  return static_cast<double>(most) * static_cast<double>(per_rank.size()) /
         static_cast<double>(all);
}

}  // namespace moekit
