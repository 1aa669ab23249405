#include "linear/grouped_mlp.h"

#include <algorithm>
#include <cstring>

#include "linear/mlp_blob.h"
#include "linear/mlp_scratch.h"
#include "linear/product.h"
#include "linear/row_operand.h"
#include "trace/parallel.h"

namespace moekit::linear {
namespace {

/// Floats from a panel's sums to the next one's.
constexpr int64_t kSumsOfPanel = kMaxRowBlock * kPanelCols;

/// One call: what run_mlp's steps share.
class Pass {
 public:
  Pass(const MlpArgs& args, const MlpScratch& scratch)
      : a_(args),
        shape_(*args.shape),
        s_(scratch),
        ws_(args.workspace),
        pool_(*args.threads),
        batched_(args.in.layout == RowsLayout::batched),
        top_k_(batched_ ? 1 : args.in.top_k) {
    std::memcpy(&head_, a_.blob, sizeof(head_));
    orders_ = OrderOffsets::of(head_.first_order, head_.gate, head_.up, head_.down);
    gated_ = head_.gate.rows > 0;
    up_plan_ = ProductPlan::of(a_.isa, head_.up, shape_.gate_up_input);
    gate_plan_ = gated_ ? ProductPlan::of(a_.isa, head_.gate, shape_.gate_up_input) : up_plan_;
    down_plan_ = ProductPlan::of(a_.isa, head_.down, shape_.down_input);
    up_panels_ = head_.up.panels();
    quantized_in_ =
        !is_plain(shape_.gate_up_input) && a_.in.format.format == shape_.gate_up_input.format;
    // Rows that arrive quantized carry their scale; a source may only quantize where one scale
    // serves all.
    const bool scale_matters = is_static(shape_.gate_up_input) && !quantized_in_;
    per_slot_ = (scale_matters && !head_.experts_share_scale) || head_.up.is_sorted();
    halves_differ_ = scale_matters && gated_ && !head_.halves_share_scale;
    row_block_ = std::clamp<int64_t>(a_.knobs.row_block, 1, kMaxRowBlock);
  }

  void run() {
    if (batched_) {
      run_batched();
      return;
    }
    for (int64_t first = 0; first < a_.in.num_rows; first += s_.chunk_rows) {
      first_row_ = first;
      num_rows_ = std::min(s_.chunk_rows, a_.in.num_rows - first);
      sort_slots();
      run_chunk();
    }
  }

 private:
  void run_batched() {
    const int32_t* counts = a_.in.expert_num_rows;
    int64_t expert = 0;
    int64_t next = 0;
    while (expert < head_.num_experts) {
      num_slots_ = 0;
      num_items_ = 0;
      while (expert < head_.num_experts && num_slots_ < s_.chunk_slots) {
        const int64_t here = std::min<int64_t>(counts[expert], a_.in.rows_per_expert);
        const int64_t n = std::min(here - next, s_.chunk_slots - num_slots_);
        for (int64_t i = 0; i < n; ++i) {
          order()[num_slots_ + i] = static_cast<int32_t>(num_slots_ + i);
          batched_row(num_slots_ + i) = {static_cast<int32_t>(expert),
                                         static_cast<int32_t>(next + i)};
        }
        add_items(static_cast<int32_t>(expert), num_slots_, n);
        num_slots_ += n;
        next += n;
        if (next >= here) {
          ++expert;
          next = 0;
        }
      }
      num_rows_ = num_slots_;
      run_chunk();
    }
  }

  /// Counting sort of the chunk's slots by expert; slots without a local expert stay out.
  void sort_slots() {
    const int64_t slots = num_rows_ * top_k_;
    const LocalExpert* ids = a_.in.ids != nullptr ? a_.in.ids + first_row_ * top_k_ : nullptr;
    const auto expert_of = [&](int64_t i) { return ids != nullptr ? index_of(ids[i]) : 0; };
    auto* start = s_.counts.in<int32_t>(ws_);
    const auto experts = static_cast<int32_t>(head_.num_experts);
    std::memset(start, 0, static_cast<size_t>(experts + 1) * 4);
    for (int64_t i = 0; i < slots; ++i) {
      const int32_t e = expert_of(i);
      if (e >= 0 && e < experts) ++start[e + 1];
    }
    num_items_ = 0;
    for (int32_t e = 0; e < experts; ++e) {
      add_items(e, start[e], start[e + 1]);
      start[e + 1] += start[e];
    }
    num_slots_ = start[experts];
    auto* place = s_.places.in<int32_t>(ws_);
    for (int64_t i = 0; i < slots; ++i) {
      const int32_t e = expert_of(i);
      place[i] = -1;
      if (e < 0 || e >= experts) continue;
      place[i] = start[e];
      order()[start[e]++] = static_cast<int32_t>(i);
    }
  }

  /// Blocks of nearly equal height.
  void add_items(int32_t expert, int64_t first, int64_t count) {
    auto* items = s_.items.in<MlpItem>(ws_);
    const int64_t blocks = ceil_div(count, row_block_);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t n = ceil_div(count, blocks - block);
      items[num_items_++] = {expert, static_cast<int32_t>(first), static_cast<int32_t>(n),
                             static_cast<int32_t>(block), static_cast<int32_t>(blocks)};
      first += n;
      count -= n;
    }
  }

  void run_chunk() {
    if (num_slots_ > 0) {
      prepare_inputs();
      hidden_phase();
      if (!is_plain(down_plan_.input) || down_plan_.sums || head_.down.is_sorted()) {
        finish_hidden();
      }
    }
    if (a_.output == MlpOutput::summed && owns_columns()) {
      owner_phase();
      return;
    }
    down_phase();
    if (a_.output == MlpOutput::summed) sum_phase();
  }

  /// Calls body(i, thread) for i in [0, n): here when that is little work, else on all threads.
  template <typename Body>
  void for_rows(int64_t n, int64_t values, Body body) {
    if (n * values <= kSerialValues) {
      for (int64_t i = 0; i < n; ++i) body(i, 0);
      return;
    }
    const int64_t block = std::clamp<int64_t>(n / (4 * pool_.num_threads()), 1, 16);
    auto run_block = [&](int64_t task, int thread) {
      for (int64_t i = task * block; i < std::min(n, (task + 1) * block); ++i) body(i, thread);
    };
    pool_.parallel_for(ceil_div(n, block), run_block);
  }

  /// Operands of the input rows, then each slot's view of them.
  void prepare_inputs() {
    auto* gate_rows = s_.gate_rows.in<RowOperand>(ws_);
    auto* up_rows = s_.up_rows.in<RowOperand>(ws_);
    if (per_slot_) {
      for_items([&](const MlpItem& item) {
        for (int64_t i = item.first; i < item.first + item.count; ++i) slot_expert(i) = item.expert;
      });
      for_rows(num_slots_, shape_.width, [&](int64_t i, int thread) {
        prepare_slot(i, slot_expert(i), thread, &gate_rows[i], &up_rows[i]);
      });
      return;
    }
    auto* ready = s_.row_ready.in<RowOperand>(ws_);
    if (!halves_differ_) {
      for_rows(num_rows_, shape_.width, [&](int64_t r, int thread) {
        if (has_slot(r)) ready[r] = prepare_input(r, r, 0, false, thread);
      });
      for (int64_t i = 0; i < num_slots_; ++i) {
        up_rows[i] = ready[order()[i] / top_k_];
        gate_rows[i] = up_rows[i];
      }
      return;
    }
    for_rows(num_rows_, shape_.width, [&](int64_t r, int thread) {
      if (has_slot(r)) ready[r] = prepare_input(r, r, 0, true, thread);
    });
    for (int64_t i = 0; i < num_slots_; ++i) gate_rows[i] = ready[order()[i] / top_k_];
    for_rows(num_rows_, shape_.width, [&](int64_t r, int thread) {
      if (has_slot(r)) ready[r] = prepare_input(r, r, 0, false, thread);
    });
    for (int64_t i = 0; i < num_slots_; ++i) up_rows[i] = ready[order()[i] / top_k_];
  }

  void prepare_slot(int64_t i, int32_t expert, int thread, RowOperand* gate, RowOperand* up) {
    const ExpertInputs inputs = inputs_of(expert);
    const bool one = inputs.gate == inputs.up && inputs.halves_share_order != 0;
    const int64_t row = order()[i] / top_k_;
    *up = prepare_input(row, i, expert, false, thread);
    *gate = one || !gated_ ? *up : prepare_input(row, i, expert, true, thread);
  }

  /// Row `row` of the chunk, for an expert's gate or up, into operand `index` of the up (or only)
  /// or gate buffers.
  RowOperand prepare_input(int64_t row, int64_t index, int32_t expert, bool gate, int thread) {
    const ExpertInputs inputs = inputs_of(expert);
    RowRecord record;
    record.format = &a_.in.format;
    record.static_scale = gate ? inputs.gate : inputs.up;
    if (head_.up.is_sorted()) {
      record.order = order_at(expert, gate ? orders_.gate : orders_.up);
      record.places = gate ? head_.gate.places : head_.up.places;
    }
    if (batched_) {
      const BatchedRow at = batched_row(row);
      record.data = a_.in.record(at.expert * a_.in.rows_per_expert + at.row);
    } else {
      record.data = a_.in.record(first_row_ + row);
      if (a_.weight_input) record.weight = a_.in.weights[(first_row_ + row) * top_k_];
    }
    // The up buffers exist only where scales may differ; the shared operand lives in gate_inputs.
    const bool second = gate && (per_slot_ || halves_differ_);
    const Region& rows = second ? s_.up_inputs : s_.gate_inputs;
    const Region& extras = second ? s_.up_extras : s_.gate_extras;
    return prepare_row(up_plan_, record, rows.in<std::byte>(ws_) + index * s_.input_stride,
                       extras.in<float>(ws_) + index * s_.input_extras,
                       thread_scratch(thread) + s_.prepare_offset);
  }

  bool has_slot(int64_t row) const {
    if (batched_) return true;
    const auto* place = s_.places.in<int32_t>(ws_) + row * top_k_;
    for (int64_t j = 0; j < top_k_; ++j) {
      if (place[j] >= 0) return true;
    }
    return false;
  }

  void hidden_phase() {
    auto* hidden_rows = s_.hidden_rows.in<RowOperand>(ws_);
    for (int64_t i = 0; i < num_slots_; ++i)
      hidden_rows[i] = {hidden_at(i), nullptr, nullptr, 1.0f};
    const int64_t panels = up_panels_;
    const int64_t step = task_panels(up_plan_, panels, num_items_, 1, gated_ ? 2 : 4);
    const int64_t tasks = ceil_div(panels, step);
    auto task = [&](int64_t t, int thread) {
      const PanelTask now = panel_task(t, tasks);
      const PanelTask later = panel_task(likely_next(t, num_items_ * tasks), tasks);
      hidden_task(*now.item, now.panel * step, std::min(step, panels - now.panel * step),
                  hidden_panel(later.item->expert, later.panel * step), thread);
    };
    trace::parallel_for(a_.stages.gemm1, pool_, num_items_ * tasks, task);
  }

  /// Panels of a task: `usual`, or `most` where few rows take them side by side and tasks of
  /// `items` items are still enough for all threads.
  int64_t task_panels(const ProductPlan& plan, int64_t panels, int64_t items, int64_t usual,
                      int64_t most) const {
    const bool few = num_slots_ <= kMaxRowsBeside * num_items_;
    const bool enough = items * panels >= most * kTasksPerThread * pool_.num_threads();
    return few && enough && takes_panels_beside(*plan.kernels, plan.code) ? most : usual;
  }

  struct PanelTask {
    const MlpItem* item;
    int64_t panel;  ///< counted in those of a task
  };
  /// Task t of all (item, panel): the blocks of an expert's rows take each panel one after the
  /// other, so that it comes from memory once.
  PanelTask panel_task(int64_t t, int64_t panels) const {
    const MlpItem* item = items() + t / panels;
    item -= item->block;
    const int64_t within = t - (item - items()) * panels;
    return {item + within % item->blocks, within / item->blocks};
  }

  /// The task that a thread takes after t when all take turns.
  int64_t likely_next(int64_t t, int64_t num_tasks) const {
    return std::min(t + pool_.num_threads(), num_tasks - 1);
  }

  /// Columns of `num_panels` panels of h.
  void hidden_task(const MlpItem& item, int64_t panel, int64_t num_panels, const std::byte* next,
                   int thread) {
    std::byte* mine = thread_scratch(thread);
    auto* sums = reinterpret_cast<float*>(mine + s_.sums_offset);
    const RowOperand* gate_rows = s_.gate_rows.in<RowOperand>(ws_) + item.first;
    const RowOperand* up_rows = s_.up_rows.in<RowOperand>(ws_) + item.first;
    Product products[kMaxTaskPanels];
    size_t n = 0;
    for (int64_t i = panel; i < panel + num_panels; ++i) {
      const std::byte* pair = hidden_panel(item.expert, i);
      const std::byte* later = i + 1 < panel + num_panels ? hidden_panel(item.expert, i + 1) : next;
      if (gated_) {
        products[n] = Product::of(gate_plan_, pair, up_of(pair), gate_rows,
                                  sums + static_cast<int64_t>(n) * kSumsOfPanel);
        ++n;
      }
      products[n] = Product::of(up_plan_, up_of(pair), later, up_rows,
                                sums + static_cast<int64_t>(n) * kSumsOfPanel);
      ++n;
    }
    multiply_panels({products, n}, item.count, mine + s_.decode_offset);
    HiddenArgs h;
    h.gate_rows = gate_rows;
    h.up_rows = up_rows;
    h.num_rows = item.count;
    h.out_stride = s_.hidden_stride;
    for (int64_t i = panel; i < panel + num_panels; ++i) {
      const std::byte* pair = hidden_panel(item.expert, i);
      if (gated_) {
        h.gate = sums;
        h.gate_terms = column_terms(gate_plan_, pair);
        sums += kSumsOfPanel;
      }
      h.up = sums;
      h.up_terms = column_terms(up_plan_, up_of(pair));
      sums += kSumsOfPanel;
      finish_hidden_panel(item, i, h);
    }
  }

  /// act(gate, up) into the item's rows of h.
  void finish_hidden_panel(const MlpItem& item, int64_t panel, HiddenArgs& h) {
    h.columns = std::min(kPanelCols, shape_.inter - panel * kPanelCols);
    const bool as_operand = is_plain(down_plan_.input) && !head_.down.is_sorted();
    const StoreAs store = as_operand ? down_plan_.store : StoreAs::f32;
    h.out = hidden_at(item.first) + panel * kPanelCols * (store == StoreAs::bf16 ? 2 : 4);
    down_plan_.kernels->hidden(shape_.activation, store, h);
  }

  /// Intermediate rows through the down input's chain and into its order, in place; and their
  /// segment sums.
  void finish_hidden() {
    auto* hidden_rows = s_.hidden_rows.in<RowOperand>(ws_);
    const bool is_sorted = head_.down.is_sorted();
    if (is_static(down_plan_.input) || is_sorted) {
      for_items([&](const MlpItem& item) {
        for (int64_t i = item.first; i < item.first + item.count; ++i) slot_expert(i) = item.expert;
      });
    }
    const RowFormat format = RowFormat::of(ActivationFormat::f32, shape_.inter);
    for_rows(num_slots_, shape_.inter, [&](int64_t i, int thread) {
      float* extras = s_.hidden_extra.in<float>(ws_) + i * s_.hidden_extras;
      if (is_plain(down_plan_.input) && !is_sorted) {
        down_plan_.kernels->segment_sums(hidden_at(i), down_plan_.store, head_.down.k_padded(),
                                         down_plan_.segment, extras);
        hidden_rows[i].segment_sums = extras;
        return;
      }
      RowRecord record;
      record.format = &format;
      record.data = hidden_at(i);
      if (is_static(down_plan_.input)) record.static_scale = inputs_of(slot_expert(i)).down;
      if (is_sorted) {
        record.order = order_at(slot_expert(i), orders_.down);
        record.places = head_.down.places;
      }
      hidden_rows[i] = prepare_row(down_plan_, record, hidden_at(i), extras,
                                   thread_scratch(thread) + s_.prepare_offset);
    });
  }

  /// Few slots, and columns enough to keep every thread busy.
  bool owns_columns() const {
    const int64_t limit = std::min(a_.knobs.owner_slots, kMaxOwnerSlots);
    return !batched_ && num_slots_ <= limit &&
           head_.down.panels() >= 2 * int64_t{pool_.num_threads()};
  }

  /// Each task computes its columns for every slot and adds them up in slot order.
  void owner_phase() {
    const int64_t panels = head_.down.panels();
    const int64_t step = task_panels(down_plan_, panels, 1, 1, kMaxTaskPanels);
    const int64_t tasks = ceil_div(panels, step);
    auto task = [&](int64_t t, int thread) {
      auto* slots = reinterpret_cast<float*>(thread_scratch(thread) + s_.owner_offset);
      const int64_t first = t * step;
      const int64_t n = std::min(step, panels - first);
      const int64_t later = likely_next(t, tasks) * step;
      for_items([&](const MlpItem& item) {
        const bool last = &item == items() + num_items_ - 1;
        const std::byte* next =
            last ? down_panel(items()->expert, later) : down_panel((&item + 1)->expert, first);
        down_task(item, first, n, next, thread,
                  [&](int64_t row) { return slots + (item.first + row) * step * kPanelCols; });
      });
      const int64_t columns = std::min(n * kPanelCols, shape_.width - first * kPanelCols);
      for (int64_t r = 0; r < num_rows_; ++r) {
        sum_row(r, columns, a_.out + (first_row_ + r) * shape_.width + first * kPanelCols,
                [&](int64_t, int32_t place) { return slots + place * step * kPanelCols; });
      }
    };
    trace::parallel_for(a_.stages.gemm2, pool_, tasks, task);
  }

  void down_phase() {
    const int64_t panels = head_.down.panels();
    const int64_t step = task_panels(down_plan_, panels, num_items_, kTaskPanels, kMaxTaskPanels);
    const int64_t tasks = ceil_div(panels, step);
    auto task = [&](int64_t t, int thread) {
      const PanelTask now = panel_task(t, tasks);
      const PanelTask later = panel_task(likely_next(t, num_items_ * tasks), tasks);
      const MlpItem& item = *now.item;
      const int64_t first = now.panel * step;
      down_task(item, first, std::min(step, panels - first),
                down_panel(later.item->expert, later.panel * step), thread, [&](int64_t row) {
                  return slot_row(order()[item.first + row]) + first * kPanelCols;
                });
    };
    trace::parallel_for(a_.stages.gemm2, pool_, num_items_ * tasks, task);
  }

  /// out_of(row) gets the panels' columns for a row of the item.
  template <typename OutOf>
  void down_task(const MlpItem& item, int64_t panel, int64_t num_panels, const std::byte* next,
                 int thread, OutOf out_of) {
    std::byte* mine = thread_scratch(thread);
    auto* sums = reinterpret_cast<float*>(mine + s_.sums_offset);
    Product products[kMaxTaskPanels];
    for (int64_t i = 0; i < num_panels; ++i) {
      const std::byte* later = i + 1 < num_panels ? down_panel(item.expert, panel + i + 1) : next;
      products[i] =
          Product::of(down_plan_, down_panel(item.expert, panel + i), later,
                      s_.hidden_rows.in<RowOperand>(ws_) + item.first, sums + i * kSumsOfPanel);
    }
    multiply_panels({products, static_cast<size_t>(num_panels)}, item.count,
                    mine + s_.decode_offset);
    float* out[kMaxRowBlock];
    for (int64_t i = 0; i < num_panels; ++i) {
      for (int64_t row = 0; row < item.count; ++row) out[row] = out_of(row) + i * kPanelCols;
      const std::byte* data = down_panel(item.expert, panel + i);
      down_plan_.kernels->finish(
          products[i].c, column_terms(down_plan_, data), products[i].rows, item.count,
          std::min(kPanelCols, shape_.width - (panel + i) * kPanelCols), out);
    }
  }

  void sum_phase() {
    const trace::Span span(a_.stages.sum);
    for_rows(num_rows_, shape_.width * top_k_, [&](int64_t r, int) {
      sum_row(r, shape_.width, a_.out + (first_row_ + r) * shape_.width,
              [&](int64_t slot, int32_t) { return slot_row(slot); });
    });
  }

  /// out[0, n) = sum over the row's slots in slot order: weight times row rounded to fp32, then
  /// added. row_of(slot, place) gives a slot's values.
  template <typename RowOf>
  void sum_row(int64_t row, int64_t n, float* out, RowOf row_of) const {
    const auto* place = s_.places.in<int32_t>(ws_) + row * top_k_;
    const bool weighted = a_.in.weights != nullptr && !a_.weight_input;
    bool first = true;
    for (int64_t j = 0; j < top_k_; ++j) {
      if (place[j] < 0) continue;
      const float weight = weighted ? a_.in.weights[(first_row_ + row) * top_k_ + j] : 1.0f;
      down_plan_.kernels->accumulate(row_of(row * top_k_ + j, place[j]), weight, first, n, out);
      first = false;
    }
    if (first) std::memset(out, 0, static_cast<size_t>(n) * 4);
  }

  /// Where slot `slot` of the chunk goes.
  float* slot_row(int64_t slot) const {
    if (a_.output == MlpOutput::summed) {
      return s_.slot_rows.in<float>(ws_) + slot * shape_.width;
    }
    if (batched_) {
      const BatchedRow at = batched_row(slot);
      return a_.out + (at.expert * a_.in.rows_per_expert + at.row) * shape_.width;
    }
    return a_.out + (first_row_ * top_k_ + slot) * shape_.width;
  }

  template <typename Body>
  void for_items(Body body) const {
    for (int64_t i = 0; i < num_items_; ++i) body(items()[i]);
  }

  struct BatchedRow {
    int32_t expert;
    int32_t row;
  };
  BatchedRow& batched_row(int64_t i) const { return s_.batched.in<BatchedRow>(ws_)[i]; }
  /// The expert of sorted slot i, where one is asked for.
  int32_t& slot_expert(int64_t i) const { return s_.experts.in<int32_t>(ws_)[i]; }

  int32_t* order() const { return s_.order.in<int32_t>(ws_); }
  const MlpItem* items() const { return s_.items.in<MlpItem>(ws_); }
  std::byte* hidden_at(int64_t i) const {
    return s_.hidden.in<std::byte>(ws_) + i * s_.hidden_stride;
  }
  std::byte* thread_scratch(int thread) const {
    return s_.per_thread.in<std::byte>(ws_) + thread * s_.thread_bytes;
  }
  const std::byte* expert_at(int32_t e) const {
    return a_.blob + head_.first_expert + e * head_.expert_bytes;
  }
  /// Panels of gate and up that make the same columns lie side by side; down's follow all of them.
  const std::byte* hidden_panel(int32_t e, int64_t panel) const {
    return expert_at(e) + panel * (gate_bytes() + up_plan_.panel_bytes);
  }
  int64_t gate_bytes() const { return gated_ ? gate_plan_.panel_bytes : 0; }
  const std::byte* up_of(const std::byte* pair) const { return pair + gate_bytes(); }
  const std::byte* down_panel(int32_t e, int64_t panel) const {
    return hidden_panel(e, up_panels_) + panel * down_plan_.panel_bytes;
  }
  /// `offset`: one of orders_.
  const int32_t* order_at(int32_t e, int64_t offset) const {
    return reinterpret_cast<const int32_t*>(expert_at(e) + offset);
  }
  ExpertInputs inputs_of(int32_t e) const {
    ExpertInputs inputs;
    std::memcpy(&inputs, a_.blob + sizeof(BlobHead) + e * int64_t{sizeof(ExpertInputs)},
                sizeof(inputs));
    return inputs;
  }

  const MlpArgs& a_;
  const MlpShape& shape_;
  const MlpScratch& s_;
  std::byte* ws_;
  ThreadPool& pool_;
  const bool batched_;
  const int64_t top_k_;
  BlobHead head_;
  OrderOffsets orders_;
  ProductPlan gate_plan_, up_plan_, down_plan_;
  int64_t up_panels_ = 0;
  bool gated_ = false;
  bool quantized_in_ = false;
  bool per_slot_ = false;
  bool halves_differ_ = false;
  int64_t row_block_ = 0;
  int64_t first_row_ = 0;
  int64_t num_rows_ = 0;
  int64_t num_slots_ = 0;
  int64_t num_items_ = 0;
};

}  // namespace

int64_t mlp_workspace_bytes(const MlpShape& shape, const MlpPlaces& places, RowsLayout rows,
                            int64_t num_experts, int64_t max_rows, int num_threads) {
  return mlp_scratch(shape, places, rows, num_experts, max_rows, num_threads).total;
}

void run_mlp(const MlpArgs& args) {
  BlobHead head;
  std::memcpy(&head, args.blob, sizeof(head));
  const int64_t max_rows =
      args.in.layout == RowsLayout::batched ? args.in.rows_per_expert : args.in.num_rows;
  const MlpPlaces places = MlpPlaces::of(head.gate, head.up, head.down);
  const MlpScratch scratch = mlp_scratch(*args.shape, places, args.in.layout, head.num_experts,
                                         max_rows, args.threads->num_threads());
  Pass(args, scratch).run();
}

}  // namespace moekit::linear
