// Layout and packing of GroupedMlp's blob: a head that run_mlp reads, then the experts' panels.
#include <algorithm>
#include <cstring>

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

PanelSpec widened(const StoredMatrix& m, const PanelSpec& like) {
  PanelSpec s = like;
  s.rows = m.rows;
  s.cols = m.cols;
  return s;
}

/// Specs of one matrix of all experts. One that must be widened takes the others with it.
PanelSpec plan_all(std::span<const StoredExpert* const> experts,
                   std::initializer_list<StoredMatrix StoredExpert::*> matrices, std::string& note,
                   std::vector<PanelSpec>& specs) {
  const PanelSpec* wide = nullptr;
  std::vector<PanelSpec> all;
  for (const StoredExpert* e : experts) {
    for (auto matrix : matrices) all.push_back(plan_panels(e->*matrix));
  }
  size_t i = 0;
  for (const StoredExpert* e : experts) {
    for (auto matrix : matrices) {
      const PanelSpec& s = all[i++];
      if (s.widened && wide == nullptr) {
        wide = &s;
        const std::string why = widening_note(e->*matrix, s);
        if (note.find(why) == std::string::npos) note += (note.empty() ? "" : "; ") + why;
      }
    }
  }
  specs.assign(matrices.size(), PanelSpec{});
  i = 0;
  for (const StoredExpert* e : experts) {
    size_t which = 0;
    for (auto matrix : matrices) {
      unify(specs[which++], wide != nullptr ? widened(e->*matrix, *wide) : all[i]);
      ++i;
    }
  }
  return specs.back();
}

}  // namespace

MlpLayout plan_mlp(std::span<const StoredExpert* const> experts) {
  MlpLayout layout;
  layout.num_experts = static_cast<int64_t>(experts.size());
  std::vector<PanelSpec> specs;
  if (!experts.empty()) {
    if (experts[0]->gate.rows > 0) {
      plan_all(experts, {&StoredExpert::gate, &StoredExpert::up}, layout.note, specs);
      layout.gate = specs[0];
      layout.up = specs[1];
      MOEKIT_CHECK(layout.gate.rows == layout.up.rows && layout.gate.cols == layout.up.cols,
                   "gate and up need one shape, got {} x {} and {} x {}", layout.gate.rows,
                   layout.gate.cols, layout.up.rows, layout.up.cols);
    } else {
      layout.up = plan_all(experts, {&StoredExpert::up}, layout.note, specs);
    }
    layout.down = plan_all(experts, {&StoredExpert::down}, layout.note, specs);
    MOEKIT_CHECK(layout.down.cols == layout.up.rows && layout.down.rows == layout.up.cols,
                 "down must be {} x {} to follow up, got {} x {}", layout.up.cols, layout.up.rows,
                 layout.down.rows, layout.down.cols);
  }
  const int64_t expert_bytes = round_up(layout.gate_up_bytes() + layout.down.total_bytes(), 128);
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

}  // namespace

void pack_mlp_head(std::span<const StoredExpert* const> experts, const MlpLayout& layout,
                   std::byte* blob) {
  const BlobHead head = head_of(experts, layout);
  std::memset(blob, 0, static_cast<size_t>(layout.expert_offset.front()));
  std::memcpy(blob, &head, sizeof(head));
  const bool gated = layout.gate.rows > 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    const InputScales scales{gated ? experts[e]->gate.input_scale : experts[e]->up.input_scale,
                             experts[e]->up.input_scale, experts[e]->down.input_scale};
    std::memcpy(blob + sizeof(BlobHead) + e * sizeof(InputScales), &scales, sizeof(scales));
  }
}

void pack_mlp_experts(std::span<const StoredExpert* const> experts, const MlpLayout& layout,
                      std::span<std::byte* const> places, ThreadPool& threads) {
  const bool gated = layout.gate.rows > 0;
  const int64_t up_panels = layout.up.panels();
  const int64_t gate_bytes = gated ? layout.gate.panel_bytes() : 0;
  const int64_t pair_bytes = gate_bytes + layout.up.panel_bytes();
  constexpr int64_t kRun = PanelRun::kMaxPanels / 2;
  const int64_t up_runs = ceil_div(up_panels, kRun);
  const int64_t per_expert = up_runs + ceil_div(layout.down.panels(), kRun);
  auto pack_task = [&](int64_t task, int) {
    const StoredExpert& e = *experts[static_cast<size_t>(task / per_expert)];
    std::byte* base = places[static_cast<size_t>(task / per_expert)];
    if (base == nullptr) return;
    const int64_t run = task % per_expert;
    std::byte* down = base + up_panels * pair_bytes;
    PanelRun panels;
    if (run < up_runs) {
      // Gate's panels before up's: neighbours of one matrix share lines.
      const int64_t end = std::min(up_panels, (run + 1) * kRun);
      for (int64_t p = run * kRun; gated && p < end; ++p) {
        panels.add({&e.gate, &e.gate_bias, &layout.gate, p, base + p * pair_bytes});
      }
      for (int64_t p = run * kRun; p < end; ++p) {
        panels.add({&e.up, &e.up_bias, &layout.up, p, base + p * pair_bytes + gate_bytes});
      }
    } else {
      const int64_t first = (run - up_runs) * kRun;
      for (int64_t p = first; p < std::min(layout.down.panels(), first + kRun); ++p) {
        panels.add({&e.down, &e.down_bias, &layout.down, p, down + p * layout.down.panel_bytes()});
      }
    }
    panels.pack();
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
    text += fmt::format("{}x{} code {} scale {} group {} zeros {};", s->rows, s->cols,
                        static_cast<int>(s->code), static_cast<int>(s->scale), s->group, s->zeros);
  }
  return text;
}

}  // namespace moekit::linear
