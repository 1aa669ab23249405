// One rank: rows stay where they are, in the Standard or the Batched layout. Rows that need no
// conversion are passed as they lie in the caller's tensor.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "prepare/batched_rows.h"
#include "prepare/members.h"
#include "prepare/parallel_rows.h"
#include "prepare/routing_check.h"
#include "prepare/row_reader.h"
#include "prepare/slot_rows.h"

namespace moekit::prepare {
namespace {

/// Rows, or rows per expert, that one rank can have.
int64_t max_rows_of(const Problem& problem) {
  if (problem.capacity.policy == CapacityPolicy::exact) return problem.max_tokens;
  return std::min(problem.max_tokens, problem.capacity.max_rows);
}

struct Layout {
  WorkspaceLayout all;
  Region ids;      // LocalExpert [max_tokens, top_k]
  Region records;  // converted or quantized rows
  Region scratch;
  BatchedLayout batched;

  Layout(const Problem& problem, const RowFormat& wire, RowsLayout rows) {
    const int64_t tokens = problem.max_tokens;
    const int64_t width = problem.config.routed_width();
    ids = all.add(checked_mul(tokens, problem.config.top_k, "slots"), sizeof(LocalExpert));
    records = all.add(tokens, wire.record_bytes);
    scratch = RowPath::add_scratch(all, width);
    if (rows == RowsLayout::batched) {
      batched = BatchedLayout(all, problem.num_local_experts(), max_rows_of(problem), tokens,
                              problem.config.top_k, wire.record_bytes);
    }
  }
};

class Local final : public PrepareFinalize {
 public:
  Local(std::string_view name, RowsLayout rows) : name_(name), rows_(rows) {}

  std::string_view name() const override { return name_; }

  Traits traits(const Problem& problem) const override {
    Traits t;
    t.rows = rows_;
    t.max_rows = max_rows_of(problem);
    t.max_sum_rows = rows_ == RowsLayout::standard ? t.max_rows : problem.max_tokens;
    t.takes_partial_sums = true;
    return t;
  }

  Support supports(const Problem& problem) const override {
    Support s;
    // Experts on a device fetch Standard rows from here themselves.
    s.require(problem.device.type == DeviceType::cpu || rows_ == RowsLayout::standard,
              ReasonCode::device, "runs on the CPU, the plan asks for CUDA device {}",
              problem.device.index);
    s.require(problem.num_ranks == 1, ReasonCode::parallel, "serves one rank, the plan has {}",
              problem.num_ranks);
    s.require(problem.config.top_k <= kMaxTopK, ReasonCode::shape, "top_k is {}, at most {} fit",
              problem.config.top_k, kMaxTopK);
    return s;
  }

  int64_t workspace_bytes(const Problem& problem, const RowFormat& wire, QuantDuty) const override {
    return Layout(problem, wire, rows_).all.total();
  }
  int64_t wire_bytes(const Problem&, const RowFormat&) const override { return 0; }

  void prepare_send(const PrepareArgs& args) const override {
    const Problem& problem = *args.problem;
    throw_fault(problem, problem.rank, find_fault(problem, args.routing));
    const RowPath path(args, false);
    const Layout layout(problem, args.wire, rows_);
    auto* ids = layout.ids.in<LocalExpert>(args.workspace);
    int64_t dropped = 0;
    for (int64_t i = 0; i < args.routing.num_tokens * args.routing.top_k; ++i) {
      const GlobalExpert id = args.routing.ids[i];
      const bool known = names_expert(problem, id);
      ids[i] =
          known ? LocalExpert{problem.placement->home(index_of(id), 0).slot} : LocalExpert::none;
      dropped += known || id == GlobalExpert::none ? 0 : 1;
    }
    if (problem.capacity.policy != CapacityPolicy::exact) dropped += limit_rows(args, layout, ids);
    if (args.dropped != nullptr) *args.dropped = dropped;
    if (!path.in_place()) write_records(args, path, layout);
  }

  ExpertRows prepare_receive(const PrepareArgs& args) const override {
    const RowPath path(args, false);
    const Layout layout(*args.problem, args.wire, rows_);
    ExpertRows rows;
    rows.format = path.delivered();
    rows.records = path.in_place() ? path.rows() : layout.records.in<std::byte>(args.workspace);
    rows.record_stride = path.in_place() ? path.row_stride() : path.delivered().record_bytes;
    rows.num_rows = args.routing.num_tokens;
    if (rows_ == RowsLayout::standard)
      rows.num_rows = std::min(rows.num_rows, max_rows_of(*args.problem));
    rows.top_k = args.routing.top_k;
    rows.ids = layout.ids.in<LocalExpert>(args.workspace);
    rows.weights = args.routing.weights;
    if (rows_ == RowsLayout::standard) return rows;
    const int32_t rank = args.problem->rank;
    const ExpertRows batched = place_rows(rows, layout.batched, args.workspace, [&](int64_t row) {
      return RowSource{rank, row};
    });
    copy_records(rows, batched, args.threads);
    return batched;
  }

  void finalize_send(const FinalizeArgs&) const override {}

  void finalize_receive(const FinalizeArgs& args) const override {
    const Problem& problem = *args.problem;
    const CombineInput input = combine_input(problem, args.reduce_duty);
    const int64_t width = args.experts.width;
    // Tokens beyond the capacity have no row.
    const int64_t first_dropped = args.rows.num_rows * width;
    std::fill(args.sum + first_dropped, args.sum + args.routing.num_tokens * width, 0.0f);
    const bool as_bf16 = problem.combine_dtype == DType::bf16;
    if (input == CombineInput::slot_rows) {
      sum_slot_rows(args.rows, args.experts, args.reduce_duty.weigher,
                    as_bf16 ? SumRow::f32_as_bf16 : SumRow::f32, args.threads, args.sum);
      return;
    }
    const float* sums = args.experts.data;
    if (input == CombineInput::slot_rows_to_sums) {
      sum_slot_rows(args.rows, args.experts, args.reduce_duty.weigher, SumRow::f32, args.threads,
                    args.sum);
      sums = args.sum;
    }
    const bool rounds = as_bf16 && args.reduce_duty.order == SumOrder::rank_sums;
    if (sums == args.sum && !rounds) return;
    const SumRow type = rounds ? SumRow::f32_as_bf16 : SumRow::f32;
    parallel_rows(args.threads, args.rows.num_rows, 2 * width * 4,
                  [&](int64_t begin, int64_t end, int64_t) {
                    for (int64_t n = begin; n < end; ++n) {
                      const void* row = sums + n * width;
                      sum_rows(type, &row, nullptr, 1, width, args.sum + n * width);
                    }
                  });
  }

 private:
  /// Applies the bound on rows: throws (refuse) or takes experts away from what is beyond it
  /// (drop). Returns the slots dropped.
  int64_t limit_rows(const PrepareArgs& args, const Layout& layout, LocalExpert* ids) const {
    const Problem& problem = *args.problem;
    const int64_t bound = max_rows_of(problem);
    const int64_t top_k = args.routing.top_k;
    const bool refuse = problem.capacity.policy == CapacityPolicy::refuse;
    int64_t dropped = 0;
    if (rows_ == RowsLayout::standard) {
      const int64_t tokens = args.routing.num_tokens;
      if (refuse && tokens > bound) fail_capacity(problem.rank, "rows", tokens, bound);
      for (int64_t i = bound * top_k; i < tokens * top_k; ++i) {
        dropped += ids[i] == LocalExpert::none ? 0 : 1;
        ids[i] = LocalExpert::none;
      }
      return dropped;
    }
    auto* counts = layout.batched.counts.in<int32_t>(args.workspace);
    std::fill_n(counts, layout.batched.num_experts, 0);
    int64_t most = 0;
    for (int64_t t = 0; t < args.routing.num_tokens; ++t) {
      LocalExpert* slots = ids + t * top_k;
      for (int64_t j = 0; j < top_k; ++j) {
        const LocalExpert expert = slots[j];
        if (expert == LocalExpert::none || std::find(slots, slots + j, expert) < slots + j)
          continue;
        const int64_t count = ++counts[index_of(expert)];
        most = std::max(most, count);
        if (refuse || count <= bound) continue;
        dropped += std::count(slots + j, slots + top_k, expert);
        std::replace(slots + j, slots + top_k, expert, LocalExpert::none);
      }
    }
    if (refuse && most > bound) fail_capacity(problem.rank, "rows of one expert", most, bound);
    return dropped;
  }

  void write_records(const PrepareArgs& args, const RowPath& path, const Layout& layout) const {
    auto* records = layout.records.in<std::byte>(args.workspace);
    auto* scratch = layout.scratch.in<float>(args.workspace);
    const int64_t width = path.delivered().width;
    const int64_t stride = path.delivered().record_bytes;
    parallel_rows(args.threads, args.routing.num_tokens, 8 * width,
                  [&](int64_t begin, int64_t end, int64_t task) {
                    for (int64_t t = begin; t < end; ++t) {
                      path.write(t, scratch + task * width, records + t * stride);
                    }
                  });
  }

  std::string_view name_;
  RowsLayout rows_;
};

}  // namespace

const PrepareFinalize& local_member() {
  static const Local member("local", RowsLayout::standard);
  return member;
}
const PrepareFinalize& local_batched_member() {
  static const Local member("local_batched", RowsLayout::batched);
  return member;
}

}  // namespace moekit::prepare
