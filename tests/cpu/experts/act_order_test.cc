// experts/cpu on weights whose columns name their scale group one by one (GPTQ act order): in their
// own codes, with rows permuted to the sorted columns of each expert's matrices.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cpu/experts/layers.h"

namespace moekit::experts {
namespace {

using testing::bound_of;
using testing::expect_same_bits_alone;
using testing::LayerOptions;
using testing::random_values;
using testing::Routing;
using testing::run_cpu;
using testing::TestLayer;
using testing::worst_row_error;

constexpr int64_t kGroup = 32;

/// How columns name their groups.
enum class Order {
  halves_alike,     ///< gate and up of an expert in one order, each expert in its own
  halves_differ,    ///< every matrix in an order of its own
  one_expert,       ///< all experts but one in order
  unlike_groups,    ///< groups of any size, some of them empty
  gate_up_in_order  ///< down alone
};

/// A layer whose columns name groups.
struct ActOrderLayer : TestLayer {
  std::deque<std::vector<int32_t>> indices;

  ActOrderLayer(const LayerOptions& o, Order order) : TestLayer(o) {
    uint64_t seed = 100;
    for (size_t e = 0; e < layer.experts.size(); ++e) {
      if (order == Order::one_expert && e != 1) continue;
      StoredExpert& expert = layer.experts[e];
      const bool any = order == Order::unlike_groups;
      expert.down.group_index = index_of(expert.down, any, ++seed);
      if (order == Order::gate_up_in_order) continue;
      expert.up.group_index = index_of(expert.up, any, ++seed);
      if (!o.activation.gated) continue;
      const bool alike = order == Order::halves_alike;
      expert.gate.group_index = alike ? expert.up.group_index : index_of(expert.gate, any, ++seed);
    }
  }

 private:
  /// Groups in random order, each as large as the format has it, or as chance has it.
  const int32_t* index_of(const StoredMatrix& m, bool any_size, uint64_t seed) {
    const Rng rng(seed, 9);
    std::vector<int32_t> index(static_cast<size_t>(m.cols));
    for (size_t k = 0; k < index.size(); ++k) index[k] = static_cast<int32_t>(k) / kGroup;
    const auto groups = static_cast<uint64_t>(index.back() + 1);
    for (size_t k = index.size(); any_size && k-- > 0;) {
      index[k] = static_cast<int32_t>(rng.below(k, groups));
    }
    for (size_t k = index.size(); !any_size && k-- > 1;) {
      std::swap(index[k], index[rng.below(k, k + 1)]);
    }
    indices.push_back(std::move(index));
    return indices.back().data();
  }
};

constexpr Order kOrders[] = {Order::halves_alike, Order::halves_differ, Order::one_expert,
                             Order::unlike_groups, Order::gate_up_in_order};

std::vector<WeightScheme> integer_groups() {
  return {{WeightFormat::int4_group, kGroup, false},
          {WeightFormat::int4_group, kGroup, true},
          {WeightFormat::int8_group, kGroup, true}};
}

TEST(ActOrder, EveryInputOnEveryIsa) {
  for (const WeightScheme& weights : integer_groups()) {
    for (const ActivationScheme& input : testing::all_activation_schemes()) {
      for (const Order order : kOrders) {
        LayerOptions o;
        o.weights = weights;
        o.gate_up_input = o.down_input = input;
        o.hidden = 96;
        o.inter = 80;  // the last group is half a one
        o.bias = order == Order::halves_differ;
        o.unlike_input_scales = order == Order::halves_alike;
        const ActOrderLayer t(o, order);
        for (const int64_t rows : {1, 17}) {
          const auto x = random_values(rows, o.hidden, 77);
          const Routing routing(rows, o.top_k, o.experts, 5);
          const auto expected = testing::evaluate(t, x, rows, routing);
          for (CpuIsa isa : available_cpu_isas()) {
            const auto out = run_cpu(t, x, rows, routing, {.isa = isa});
            EXPECT_LT(worst_row_error(expected, o.hidden, out), bound_of(input))
                << to_string(isa) << " " << testing::name_of(weights) << " x "
                << to_string(input.format) << " order " << static_cast<int>(order) << " rows "
                << rows;
          }
        }
      }
    }
  }
}

TEST(ActOrder, OddShapesAndNoGate) {
  for (const auto& [hidden, inter] : {std::pair{33, 97}, {300, 72}, {64, 720}, {7, 40}}) {
    for (const WeightScheme& weights : integer_groups()) {
      for (const Order order : kOrders) {
        LayerOptions o;
        o.hidden = hidden;
        o.inter = inter;
        o.weights = weights;
        o.activation = {.kind = ActivationKind::relu2, .gated = false};
        o.gate_up_input = o.down_input = {ActivationFormat::f32};
        const ActOrderLayer t(o, order);
        const auto x = random_values(5, hidden, 3);
        const Routing routing(5, o.top_k, o.experts, 6, 0);
        for (CpuIsa isa : available_cpu_isas()) {
          const auto out = run_cpu(t, x, 5, routing, {.isa = isa});
          EXPECT_LT(worst_row_error(t, x, 5, routing, out), 2e-5)
              << to_string(isa) << " H" << hidden << " I" << inter << " "
              << testing::name_of(weights) << " order " << static_cast<int>(order);
        }
      }
    }
  }
}

TEST(ActOrder, BitsDoNotDependOnThreadsBatchOrKnobs) {
  const int64_t rows = 150;
  for (const ActivationFormat input :
       {ActivationFormat::bf16, ActivationFormat::f32, ActivationFormat::fp8_block}) {
    for (const Order order : kOrders) {
      LayerOptions o;
      o.weights = {WeightFormat::int4_group, kGroup, true};
      o.gate_up_input = o.down_input = {input};
      const ActOrderLayer t(o, order);
      const auto x = random_values(rows, o.hidden, 10);
      const Routing routing(rows, o.top_k, o.experts, 11);
      for (CpuIsa isa : available_cpu_isas()) {
        expect_same_bits_alone(
            t, x, rows, routing, isa,
            std::string(to_string(isa)) + " order " + std::to_string(static_cast<int>(order)));
      }
    }
  }
}

/// What the weights take in memory is what they take in order, and an entry for each column.
TEST(ActOrder, KeepsTheSizeOfTheCodes) {
  for (const WeightScheme& weights : integer_groups()) {
    LayerOptions o;
    o.hidden = 512;
    o.inter = 256;
    o.weights = weights;
    const CpuExperts member(RowsLayout::standard);
    const TestLayer plain(o);
    const WeightLayout in_order = member.weight_layout(plain.layer, plain.local);
    const ActOrderLayer t(o, Order::halves_differ);
    const WeightLayout sorted = member.weight_layout(t.layer, t.local);
    EXPECT_EQ(sorted.gate_up.format, weights.format);
    EXPECT_EQ(sorted.down.format, weights.format);
    EXPECT_EQ(sorted.gate_up_places, o.hidden);
    EXPECT_EQ(sorted.down_places, o.inter);
    EXPECT_EQ(in_order.gate_up_places, 0);
    EXPECT_EQ(sorted.expert_bytes() - in_order.expert_bytes(), (2 * o.hidden + o.inter) * 4);
    EXPECT_NE(sorted.note.find("sorted by scale group"), std::string::npos) << sorted.note;
    EXPECT_EQ(in_order.note, "");
  }
}

/// Groups of any size cost runs of 32 places that are not full, at most one a group.
TEST(ActOrder, GroupsOfUnlikeSizesArePadded) {
  LayerOptions o;
  o.hidden = 512;
  o.inter = 256;
  o.weights = {WeightFormat::int4_group, kGroup, true};
  const ActOrderLayer t(o, Order::unlike_groups);
  const WeightLayout layout = CpuExperts(RowsLayout::standard).weight_layout(t.layer, t.local);
  EXPECT_EQ(layout.gate_up.format, WeightFormat::int4_group);
  EXPECT_GT(layout.gate_up_places, o.hidden);
  EXPECT_LE(layout.gate_up_places, o.hidden + 31 * (o.hidden / kGroup));
  EXPECT_NE(layout.note.find("unlike sizes"), std::string::npos) << layout.note;
}

/// Bits of an expert are those that it has beside any others: how columns lie is decided for the
/// whole layer, not for the experts of a rank.
TEST(ActOrder, BitsDoNotDependOnWhichExpertsShareARank) {
  for (const Order order : kOrders) {
    LayerOptions o;
    o.weights = {WeightFormat::int4_group, kGroup, true};
    const ActOrderLayer t(o, order);
    const auto x = random_values(20, o.hidden, 12);
    for (int32_t e = 0; e < o.experts; ++e) {
      Routing routing(20, o.top_k, 1, 13, 0);
      std::fill(routing.ids.begin(), routing.ids.end(), static_cast<LocalExpert>(e));
      const auto expected = run_cpu(t, x, 20, routing, {});
      ActOrderLayer alone(o, order);
      alone.local = {e};
      std::fill(routing.ids.begin(), routing.ids.end(), static_cast<LocalExpert>(0));
      EXPECT_EQ(expected, run_cpu(alone, x, 20, routing, {})) << "expert " << e;
    }
  }
}

}  // namespace
}  // namespace moekit::experts
