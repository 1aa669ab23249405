#include "linear/cpu_linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/buffer.h"
#include "linear/cpu_isa.h"
#include "linear/panel_pack.h"
#include "linear/product.h"
#include "linear/row_operand.h"
#include "problem/workspace_layout.h"

namespace moekit::linear {
namespace {

/// [PanelSpec | static input scale], the order of a sorted matrix, then the panels.
constexpr int64_t kHeadBytes = 128;
constexpr int64_t kChunkRows = 960;
constexpr int64_t kRowBlock = 120;

struct Head {
  PanelSpec spec;
  float input_scale = 1.0f;

  int64_t panels_offset() const { return kHeadBytes + round_up(order_bytes(spec.places), 128); }
};
static_assert(sizeof(Head) <= kHeadBytes);

struct Scratch {
  int64_t rows = 0, stride = 0, extras = 0, thread_bytes = 0;
  int64_t decode_offset = 0, prepare_offset = 0;
  Region operands, extra, values, per_thread;
  int64_t total = 0;
};

Scratch scratch_of(const PanelSpec& spec, const ActivationScheme& input, int64_t max_rows,
                   int num_threads) {
  Scratch s;
  const int64_t values = std::max(spec.cols, spec.places);
  s.rows = std::max<int64_t>(1, std::min(max_rows, kChunkRows));
  s.stride = operand_stride(values);
  s.extras = operand_extras(values, input.format, spec.zeros);
  WorkspaceLayout w;
  s.operands = w.add(s.rows, sizeof(RowOperand));
  s.extra = w.add(s.rows, s.extras * 4);
  s.values = w.add(s.rows, s.stride);
  WorkspaceLayout t;
  t.add(kMaxPanelsBeside * kRowBlock * kPanelCols, 4);  // sums, first
  s.decode_offset = t.add(kScratchBytes, 1).offset;
  s.prepare_offset = t.add(prepare_scratch_bytes(spec.cols, spec.places), 1).offset;
  s.thread_bytes = t.total();
  s.per_thread = w.add(num_threads, s.thread_bytes);
  s.total = w.total();
  return s;
}

struct Call {
  const Args& args;
  Head head;
  ProductPlan plan;
  Scratch scratch;

  std::byte* mine(int thread) const {
    return scratch.per_thread.in<std::byte>(args.workspace) + thread * scratch.thread_bytes;
  }
  RowOperand* operands() const { return scratch.operands.in<RowOperand>(args.workspace); }
};

void prepare(const Call& call, int64_t first, int64_t i, int thread) {
  const RowFormat format = RowFormat::of(ActivationFormat::f32, call.head.spec.cols);
  RowRecord record;
  record.format = &format;
  record.data = reinterpret_cast<const std::byte*>(call.args.x + (first + i) * call.args.x_stride);
  record.static_scale = call.head.input_scale;
  if (call.head.spec.is_sorted()) {
    record.order = reinterpret_cast<const int32_t*>(call.args.blob + kHeadBytes);
    record.places = call.head.spec.places;
  }
  call.operands()[i] =
      prepare_row(call.plan, record,
                  call.scratch.values.in<std::byte>(call.args.workspace) + i * call.scratch.stride,
                  call.scratch.extra.in<float>(call.args.workspace) + i * call.scratch.extras,
                  call.mine(thread) + call.scratch.prepare_offset);
}

/// Columns of panels [panel, panel + num_panels).
void multiply_block(const Call& call, int64_t first, int64_t block, int64_t rows, int64_t panel,
                    int64_t num_panels, int thread) {
  const PanelSpec& spec = call.head.spec;
  const RowOperand* operands = call.operands() + block;
  Product products[kMaxPanelsBeside];
  const std::byte* data =
      call.args.blob + call.head.panels_offset() + panel * call.plan.panel_bytes;
  auto* sums = reinterpret_cast<float*>(call.mine(thread));
  for (int64_t i = 0; i < num_panels; ++i, data += call.plan.panel_bytes) {
    products[i] = Product::of(call.plan, data, data + call.plan.panel_bytes, operands,
                              sums + i * kRowBlock * kPanelCols);
  }
  multiply_panels({products, static_cast<size_t>(num_panels)}, rows,
                  call.mine(thread) + call.scratch.decode_offset);
  float* out[kRowBlock];
  for (int64_t i = 0; i < num_panels; ++i) {
    const int64_t column = (panel + i) * kPanelCols;
    for (int64_t row = 0; row < rows; ++row) {
      out[row] = call.args.y + (first + block + row) * call.args.y_stride + column;
    }
    call.plan.kernels->finish(products[i].c, column_terms(call.plan, products[i].panel.codes),
                              operands, rows, std::min(kPanelCols, spec.rows - column), out);
  }
}

}  // namespace

CpuIsa CpuLinear::isa() const { return isa_ ? *isa_ : default_isa(); }

bool CpuLinear::supports(const StoredMatrix& weight, const ActivationScheme&) const {
  return weight.rows > 0 && weight.cols > 0;
}

int64_t CpuLinear::packed_bytes(const StoredMatrix& weight) const {
  const Head head{plan_panels(weight), weight.input_scale};
  return head.panels_offset() + head.spec.total_bytes();
}

void CpuLinear::pack(const StoredMatrix& weight, std::byte* blob, ThreadPool& threads) const {
  const Head head{plan_panels(weight), weight.input_scale};
  std::memset(blob, 0, static_cast<size_t>(head.panels_offset()));
  std::memcpy(blob, &head, sizeof(head));
  const int32_t* order = nullptr;
  if (head.spec.is_sorted()) {
    std::vector<int32_t> counters(static_cast<size_t>(count_groups(weight)));
    auto* to = reinterpret_cast<int32_t*>(blob + kHeadBytes);
    fill_order(weight, {head.spec.group, head.spec.places}, to, counters.data());
    order = to;
  }
  const int64_t scratch_bytes = pack_scratch_bytes(head.spec);
  const Buffer scratch(threads.num_threads() * scratch_bytes);
  const StoredVector no_bias;
  auto task = [&](int64_t panel, int thread) {
    std::byte* out = blob + head.panels_offset() + panel * head.spec.panel_bytes();
    pack_panel({&weight, &no_bias, &head.spec, panel, out, order},
               scratch.data() + thread * scratch_bytes);
  };
  threads.parallel_for(head.spec.panels(), task);
}

int64_t CpuLinear::workspace_bytes(const StoredMatrix& weight, const ActivationScheme& input,
                                   int64_t max_rows, int num_threads) const {
  return scratch_of(plan_panels(weight), input, max_rows, num_threads).total;
}

void CpuLinear::run(const Args& args) const {
  Call call{args, {}, {}, {}};
  std::memcpy(&call.head, args.blob, sizeof(call.head));
  call.plan = ProductPlan::of(isa(), call.head.spec, args.input);
  call.scratch = scratch_of(call.head.spec, args.input, args.num_rows, args.threads->num_threads());
  const int64_t panels = call.head.spec.panels();
  for (int64_t first = 0; first < args.num_rows; first += call.scratch.rows) {
    const int64_t rows = std::min(call.scratch.rows, args.num_rows - first);
    if (rows * call.head.spec.cols <= kSerialValues) {
      for (int64_t i = 0; i < rows; ++i) prepare(call, first, i, 0);
    } else {
      auto task = [&](int64_t i, int thread) { prepare(call, first, i, thread); };
      args.threads->parallel_for(rows, task);
    }
    const int64_t blocks = ceil_div(rows, kRowBlock);
    const bool beside = rows <= kMaxRowsBeside &&
                        takes_panels_beside(*call.plan.kernels, call.head.spec.code) &&
                        panels >= kMaxPanelsBeside * kTasksPerThread * args.threads->num_threads();
    const int64_t step = beside ? kMaxPanelsBeside : 1;
    const int64_t tasks = ceil_div(panels, step);
    auto task = [&](int64_t t, int thread) {
      const int64_t block = t / tasks * kRowBlock;
      const int64_t panel = t % tasks * step;
      multiply_block(call, first, block, std::min(kRowBlock, rows - block), panel,
                     std::min(step, panels - panel), thread);
    };
    args.threads->parallel_for(blocks * tasks, task);
  }
}

}  // namespace moekit::linear
