// Layout and packing of GroupedMlp's blob: a head that run_mlp reads, then the experts' panels.
#include <algorithm>
#include <cstring>
#include <optional>

#include "base/buffer.h"
#include "linear/grouped_mlp.h"
#include "linear/mlp_blob.h"
#include "linear/panel_pack.h"

namespace moekit::linear {
namespace {

/// One spec that holds all of them; `a` is empty before the first.
void unify(PanelSpec& a, const PanelSpec& b) {
  if (a.rows == 0) {
    a = b;
    return;
  }
  MOEKIT_CHECK(a.rows == b.rows && a.cols == b.cols,
               "all experts need matrices of one shape, got {} x {} and {} x {}", a.rows, a.cols,
               b.rows, b.cols);
  MOEKIT_CHECK(a.code == b.code && a.group == b.group,
               "all experts need matrices of one format, got unlike codes or groups");
  if (a.scale != b.scale) a.scale = Scale::f32;
  a.zeros = a.zeros || b.zeros;
}

using Experts = std::span<const StoredExpert* const>;
using Matrices = std::initializer_list<StoredMatrix StoredExpert::*>;

/// What the bits of products depend on beside the format: one for all experts of a layer.
struct Treatment {
  std::optional<PanelSpec> wide;  ///< every matrix is widened to this code
  SortedColumns sorted;           ///< without places: columns stay in order
  std::string note;
};

OrderOffsets orders_of(const MlpLayout& layout) {
  return OrderOffsets::of(layout.first_order(), layout.gate, layout.up, layout.down);
}

/// One matrix that must be widened takes the others with it, as does one whose columns must be
/// sorted.
Treatment treatment_of(Experts layer, Matrices matrices) {
  Treatment t;
  std::vector<const StoredMatrix*> all;
  const StoredMatrix* named = nullptr;
  for (const StoredExpert* e : layer) {
    for (auto matrix : matrices) {
      const StoredMatrix& m = e->*matrix;
      all.push_back(&m);
      if (named == nullptr && names_groups(m)) named = &m;
      const PanelSpec spec = plan_panels(m, SortedColumns{});
      if (!spec.widened || t.wide) continue;
      t.wide = spec;
      t.note = packing_note(m, spec);
    }
  }
  if (t.wide || named == nullptr) return t;
  t.sorted = sort_columns(all);
  t.note = packing_note(*named, plan_panels(*named, t.sorted));
  return t;
}

PanelSpec spec_of(const StoredMatrix& m, const Treatment& treatment) {
  if (!treatment.wide) return plan_panels(m, treatment.sorted);
  PanelSpec spec = *treatment.wide;
  spec.rows = m.rows;
  spec.cols = m.cols;
  return spec;
}

/// Specs of the matrices of all experts, which read one input: alike in all but their rows' scales.
std::vector<PanelSpec> plan_all(Experts experts, Experts layer, Matrices matrices,
                                std::string& note) {
  const Treatment treatment = treatment_of(layer, matrices);
  if (note.find(treatment.note) == std::string::npos) {
    note += (note.empty() ? "" : "; ") + treatment.note;
  }
  std::vector<PanelSpec> specs(matrices.size());
  bool zeros = false;
  for (const StoredExpert* e : experts) {
    size_t which = 0;
    for (auto matrix : matrices) unify(specs[which++], spec_of(e->*matrix, treatment));
  }
  for (const PanelSpec& spec : specs) zeros = zeros || spec.zeros;
  for (PanelSpec& spec : specs) spec.zeros = zeros;
  return specs;
}

}  // namespace

MlpLayout plan_mlp(std::span<const StoredExpert* const> experts,
                   std::span<const StoredExpert> layer) {
  MlpLayout layout;
  layout.num_experts = static_cast<int64_t>(experts.size());
  std::vector<const StoredExpert*> all(experts.begin(), experts.end());
  if (!layer.empty()) {
    all.clear();
    for (const StoredExpert& e : layer) all.push_back(&e);
  }
  if (!experts.empty()) {
    if (experts[0]->gate.rows > 0) {
      const auto specs =
          plan_all(experts, all, {&StoredExpert::gate, &StoredExpert::up}, layout.note);
      layout.gate = specs[0];
      layout.up = specs[1];
      MOEKIT_CHECK(layout.gate.rows == layout.up.rows && layout.gate.cols == layout.up.cols,
                   "gate and up need one shape, got {} x {} and {} x {}", layout.gate.rows,
                   layout.gate.cols, layout.up.rows, layout.up.cols);
    } else {
      layout.up = plan_all(experts, all, {&StoredExpert::up}, layout.note)[0];
    }
    layout.down = plan_all(experts, all, {&StoredExpert::down}, layout.note)[0];
    MOEKIT_CHECK(layout.down.cols == layout.up.rows && layout.down.rows == layout.up.cols,
                 "down must be {} x {} to follow up, got {} x {}", layout.up.cols, layout.up.rows,
                 layout.down.rows, layout.down.cols);
  }
  const int64_t expert_bytes = round_up(orders_of(layout).end, 128);
  int64_t offset = blob_head_bytes(layout.num_experts);
  layout.expert_offset.push_back(offset);
  for (int64_t e = 0; e < layout.num_experts; ++e) {
    layout.expert_offset.push_back(offset += expert_bytes);
  }
  checked_mul(expert_bytes, std::max<int64_t>(layout.num_experts, 1), "packed experts");
  return layout;
}

namespace {

BlobHead head_of(std::span<const StoredExpert* const> experts, const MlpLayout& layout) {
  BlobHead head;
  head.num_experts = layout.num_experts;
  head.first_expert = layout.expert_offset.front();
  head.expert_bytes =
      layout.num_experts > 0 ? layout.expert_offset[1] - layout.expert_offset[0] : 0;
  head.first_order = layout.first_order();
  head.gate = layout.gate;
  head.up = layout.up;
  head.down = layout.down;
  for (const StoredExpert* e : experts) {
    if (layout.gate.rows > 0 && e->gate.input_scale != e->up.input_scale) {
      head.halves_share_scale = false;
    }
    if (e->up.input_scale != experts[0]->up.input_scale) head.experts_share_scale = false;
  }
  return head;
}

bool orders_alike(const StoredMatrix& a, const StoredMatrix& b) {
  if (a.group_index == nullptr || b.group_index == nullptr) return a.group_index == b.group_index;
  return std::equal(a.group_index, a.group_index + a.cols, b.group_index);
}

/// Orders of each expert with a place, behind its panels.
void fill_orders(Experts experts, const MlpLayout& layout, std::span<std::byte* const> places,
                 ThreadPool& threads) {
  struct Half {
    const StoredMatrix StoredExpert::*matrix;
    const PanelSpec* spec;
    int64_t offset;
  };
  const OrderOffsets orders = orders_of(layout);
  std::vector<Half> sorted;
  for (const Half& half : {Half{&StoredExpert::gate, &layout.gate, orders.gate},
                           Half{&StoredExpert::up, &layout.up, orders.up},
                           Half{&StoredExpert::down, &layout.down, orders.down}}) {
    if (half.spec->is_sorted()) sorted.push_back(half);
  }
  int64_t groups = 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    for (const Half& half : sorted) {
      if (places[e] != nullptr) groups = std::max(groups, count_groups(experts[e]->*half.matrix));
    }
  }
  const int64_t bytes = round_up(groups * 4, 64);
  const Buffer counters(threads.num_threads() * bytes);
  auto fill = [&](int64_t task, int thread) {
    const auto e = static_cast<size_t>(task) / sorted.size();
    const Half& half = sorted[static_cast<size_t>(task) % sorted.size()];
    if (places[e] == nullptr) return;
    fill_order(experts[e]->*half.matrix, {half.spec->group, half.spec->places},
               reinterpret_cast<int32_t*>(places[e] + half.offset),
               reinterpret_cast<int32_t*>(counters.data() + thread * bytes));
  };
  threads.parallel_for(static_cast<int64_t>(experts.size() * sorted.size()), fill);
}

}  // namespace

void pack_mlp_head(std::span<const StoredExpert* const> experts, const MlpLayout& layout,
                   std::byte* blob) {
  const BlobHead head = head_of(experts, layout);
  std::memset(blob, 0, static_cast<size_t>(layout.expert_offset.front()));
  std::memcpy(blob, &head, sizeof(head));
  const bool gated = layout.gate.rows > 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    const StoredExpert& expert = *experts[e];
    ExpertInputs inputs{expert.up.input_scale, expert.up.input_scale, expert.down.input_scale};
    if (gated) {
      inputs.gate = expert.gate.input_scale;
      if (layout.up.is_sorted()) inputs.halves_share_order = orders_alike(expert.gate, expert.up);
    }
    std::memcpy(blob + sizeof(BlobHead) + e * sizeof(ExpertInputs), &inputs, sizeof(inputs));
  }
}

void pack_mlp_experts(std::span<const StoredExpert* const> experts, const MlpLayout& layout,
                      std::span<std::byte* const> places, ThreadPool& threads) {
  fill_orders(experts, layout, places, threads);
  const OrderOffsets orders = orders_of(layout);
  const bool gated = layout.gate.rows > 0;
  const int64_t up_panels = layout.up.panels();
  const int64_t gate_bytes = gated ? layout.gate.panel_bytes() : 0;
  const int64_t pair_bytes = gate_bytes + layout.up.panel_bytes();
  constexpr int64_t kRun = PanelRun::kMaxPanels / 2;
  const int64_t up_runs = ceil_div(up_panels, kRun);
  const int64_t per_expert = up_runs + ceil_div(layout.down.panels(), kRun);
  const int64_t scratch_bytes =
      std::max(pack_scratch_bytes(layout.up), pack_scratch_bytes(layout.down));
  const Buffer scratch(threads.num_threads() * scratch_bytes);
  auto pack_task = [&](int64_t task, int thread) {
    const StoredExpert& e = *experts[static_cast<size_t>(task / per_expert)];
    std::byte* base = places[static_cast<size_t>(task / per_expert)];
    if (base == nullptr) return;
    const int64_t run = task % per_expert;
    std::byte* down = base + up_panels * pair_bytes;
    const auto order_at = [&](const PanelSpec& spec, int64_t offset) {
      return spec.is_sorted() ? reinterpret_cast<const int32_t*>(base + offset) : nullptr;
    };
    PanelRun panels;
    if (run < up_runs) {
      // Gate's panels before up's: neighbours of one matrix share lines.
      const int64_t end = std::min(up_panels, (run + 1) * kRun);
      for (int64_t p = run * kRun; gated && p < end; ++p) {
        panels.add({&e.gate, &e.gate_bias, &layout.gate, p, base + p * pair_bytes,
                    order_at(layout.gate, orders.gate)});
      }
      for (int64_t p = run * kRun; p < end; ++p) {
        panels.add({&e.up, &e.up_bias, &layout.up, p, base + p * pair_bytes + gate_bytes,
                    order_at(layout.up, orders.up)});
      }
    } else {
      const int64_t first = (run - up_runs) * kRun;
      for (int64_t p = first; p < std::min(layout.down.panels(), first + kRun); ++p) {
        panels.add({&e.down, &e.down_bias, &layout.down, p, down + p * layout.down.panel_bytes(),
                    order_at(layout.down, orders.down)});
      }
    }
    panels.pack(scratch.data() + thread * scratch_bytes);
  };
  threads.parallel_for(static_cast<int64_t>(experts.size()) * per_expert, pack_task);
}

void pack_mlp(std::span<const StoredExpert* const> experts, const MlpLayout& layout,
              std::byte* blob, ThreadPool& threads) {
  pack_mlp_head(experts, layout, blob);
  std::vector<std::byte*> places;
  for (size_t e = 0; e < experts.size(); ++e) places.push_back(blob + layout.expert_offset[e]);
  pack_mlp_experts(experts, layout, places, threads);
}

std::string encoding_of(const MlpLayout& layout) {
  std::string text;
  for (const PanelSpec* s : {&layout.gate, &layout.up, &layout.down}) {
    text += fmt::format("{}x{} code {} scale {} group {} zeros {} places {};", s->rows, s->cols,
                        static_cast<int>(s->code), static_cast<int>(s->scale), s->group, s->zeros,
                        s->places);
  }
  return text;
}

}  // namespace moekit::linear
