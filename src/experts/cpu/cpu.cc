#include "experts/cpu/cpu.h"

#include <charconv>

#include "linear/cpu_isa.h"
#include "linear/grouped_mlp.h"

namespace moekit::experts {
namespace {

std::vector<const StoredExpert*> local_of(const CanonicalLayer& layer,
                                          std::span<const int32_t> local_experts) {
  std::vector<const StoredExpert*> experts;
  for (int32_t e : local_experts) experts.push_back(&layer.experts[static_cast<size_t>(e)]);
  return experts;
}

linear::MlpShape shape_of(const MoeConfig& c) {
  return {.width = c.routed_width(),
          .inter = c.inter,
          .top_k = c.top_k,
          .activation = c.activation,
          .gate_up_input = c.gate_up_input,
          .down_input = c.down_input,
          .zero_points =
              linear::may_have_zeros(c.gate_up_weights) || linear::may_have_zeros(c.down_weights)};
}

/// "key=value,key=value"; unknown keys and bad numbers leave the default, as a knob changes speed
/// only.
linear::MlpKnobs parse_knobs(std::string_view text) {
  linear::MlpKnobs knobs;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view entry = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) continue;
    int64_t value = 0;
    const char* last = entry.data() + entry.size();
    if (std::from_chars(entry.data() + equals + 1, last, value).ptr != last) continue;
    if (entry.substr(0, equals) == "row_block") knobs.row_block = value;
    if (entry.substr(0, equals) == "owner_slots") knobs.owner_slots = value;
  }
  return knobs;
}

}  // namespace

CpuIsa CpuExperts::isa() const { return isa_ ? *isa_ : linear::default_isa(); }

Traits CpuExperts::traits(const Problem&) const {
  const bool standard = rows_ == RowsLayout::standard;
  return {.rows = rows_,
          .can_weight_and_sum = standard,
          .can_weight_input = standard,
          .quantizes_input = true,
          .reads_quantized_rows = true};
}

Support CpuExperts::supports(const Problem& problem) const {
  Support s;
  s.require(problem.device.type == DeviceType::cpu, ReasonCode::device,
            "runs on the CPU, the plan asks for CUDA device {}", problem.device.index);
  isa();  // a forced ISA that this machine lacks is the user's error, and shows here
  return s;
}

WeightLayout CpuExperts::weight_layout(const CanonicalLayer& layer,
                                       std::span<const int32_t> local_experts) const {
  const auto experts = local_of(layer, local_experts);
  const linear::MlpLayout mlp = linear::plan_mlp(experts, layer.experts);
  WeightLayout layout;
  layout.name = "cpu_panels";
  layout.row_order = layer.config.activation.gated ? RowOrder::panels : RowOrder::not_gated;
  layout.gate_up = layer.config.gate_up_weights;
  layout.down = layer.config.down_weights;
  if (!experts.empty()) {
    layout.gate_up = linear::packed_scheme(experts[0]->up, mlp.up);
    layout.down = linear::packed_scheme(experts[0]->down, mlp.down);
  }
  layout.num_local_experts = static_cast<int64_t>(experts.size());
  layout.expert_offset = mlp.expert_offset;
  layout.encoding = linear::encoding_of(mlp);
  layout.gate_up_places = mlp.places().gate_up;
  layout.down_places = mlp.places().down;
  layout.note = mlp.note;
  return layout;
}

void CpuExperts::pack(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                      const WeightLayout&, std::byte* blob, ThreadPool& threads) const {
  const auto experts = local_of(layer, local_experts);
  linear::pack_mlp(experts, linear::plan_mlp(experts, layer.experts), blob, threads);
}

void CpuExperts::pack_head(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                           const WeightLayout&, std::byte* blob) const {
  const auto experts = local_of(layer, local_experts);
  linear::pack_mlp_head(experts, linear::plan_mlp(experts, layer.experts), blob);
}

void CpuExperts::pack_experts(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                              const WeightLayout&, std::span<std::byte* const> places,
                              ThreadPool& threads) const {
  const auto experts = local_of(layer, local_experts);
  linear::pack_mlp_experts(experts, linear::plan_mlp(experts, layer.experts), places, threads);
}

int64_t CpuExperts::workspace_bytes(const Problem& problem, const WeightLayout& layout,
                                    int64_t max_rows, int num_threads) const {
  return linear::mlp_workspace_bytes(shape_of(problem.config),
                                     {layout.gate_up_places, layout.down_places}, rows_,
                                     problem.num_local_experts(), max_rows, num_threads);
}

std::vector<Knobs> CpuExperts::candidates(const Problem&, int64_t) const {
  return {"row_block=120,owner_slots=64", "row_block=60,owner_slots=64",
          "row_block=240,owner_slots=64", "row_block=120,owner_slots=0",
          "row_block=120,owner_slots=256"};
}

void CpuExperts::run(const Args& args, const Knobs& knobs) const {
  const linear::MlpShape shape = shape_of(args.problem->config);
  linear::MlpArgs mlp;
  mlp.isa = isa();
  mlp.shape = &shape;
  mlp.blob = args.blob;
  mlp.in = args.in;
  mlp.weight_input = args.duty.weigher == Weigher::input;
  mlp.output =
      args.duty.summer == Summer::experts ? linear::MlpOutput::summed : linear::MlpOutput::slots;
  mlp.out = args.out.data;
  mlp.workspace = args.workspace;
  mlp.threads = args.threads;
  mlp.knobs = parse_knobs(knobs);
  linear::run_mlp(mlp);
}

const Experts& cpu_experts() {
  static const CpuExperts member(RowsLayout::standard);
  return member;
}

const Experts& cpu_batched_experts() {
  static const CpuExperts member(RowsLayout::batched);
  return member;
}

}  // namespace moekit::experts
