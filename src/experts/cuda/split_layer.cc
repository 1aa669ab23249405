#include "experts/cuda/split_layer.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "device/cuda/device.h"
#include "experts/cuda/stage_clock.h"
#include "kernels/common/limits.h"
#include "kernels/common/weight_panels.h"
#include "problem/workspace_layout.h"

namespace moekit::experts::cuda {

namespace gemm = kernels::sm90_grouped_gemm;
namespace rows = kernels::smxx_moe;
using device::check_cuda;
using trace::Stage;

namespace {

bool is_fp8(const SplitLayerSpec& spec) { return spec.format == gemm::Format::fp8_block; }
int64_t element_bytes(const SplitLayerSpec& spec) { return is_fp8(spec) ? 1 : 2; }
bool sorts_when_shared(const SplitLayerSpec& spec) { return spec.format != gemm::Format::bf16; }

gemm::Shape gate_up_shape(const SplitLayerSpec& spec) {
  return {spec.format, spec.activation.gated ? gemm::Phase::gate_up : gemm::Phase::up,
          spec.num_experts, spec.inter, spec.hidden};
}
gemm::Shape down_shape(const SplitLayerSpec& spec) {
  return {spec.format, gemm::Phase::down, spec.num_experts, spec.hidden, spec.inter};
}

constexpr TaskForm kTaskForms[] = {TaskForm::plain, TaskForm::few, TaskForm::shared};
bool has_form(gemm::Format format, TaskForm form) {
  return form != TaskForm::few || gemm::has_short_tasks(format);
}

kernels::TaskShape task_shape(const gemm::Shape& shape, TaskForm form) {
  const gemm::TileSize tile = gemm::tile_size(shape.phase, form == TaskForm::few);
  kernels::TaskShape t;
  t.tile_rows = tile.rows;
  const bool wide = form == TaskForm::shared && gemm::cluster_shares_rows(shape.format);
  t.n_blocks = static_cast<int32_t>(ceil_div(shape.columns, tile.columns * (wide ? 2 : 1)));
  return t;
}

/// The form that a GEMM takes for a call of this many tokens.
TaskForm form_for(const SplitLayerSpec& spec, const gemm::Shape& shape, int64_t num_tokens) {
  if (spec.form != TaskForm::automatic) {
    return has_form(spec.format, spec.form) ? spec.form : TaskForm::plain;
  }
  const auto slots = static_cast<double>(num_tokens * spec.top_k);
  const double experts = spec.num_experts;
  if (has_form(spec.format, TaskForm::few) && slots <= 16 * experts) {
    // Nearly all experts have no more than a task's 32 rows. Fewer tasks than two a multiprocessor
    // would leave many of those idle; with routing by chance that many experts have rows:
    const double active = kernels::expected_experts(experts, slots);
    if (active * task_shape(shape, TaskForm::few).n_blocks >= 2.0 * spec.num_sms) {
      return TaskForm::few;
    }
  }
  // Blocks share where an expert has two row tiles, or (rows of panels) one that is nearly full. To
  // sort rows by a copy costs as much as sharing saves with 800 columns of h.
  if (slots < 96 * experts) return TaskForm::plain;
  const bool copies = gemm::cluster_shares_rows(spec.format);
  return copies && spec.inter < 1024 ? TaskForm::plain : TaskForm::shared;
}

}  // namespace

/// The workspace, by region.
struct SplitLayer::Regions {
  Region offsets, row_slot, row_token, slot_row, counts, tasks[2], next_task;
  Region chunk_counts, pair_offsets, ticket;  // scratch of the index
  Region input, input_scales;                 // fp8: x quantized
  Region sorted_scales;                       // of rows sorted by expert, which lie in out_rows
  Region inter, inter_scales;                 // h, rows sorted by expert
  Region out_rows;                            // y, one row a slot
  WorkspaceLayout layout;

  explicit Regions(const SplitLayerSpec& spec) {
    const int64_t slots = checked_mul(spec.max_tokens, spec.top_k, "slots");
    const int64_t bytes = element_bytes(spec);
    offsets = layout.add(spec.num_experts + 1, 4);
    row_slot = layout.add(slots, 4);
    row_token = layout.add(slots, 4);
    slot_row = layout.add(slots, 4);
    counts = layout.add(4, 4);
    next_task = layout.add(4, 4);
    chunk_counts = layout.add(checked_mul(rows::chunk_count(slots), spec.num_experts, "counts"), 4);
    pair_offsets = layout.add(2 * (spec.num_experts + 1), 4);
    ticket = layout.add(2, 4);
    const gemm::Shape shapes[2] = {gate_up_shape(spec), down_shape(spec)};
    for (int i = 0; i < 2; ++i) {
      int64_t capacity = 0;
      for (const TaskForm form : kTaskForms) {
        if (!has_form(spec.format, form)) continue;
        const kernels::TaskShape shape = task_shape(shapes[i], form);
        capacity = std::max(capacity, rows::task_capacity(shape, slots, spec.num_experts));
      }
      tasks[i] = layout.add(capacity, sizeof(kernels::TileTask));
    }
    if (is_fp8(spec)) {
      input = layout.add(checked_mul(spec.max_tokens, spec.hidden, "input rows"), 1);
      input_scales = layout.add(spec.max_tokens * ceil_div(spec.hidden, 128), 4);
      inter_scales = layout.add(slots * ceil_div(spec.inter, 128), 4);
      sorted_scales = layout.add(slots * ceil_div(spec.hidden, 128), 4);
    }
    inter = layout.add(checked_mul(slots, spec.inter, "intermediate rows"), bytes);
    out_rows = layout.add(checked_mul(slots, spec.hidden, "slot rows"), 2);
  }
};

const char* SplitLayer::refusal(const SplitLayerSpec& spec) {
  if (spec.num_experts < 1 || spec.top_k < 1 || spec.max_tokens < 1)
    return "sizes must be positive";
  if (const char* reason = gemm::refusal(gate_up_shape(spec))) return reason;
  return gemm::refusal(down_shape(spec));
}

int64_t SplitLayer::workspace_bytes(const SplitLayerSpec& spec) {
  return Regions(spec).layout.total();
}

SplitLayer::SplitLayer(const SplitLayerSpec& spec, const SplitLayerWeights& weights,
                       void* workspace)
    : spec_(spec), workspace_(static_cast<std::byte*>(workspace)) {
  const char* reason = refusal(spec);
  MOEKIT_CHECK_AS(ErrorCode::unsupported, reason == nullptr, "sm90 split layer: {}", reason);
  const Regions r(spec);
  auto* base = workspace_;
  index_.expert_offsets = r.offsets.in<int32_t>(base);
  index_.row_slot = r.row_slot.in<int32_t>(base);
  index_.row_token = r.row_token.in<int32_t>(base);
  index_.slot_row = r.slot_row.in<int32_t>(base);
  index_.num_rows = r.counts.in<int32_t>(base);
  index_.dropped = index_.num_rows + 1;
  index_.chunk_counts = r.chunk_counts.in<int32_t>(base);
  index_.pair_offsets = r.pair_offsets.in<int32_t>(base);
  index_.ticket = r.ticket.in<int32_t>(base);
  check_cuda(cudaMemset(index_.ticket, 0, 8), "cudaMemset of the index ticket");
  auto* next_task = r.next_task.in<int32_t>(base);
  check_cuda(cudaMemset(next_task, 0, 16), "cudaMemset of the task counters");
  for (int i = 0; i < 2; ++i) {
    index_.tasks[i] = r.tasks[i].in<kernels::TileTask>(base);
    index_.num_tasks[i] = index_.num_rows + 2 + i;
  }
  const int64_t bytes = element_bytes(spec);
  const int64_t slots = spec.max_tokens * spec.top_k;

  gemm::Args up;
  up.shape = gate_up_shape(spec);
  up.weights = weights.gate_up;
  up.rows = is_fp8(spec) ? r.input.in<void>(base) : nullptr;
  up.row_bytes = spec.hidden * bytes;
  up.row_index = index_.row_token;
  up.gate_bias = weights.gate_bias;
  up.up_bias = weights.up_bias;
  up.activation = kernels::epilogue_activation(spec.activation);
  up.tasks = index_.tasks[0];
  up.num_tasks = index_.num_tasks[0];
  up.next_task = next_task;
  up.out = r.inter.in<void>(base);
  up.out_row_bytes = spec.inter * bytes;

  gemm::Args down;
  down.shape = down_shape(spec);
  down.weights = weights.down;
  down.rows = up.out;
  down.row_bytes = up.out_row_bytes;
  down.max_rows = slots;
  down.up_bias = weights.down_bias;
  down.tasks = index_.tasks[1];
  down.num_tasks = index_.num_tasks[1];
  down.next_task = next_task + 2;
  down.out = r.out_rows.in<void>(base);
  down.out_row_bytes = int64_t{spec.hidden} * 2;
  down.out_index = index_.row_slot;
  if (is_fp8(spec)) {
    up.row_scales = r.input_scales.in<float>(base);
    up.row_scale_stride = ceil_div(spec.hidden, 128);
    up.out_scales = r.inter_scales.in<float>(base);
    up.out_scale_stride = ceil_div(spec.inter, 128);
    down.row_scales = up.out_scales;
    down.row_scale_stride = up.out_scale_stride;
  }
  gemm::Args sorted_up = up;
  if (sorts_when_shared(spec)) {
    sorted_up.rows = r.out_rows.in<void>(base);
    sorted_up.max_rows = slots;
    sorted_up.row_index = nullptr;
  }
  if (is_fp8(spec)) sorted_up.row_scales = r.sorted_scales.in<float>(base);
  gate_up_ = make_gemm(spec, up, sorted_up);
  down_ = make_gemm(spec, down, down);
}

SplitLayer::Gemm SplitLayer::make_gemm(const SplitLayerSpec& spec, const gemm::Args& plain,
                                       const gemm::Args& shared) {
  Gemm g;
  g.shape = plain.shape;
  for (const TaskForm form : kTaskForms) {
    if (!has_form(spec.format, form)) continue;
    const bool shares = form == TaskForm::shared;
    gemm::Args args = shares ? shared : plain;
    args.shape.short_tasks = form == TaskForm::few;
    check_cuda(gemm::Launch::make(args, spec.num_sms, shares, &g.of[static_cast<int>(form)]),
               "sm90 GEMM");
  }
  return g;
}

const gemm::Launch& SplitLayer::launch(const Gemm& g, int64_t num_tokens) const {
  return g.of[static_cast<int>(form_for(spec_, g.shape, num_tokens))];
}

void SplitLayer::index(const int32_t* ids, int64_t num_tokens, const int32_t* live_tokens,
                       cudaStream_t stream) const {
  rows::Index call = index_;
  const Gemm* gemms[2] = {&gate_up_, &down_};
  for (int i = 0; i < 2; ++i) {
    const gemm::Shape& shape = gemms[i]->shape;
    call.shapes[i] = task_shape(shape, form_for(spec_, shape, num_tokens));
  }
  check_cuda(rows::build_index(ids, num_tokens, live_tokens, spec_.top_k, spec_.num_experts, call,
                               stream, spec_.overlap),
             "index kernel");
}

bool SplitLayer::sorts_rows(int64_t num_tokens) const {
  return sorts_when_shared(spec_) &&
         form_for(spec_, gate_up_.shape, num_tokens) == TaskForm::shared;
}

void SplitLayer::quantize(const void* hidden, int64_t num_tokens, const int32_t* live_tokens,
                          cudaStream_t stream, rows::RowType type, bool beside_index) const {
  const Regions r(spec_);
  const bool sorts = sorts_rows(num_tokens);
  rows::QuantizedRows out;
  out.scheme.format = ActivationFormat::fp8_block;
  out.width = spec_.hidden;
  out.codes = (sorts ? r.out_rows : r.input).in<void>(workspace_);
  out.row_bytes = spec_.hidden;
  out.scales = (sorts ? r.sorted_scales : r.input_scales).in<void>(workspace_);
  out.scale_row_bytes = ceil_div(spec_.hidden, 128) * 4;
  if (sorts) {
    out.slot_row = index_.slot_row;
    out.slots = spec_.top_k;
  }
  const int64_t row_bytes = int64_t{spec_.hidden} * (type == rows::RowType::f32 ? 4 : 2);
  check_cuda(rows::quantize_rows(hidden, type, row_bytes, num_tokens, live_tokens, out, stream,
                                 spec_.overlap, beside_index && !sorts),
             "quantize kernel");
}

void SplitLayer::sort(const void* hidden, int64_t num_tokens, const int32_t* live_tokens,
                      cudaStream_t stream) const {
  const Regions r(spec_);
  check_cuda(
      rows::spread_rows(hidden, int64_t{spec_.hidden} * 2, num_tokens, live_tokens, index_.slot_row,
                        spec_.top_k, r.out_rows.in<void>(workspace_), stream, spec_.overlap),
      "sort kernel");
}

void SplitLayer::gate_up(const void* hidden, int64_t num_tokens, cudaStream_t stream) const {
  const void* rows = is_fp8(spec_) || sorts_rows(num_tokens) ? nullptr : hidden;
  check_cuda(launch(gate_up_, num_tokens).run(stream, spec_.overlap, rows), "sm90 gate_up");
}

void SplitLayer::down(int64_t num_tokens, cudaStream_t stream) const {
  check_cuda(launch(down_, num_tokens).run(stream, spec_.overlap), "sm90 down");
}

void SplitLayer::combine(const int32_t* ids, const float* weights, int64_t num_tokens,
                         const int32_t* live_tokens, void* out, cudaStream_t stream,
                         rows::RowType type) const {
  const Regions r(spec_);
  check_cuda(rows::combine_rows(r.out_rows.in<void>(workspace_), rows::RowType::bf16, ids, weights,
                                num_tokens, live_tokens, spec_.top_k, spec_.num_experts,
                                spec_.hidden, type, out, stream, spec_.overlap),
             "combine kernel");
}

void SplitLayer::run(const void* hidden, const int32_t* ids, const float* weights,
                     int64_t num_tokens, const int32_t* live_tokens, void* out, cudaStream_t stream,
                     RowTypes types, StageClock* clock) const {
  MOEKIT_CHECK(is_fp8(spec_) || types.in == rows::RowType::bf16,
               "bf16 experts read bf16 rows, got f32 ones");
  MOEKIT_CHECK(num_tokens >= 0 && num_tokens <= spec_.max_tokens,
               "a call of {} tokens on a layer planned for {}", num_tokens, spec_.max_tokens);
  if (num_tokens == 0) return;
  index(ids, num_tokens, live_tokens, stream);
  mark(clock, Stage::index);
  if (is_fp8(spec_)) {
    quantize(hidden, num_tokens, live_tokens, stream, types.in, /*beside_index=*/true);
    mark(clock, Stage::quantize);
  } else if (sorts_rows(num_tokens)) {
    sort(hidden, num_tokens, live_tokens, stream);
    mark(clock, Stage::index);
  }
  gate_up(hidden, num_tokens, stream);
  mark(clock, Stage::gemm1);
  down(num_tokens, stream);
  mark(clock, Stage::gemm2);
  combine(ids, weights, num_tokens, live_tokens, out, stream, types.out);
  mark(clock, Stage::sum);
}

}  // namespace moekit::experts::cuda
