#include "linear/cpu_linear.h"

#include <algorithm>
#include <cstring>

#include "linear/cpu_isa.h"
#include "linear/panel_pack.h"
#include "linear/row_operand.h"
#include "problem/workspace_layout.h"

namespace moekit::linear {
namespace {

/// [PanelSpec | static input scale], then the panels.
constexpr int64_t kHeadBytes = 128;
constexpr int64_t kChunkRows = 960;
constexpr int64_t kRowBlock = 120;
constexpr int64_t kSerialValues = 32768;

struct Head {
  PanelSpec spec;
  float input_scale = 1.0f;
};
static_assert(sizeof(Head) <= kHeadBytes);

struct Scratch {
  int64_t rows = 0, stride = 0, extras = 0, thread_bytes = 0;
  int64_t decode_offset = 0, prepare_offset = 0;
  Region operands, extra, values, per_thread;
  int64_t total = 0;
};

Scratch scratch_of(const StoredMatrix& weight, const ActivationScheme& input, int64_t max_rows,
                   int num_threads) {
  Scratch s;
  s.rows = std::max<int64_t>(1, std::min(max_rows, kChunkRows));
  s.stride = operand_stride(weight.cols);
  s.extras = operand_extras(weight.cols, input.format, may_have_zeros(weight.scheme));
  WorkspaceLayout w;
  s.operands = w.add(s.rows, sizeof(RowOperand));
  s.extra = w.add(s.rows, s.extras * 4);
  s.values = w.add(s.rows, s.stride);
  WorkspaceLayout t;
  t.add(kRowBlock * kPanelCols, 4);  // sums, first
  s.decode_offset = t.add(kScratchBytes, 1).offset;
  s.prepare_offset = t.add(prepare_scratch_bytes(weight.cols), 1).offset;
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
  call.operands()[i] =
      prepare_row(call.plan, record,
                  call.scratch.values.in<std::byte>(call.args.workspace) + i * call.scratch.stride,
                  call.scratch.extra.in<float>(call.args.workspace) + i * call.scratch.extras,
                  call.mine(thread) + call.scratch.prepare_offset);
}

void multiply_block(const Call& call, int64_t first, int64_t block, int64_t rows, int64_t panel,
                    int thread) {
  const PanelSpec& spec = call.head.spec;
  const std::byte* data = call.args.blob + kHeadBytes + panel * spec.panel_bytes();
  auto* sums = reinterpret_cast<float*>(call.mine(thread));
  const RowOperand* operands = call.operands() + block;
  multiply_panel(*call.plan.kernels, spec.code, panel_view(spec, call.plan.segment, data),
                 spec.k_padded(), operands, rows, sums,
                 call.mine(thread) + call.scratch.decode_offset);
  float* out[kRowBlock];
  for (int64_t i = 0; i < rows; ++i) {
    out[i] = call.args.y + (first + block + i) * call.args.y_stride + panel * kPanelCols;
  }
  call.plan.kernels->finish(sums, column_terms(spec, *call.plan.kernels, data), operands, rows,
                            std::min(kPanelCols, spec.rows - panel * kPanelCols), out);
}

}  // namespace

CpuIsa CpuLinear::isa() const { return isa_ ? *isa_ : default_isa(); }

bool CpuLinear::supports(const StoredMatrix& weight, const ActivationScheme&) const {
  return weight.rows > 0 && weight.cols > 0;
}

int64_t CpuLinear::packed_bytes(const StoredMatrix& weight) const {
  return kHeadBytes + plan_panels(weight).total_bytes();
}

void CpuLinear::pack(const StoredMatrix& weight, std::byte* blob, ThreadPool& threads) const {
  const Head head{plan_panels(weight), weight.input_scale};
  std::memset(blob, 0, kHeadBytes);
  std::memcpy(blob, &head, sizeof(head));
  auto task = [&](int64_t panel, int) {
    pack_panel(weight, StoredVector{}, head.spec, panel,
               blob + kHeadBytes + panel * head.spec.panel_bytes());
  };
  threads.parallel_for(head.spec.panels(), task);
}

int64_t CpuLinear::workspace_bytes(const StoredMatrix& weight, const ActivationScheme& input,
                                   int64_t max_rows, int num_threads) const {
  return scratch_of(weight, input, max_rows, num_threads).total;
}

void CpuLinear::run(const Args& args) const {
  Call call{args, {}, {}, {}};
  std::memcpy(&call.head, args.blob, sizeof(call.head));
  call.plan = ProductPlan::of(isa(), call.head.spec, args.input);
  call.scratch = scratch_of(*args.weight, args.input, args.num_rows, args.threads->num_threads());
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
    auto task = [&](int64_t t, int thread) {
      const int64_t block = t / panels * kRowBlock;
      multiply_block(call, first, block, std::min(kRowBlock, rows - block), t % panels, thread);
    };
    args.threads->parallel_for(blocks * panels, task);
  }
}

}  // namespace moekit::linear
