// The slot-ordered sum and its members: exact bits, skipped slots never read, zeros for rows
// without an expert, the same bits for every number of threads.
#include "reduce/weight_and_reduce.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

namespace moekit::reduce {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const WeightAndReduce* member_for(const ReduceDuty& duty, RowsLayout layout) {
  const WeightAndReduce* found = nullptr;
  for (const WeightAndReduce* m : registry()) {
    if (!m->accepts(duty, layout)) continue;
    EXPECT_EQ(found, nullptr) << "two members accept one duty";
    found = m;
  }
  return found;
}

const ReduceDuty kReduce{Weigher::combine, Summer::reduce, SumOrder::slots};

TEST(Registry, AcceptsWhatItCanDo) {
  auto name = [](Weigher w, Summer s, RowsLayout l) -> std::string_view {
    const WeightAndReduce* m = member_for({w, s, SumOrder::rank_sums}, l);
    return m != nullptr ? m->name() : "";
  };
  for (RowsLayout l : {RowsLayout::standard, RowsLayout::batched}) {
    const char* sums = l == RowsLayout::standard ? "contiguous" : "batched";
    EXPECT_EQ(name(Weigher::input, Summer::experts, l), "none");
    EXPECT_EQ(name(Weigher::experts, Summer::experts, l), "none");
    EXPECT_EQ(name(Weigher::combine, Summer::experts, l), "");
    EXPECT_EQ(name(Weigher::input, Summer::reduce, l), sums);
    EXPECT_EQ(name(Weigher::combine, Summer::reduce, l), sums);
    EXPECT_EQ(name(Weigher::experts, Summer::reduce, l), "");
    EXPECT_EQ(name(Weigher::combine, Summer::combine, l), "");
  }
}

// The definition, spelled out. volatile keeps a compiler from doing anything but IEEE steps.
float slot_sum(const std::vector<float>& products) {
  if (products.empty()) return 0.0f;
  volatile float sum = products[0];
  for (size_t j = 1; j < products.size(); ++j) sum = sum + products[j];
  return sum;
}

TEST(SumSlots, AddsLeftToRightWithoutFusing) {
  // 2^24 + 1 + 1: left to right the ones are lost, in any other order they are not.
  const float a[] = {16777216.0f}, b[] = {1.0f}, c[] = {1.0f};
  const float* rows[] = {a, b, c};
  const float ones[] = {1.0f, 1.0f, 1.0f};
  float out = kNaN;
  sum_slots(rows, ones, 3, 1, &out);
  EXPECT_EQ(out, 16777216.0f);
  const float* reversed[] = {c, b, a};
  sum_slots(reversed, ones, 3, 1, &out);
  EXPECT_EQ(out, 16777218.0f);
  // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11; fused with -(1 + 2^-11) it would leave
  // 2^-24.
  const float x = 1.0f + 0x1p-12f;
  const float d[] = {-(1.0f + 0x1p-11f)}, e[] = {x};
  const float* fused[] = {d, e};
  const float weights[] = {1.0f, x};
  sum_slots(fused, weights, 2, 1, &out);
  EXPECT_EQ(out, 0.0f);
}

TEST(SumSlots, StartsFromTheFirstPresentProduct) {
  const float a[] = {0.0f}, b[] = {2.0f};
  const float* rows[] = {nullptr, a};
  const float weights[] = {kNaN, -1.0f};
  float out = kNaN;
  sum_slots(rows, weights, 2, 1, &out);
  EXPECT_TRUE(out == 0.0f && std::signbit(out)) << "0 + -0 would be +0";
  const float* none[] = {nullptr, nullptr};
  sum_slots(none, weights, 2, 1, &out);
  EXPECT_TRUE(out == 0.0f && !std::signbit(out));
  const float* plain[] = {nullptr, b};
  sum_slots(plain, nullptr, 2, 1, &out);
  EXPECT_EQ(out, 2.0f);
  sum_slots(nullptr, nullptr, 0, 1, &out);
  EXPECT_EQ(out, 0.0f);
}

// A row whose slots have experts where `ids` says so; every other slot's memory is NaN.
struct Fixture {
  int64_t rows, top_k, width, num_local = 5;
  std::vector<LocalExpert> ids;
  std::vector<float> weights, slot_rows, batched, expected;
  std::vector<int32_t> positions, expert_num_rows;
  int64_t capacity = 0;

  Fixture(int64_t rows_, int64_t top_k_, int64_t width_, double present, uint32_t seed)
      : rows(rows_), top_k(top_k_), width(width_) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<double> uniform(0, 1);
    capacity = rows * top_k + 1;
    ids.assign(rows * top_k, LocalExpert::none);
    weights.assign(rows * top_k, kNaN);
    positions.assign(rows * top_k, -1);
    expert_num_rows.assign(num_local, 0);
    slot_rows.assign(rows * top_k * width, kNaN);
    batched.assign(num_local * capacity * width, kNaN);
    expected.assign(rows * width, 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<std::vector<float>> products(width);
      for (int64_t s = r * top_k; s < (r + 1) * top_k; ++s) {
        if (uniform(rng) >= present) continue;
        const int e = static_cast<int>(rng() % num_local);
        ids[s] = LocalExpert{e};
        weights[s] = normal(rng);
        positions[s] = expert_num_rows[e]++;
        for (int64_t c = 0; c < width; ++c) {
          const float y = normal(rng) * std::exp2(static_cast<float>(rng() % 20));
          slot_rows[s * width + c] = y;
          batched[(e * capacity + positions[s]) * width + c] = y;
          volatile float product = weights[s] * y;
          products[c].push_back(static_cast<float>(product));
        }
      }
      for (int64_t c = 0; c < width; ++c) expected[r * width + c] = slot_sum(products[c]);
    }
  }

  Args args(RowsLayout layout, float* out, ThreadPool* threads) {
    Args a;
    a.rows.layout = layout;
    a.rows.num_rows = rows;
    a.rows.top_k = top_k;
    a.rows.ids = ids.data();
    a.rows.weights = weights.data();
    a.rows.rows_per_expert = capacity;
    a.rows.expert_num_rows = expert_num_rows.data();
    a.rows.slot_positions = positions.data();
    a.in = {layout == RowsLayout::standard ? slot_rows.data() : batched.data(), width};
    a.duty = kReduce;
    a.out = out;
    a.threads = threads;
    return a;
  }
};

void expect_same_bits(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i]))
        << "at " << i << ": " << got[i] << " for " << want[i];
  }
}

struct Shape {
  int64_t rows, top_k, width;
  double present;
};
class Sums : public ::testing::TestWithParam<Shape> {};

TEST_P(Sums, EqualTheDefinition) {
  const Shape s = GetParam();
  for (RowsLayout layout : {RowsLayout::standard, RowsLayout::batched}) {
    for (int threads : {0, 1, 2, 3}) {
      std::unique_ptr<ThreadPool> pool;
      if (threads > 0) pool = std::make_unique<ThreadPool>(threads);
      Fixture f(s.rows, s.top_k, s.width, s.present, 7);
      std::vector<float> out(s.rows * s.width, kNaN);
      member_for(kReduce, layout)->run(f.args(layout, out.data(), pool.get()));
      expect_same_bits(out, f.expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Sums,
                         ::testing::Values(Shape{1, 8, 7168, 1.0}, Shape{17, 3, 100, 0.5},
                                           Shape{33, 1, 64, 0.7}, Shape{5, 2, 1, 0.5},
                                           Shape{3, 10, 65, 0.3}, Shape{300, 4, 63, 0.6},
                                           Shape{9, 4, 128, 0.0}, Shape{2, 700, 70, 0.9},
                                           Shape{0, 4, 128, 1.0}));

TEST(Contiguous, MaskedAndPaddingRows) {
  // Experts {6, 7} of 8 are local as {0, 1}; row 0 has slot 1 only, row 1 nothing.
  const LocalExpert ids[] = {LocalExpert::none, LocalExpert{1}, LocalExpert::none,
                             LocalExpert::none};
  const float weights[] = {0.9f, 0.1f, 0.5f, 0.5f};
  float scratch[] = {kNaN, kNaN, 10.0f, 20.0f, kNaN, kNaN, kNaN, kNaN};
  float out[] = {kNaN, kNaN, kNaN, kNaN};
  Args a;
  a.rows.num_rows = 2;
  a.rows.top_k = 2;
  a.rows.ids = ids;
  a.rows.weights = weights;
  a.in = {scratch, 2};
  a.duty = kReduce;
  a.out = out;
  member_for(kReduce, RowsLayout::standard)->run(a);
  EXPECT_EQ(out[0], 0.1f * 10.0f);
  EXPECT_EQ(out[1], 0.1f * 20.0f);
  EXPECT_EQ(out[2], 0.0f);
  EXPECT_EQ(out[3], 0.0f);
}

TEST(Contiguous, WeightOnInputIsNotAppliedTwice) {
  const ReduceDuty duty{Weigher::input, Summer::reduce, SumOrder::slots};
  const LocalExpert ids[] = {LocalExpert{0}, LocalExpert::none};
  const float weights[] = {0.25f, 0.25f};
  float scratch[] = {8.0f, kNaN};
  float out[] = {kNaN, kNaN};
  Args a;
  a.rows.num_rows = 2;
  a.rows.top_k = 1;
  a.rows.ids = ids;
  a.rows.weights = weights;
  a.in = {scratch, 1};
  a.duty = duty;
  a.out = out;
  member_for(duty, RowsLayout::standard)->run(a);
  EXPECT_EQ(out[0], 8.0f);
  EXPECT_EQ(out[1], 0.0f);
}

TEST(None, CopiesOrLeavesInPlace) {
  const ReduceDuty duty{Weigher::experts, Summer::experts, SumOrder::slots};
  const WeightAndReduce* none = member_for(duty, RowsLayout::standard);
  std::vector<float> in(37 * 301);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i) - 5000.0f;
  const std::vector<float> original = in;
  for (int threads : {1, 3}) {
    ThreadPool pool(threads);
    std::vector<float> out(in.size(), kNaN);
    Args a;
    a.rows.num_rows = 37;
    a.in = {in.data(), 301};
    a.duty = duty;
    a.out = out.data();
    a.threads = &pool;
    none->run(a);
    expect_same_bits(out, original);
    a.out = in.data();
    none->run(a);
    expect_same_bits(in, original);
  }
}

}  // namespace
}  // namespace moekit::reduce
