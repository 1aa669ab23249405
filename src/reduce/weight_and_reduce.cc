// The members: none, contiguous, batched. All of them split rows and columns over the pool; a
// split never changes bits because columns are independent.
#include "reduce/weight_and_reduce.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/math.h"
#include "reduce/slot_sum.h"

namespace moekit::reduce {
namespace {

// Floats that one task reads: 256 KiB, about 5 µs, as much as waking a parked thread costs. A
// single row of a usual model stays on the calling thread; only very wide ones are split by
// columns.
constexpr int64_t kTaskFloats = 65536;

// Runs body(row, column_begin, column_end) over all rows and columns.
template <typename Body>
void for_each_piece(const Args& args, int64_t reads_per_column, Body body) {
  const int64_t rows = args.rows.num_rows;
  const int64_t width = args.in.width;
  if (rows <= 0 || width <= 0) return;
  // A multiple of the sum's register block.
  const int64_t columns = round_up(std::max<int64_t>(kTaskFloats / reads_per_column, 64), 64);
  const int64_t pieces = ceil_div(width, columns);
  const int64_t row_floats = width * reads_per_column;
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskFloats / row_floats);
  auto task = [&](int64_t index, int /*thread*/) {
    const int64_t first = index / pieces * rows_per_task;
    const int64_t begin = index % pieces * columns;
    const int64_t end = std::min(width, begin + columns);
    for (int64_t r = first; r < std::min(rows, first + rows_per_task); ++r) body(r, begin, end);
  };
  const int64_t tasks = ceil_div(rows, rows_per_task) * pieces;
  if (args.threads != nullptr) {
    args.threads->parallel_for(tasks, task);
    return;
  }
  for (int64_t i = 0; i < tasks; ++i) task(i, 0);
}

// Null where the weight has been applied to the input.
const float* weights_of_row(const Args& args, int64_t row) {
  return args.duty.weigher == Weigher::input ? nullptr : args.rows.weights + row * args.rows.top_k;
}

bool sums_here(const ReduceDuty& duty) {
  return duty.summer == Summer::reduce && duty.weigher != Weigher::experts;
}

class NoReduce final : public WeightAndReduce {
 public:
  std::string_view name() const override { return "none"; }
  bool accepts(const ReduceDuty& duty, RowsLayout /*rows*/) const override {
    // Unweighted rows that are summed already could not be weighted any more.
    return duty.summer == Summer::experts && duty.weigher != Weigher::combine;
  }
  void run(const Args& args) const override {
    if (args.out == args.in.data) return;
    for_each_piece(args, 1, [&](int64_t row, int64_t begin, int64_t end) {
      const int64_t offset = row * args.in.width + begin;
      std::memcpy(args.out + offset, args.in.data + offset,
                  static_cast<size_t>(end - begin) * sizeof(float));
    });
  }
};

class ContiguousReduce final : public WeightAndReduce {
 public:
  std::string_view name() const override { return "contiguous"; }
  bool accepts(const ReduceDuty& duty, RowsLayout rows) const override {
    return sums_here(duty) && rows == RowsLayout::standard;
  }
  void run(const Args& args) const override {
    const int64_t top_k = args.rows.top_k;
    const int64_t width = args.in.width;
    for_each_piece(args, std::max<int64_t>(top_k, 1), [&](int64_t row, int64_t begin, int64_t end) {
      const SlotRows rows{args.in.data + row * top_k * width, args.rows.ids + row * top_k, width};
      sum_columns(rows, weights_of_row(args, row), top_k, begin, end, args.out + row * width);
    });
  }
};

class BatchedReduce final : public WeightAndReduce {
 public:
  std::string_view name() const override { return "batched"; }
  bool accepts(const ReduceDuty& duty, RowsLayout rows) const override {
    return sums_here(duty) && rows == RowsLayout::batched;
  }
  void run(const Args& args) const override {
    const int64_t top_k = args.rows.top_k;
    const int64_t width = args.in.width;
    for_each_piece(args, std::max<int64_t>(top_k, 1), [&](int64_t row, int64_t begin, int64_t end) {
      const BatchedRows rows{args.in.data, args.rows.ids + row * top_k,
                             args.rows.slot_positions + row * top_k, args.rows.rows_per_expert,
                             width};
      sum_columns(rows, weights_of_row(args, row), top_k, begin, end, args.out + row * width);
    });
  }
};

}  // namespace

std::span<const WeightAndReduce* const> registry() {
  static const NoReduce none;
  static const ContiguousReduce contiguous;
  static const BatchedReduce batched;
  static const std::array<const WeightAndReduce*, 3> members{&none, &contiguous, &batched};
  return members;
}

}  // namespace moekit::reduce
