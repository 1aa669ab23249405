// GroupedMlp: rows, each bound for some of E packed experts, through gate/up, activation and down.
// The one pass behind experts/cpu (many experts) and linear/mlp (a shared expert: E = 1).
//
// A pass is two parallel phases: (expert, gate and up panel) tasks write the intermediate rows,
// (expert, down panel) tasks write the output. Few slots: a down task owns a column panel for all
// experts and sums its slots itself. Many slots: tasks go expert by expert, and slots are summed in
// a third phase. Formats whose scales need a whole intermediate row add a phase between.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "base/thread_pool.h"
#include "linear/panel_spec.h"
#include "moekit/config.h"
#include "problem/expert_rows.h"
#include "trace/stage.h"

namespace moekit::linear {

/// What every expert of a group has in common.
struct MlpShape {
  int64_t width = 0;  ///< of input and output rows
  int64_t inter = 0;
  int64_t top_k = 1;
  ActivationSpec activation;
  ActivationScheme gate_up_input, down_input;
  bool zero_points = false;  ///< some matrix may be packed with zero points
};

/// Places of sorted K axes (column_order.h), 0 where K is as stored: what rows are permuted to.
struct MlpPlaces {
  int64_t gate_up = 0, down = 0;

  static MlpPlaces of(const PanelSpec& gate, const PanelSpec& up, const PanelSpec& down) {
    return {std::max(gate.places, up.places), down.places};
  }
};

/// How a group of experts is packed: the same for all of them.
struct MlpLayout {
  PanelSpec gate, up, down;  ///< gate has no rows when the activation has none
  int64_t num_experts = 0;
  std::vector<int64_t> expert_offset;  ///< [num_experts + 1]; the first is the size of the head
  std::string note;                    ///< why something was widened or sorted

  int64_t gate_up_bytes() const {
    return up.panels() * ((gate.rows > 0 ? gate.panel_bytes() : 0) + up.panel_bytes());
  }
  int64_t first_order() const { return gate_up_bytes() + down.total_bytes(); }
  int64_t total_bytes() const { return expert_offset.back(); }
  MlpPlaces places() const { return MlpPlaces::of(gate, up, down); }
};

/// Reads descriptions and what plan_panels reads, no codes. What bits depend on (widened or
/// sorted columns) is decided for all experts of `layer`, so that it is the same on every rank;
/// empty: there are no others.
MlpLayout plan_mlp(std::span<const StoredExpert* const> experts,
                   std::span<const StoredExpert> layer = {});

/// Fills blob[0, layout.total_bytes()), panels spread over the threads.
void pack_mlp(std::span<const StoredExpert* const> experts, const MlpLayout& layout,
              std::byte* blob, ThreadPool& threads);

// The two parts of pack_mlp.
/// Fills blob[0, layout.expert_offset.front()).
void pack_mlp_head(std::span<const StoredExpert* const> experts, const MlpLayout& layout,
                   std::byte* blob);
/// Packs each expert whose place is not null there; reads no other expert's weights.
void pack_mlp_experts(std::span<const StoredExpert* const> experts, const MlpLayout& layout,
                      std::span<std::byte* const> places, ThreadPool& threads);

/// Everything that an expert's packed bytes depend on beside its weights.
std::string encoding_of(const MlpLayout& layout);

/// How the outputs leave.
enum class MlpOutput : uint8_t {
  slots,   ///< one row per (row, slot), unweighted; slots without expert untouched
  summed,  ///< one row per row: weights times slots, slot order; zeros without any expert
};

/// Speed only.
struct MlpKnobs {
  int64_t row_block = 120;   ///< rows of one expert in one task
  int64_t owner_slots = 64;  ///< up to so many slots a down task owns its columns
};

/// What a trace calls the phases of a pass.
struct MlpStages {
  trace::Stage gemm1 = trace::Stage::gemm1;
  trace::Stage gemm2 = trace::Stage::gemm2;
  trace::Stage sum = trace::Stage::sum;
};

struct MlpArgs {
  CpuIsa isa = CpuIsa::generic;
  const MlpShape* shape = nullptr;
  const std::byte* blob = nullptr;
  ExpertRows in;              ///< without ids every row goes to expert 0
  bool weight_input = false;  ///< in.weights multiply the input, not the output
  MlpOutput output = MlpOutput::slots;
  float* out = nullptr;
  std::byte* workspace = nullptr;
  ThreadPool* threads = nullptr;
  MlpKnobs knobs;
  MlpStages stages;
};

/// Scratch for at most max_rows rows (batched: per expert). Bounded: more rows go in chunks.
int64_t mlp_workspace_bytes(const MlpShape& shape, const MlpPlaces& places, RowsLayout rows,
                            int64_t num_experts, int64_t max_rows, int num_threads);

/// Never allocates, never throws.
void run_mlp(const MlpArgs& args);

}  // namespace moekit::linear
