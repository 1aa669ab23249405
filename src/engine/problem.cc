// PlanOptions -> Problem: validation, activation schemes, placement.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/thread_pool.h"
#include "comm/communicator.h"
#include "engine/plan.h"
#include "engine/synthetic.h"
#include "problem/rank_map.h"
#include "quant/row_codec.h"

namespace moekit::engine {
namespace {

/// The scheme in which a matrix reads its input under an explicit --activations.
ActivationScheme override_scheme(const ActivationScheme& checkpoint, ActivationFormat asked,
                                 const char* what) {
  if (checkpoint.format == asked) return checkpoint;
  MOEKIT_CHECK_AS(
      ErrorCode::unsupported, asked != ActivationFormat::fp8_tensor,
      "activations=fp8_tensor needs a static input scale; the checkpoint has none for {}; "
      "use fp8_token, or leave activations at 'checkpoint'",
      what);
  return ActivationScheme{.format = asked};
}

void resolve_activations(MoeConfig& config, const PlanOptions& options) {
  if (!options.activations) return;
  const ActivationFormat asked = *options.activations;
  config.gate_up_input = override_scheme(config.gate_up_input, asked, "gate and up");
  config.down_input = override_scheme(config.down_input, asked, "down");
  if (config.shared.inter == 0) return;
  config.shared.gate_up_input =
      override_scheme(config.shared.gate_up_input, asked, "the shared expert's gate and up");
  config.shared.down_input =
      override_scheme(config.shared.down_input, asked, "the shared expert's down");
}

/// Linear, and each rank also holds the first expert of the next rank: the smallest placement in
/// which every rank has a replica.
ExpertPlacement neighbour_replicas(int64_t num_experts, int num_ranks) {
  const ExpertPlacement linear = ExpertPlacement::linear(num_experts, num_ranks);
  std::vector<std::vector<int32_t>> lists;
  for (int r = 0; r < num_ranks; ++r) {
    lists.push_back(linear.experts_of(r));
    const std::vector<int32_t>& next = linear.experts_of((r + 1) % num_ranks);
    if (num_ranks > 1 && !next.empty()) lists.back().push_back(next.front());
  }
  return ExpertPlacement::from_lists(num_experts, std::move(lists));
}

std::shared_ptr<const ExpertPlacement> make_placement(const PlanOptions& options,
                                                      int64_t num_experts, int num_ranks) {
  const std::string& name = options.placement;
  if (name.empty() || name == "linear") {
    return std::make_shared<ExpertPlacement>(ExpertPlacement::linear(num_experts, num_ranks));
  }
  if (name == "round_robin") {
    return std::make_shared<ExpertPlacement>(ExpertPlacement::round_robin(num_experts, num_ranks));
  }
  if (name == "replicas") {
    return std::make_shared<ExpertPlacement>(neighbour_replicas(num_experts, num_ranks));
  }
  MOEKIT_CHECK(
      is_file(name),
      "placement must be 'linear', 'round_robin', 'replicas' or a readable JSON file, got '{}'",
      name);
  Placement placement = load_placement(name, num_experts, num_ranks);
  return std::make_shared<ExpertPlacement>(
      ExpertPlacement::from_lists(num_experts, std::move(placement.experts_of_rank)));
}

/// The communicator's nodes. One that knows a single node may be spread over more for a trial.
NodeMap nodes_of(const PlanOptions& options, const RankMap& map, const RankCoords& mine) {
  const comm::Communicator* comm = options.comm.impl.get();
  if (comm == nullptr || map.ep_size == 1) return {};
  std::vector<int> nodes;
  for (int ep = 0; ep < map.ep_size; ++ep) {
    nodes.push_back(comm->node_of(map.rank_of({mine.dp, ep, mine.tp})));
  }
  const NodeMap known(nodes);
  if (known.num_nodes() > 1 || options.num_nodes == 1) return known;
  MOEKIT_CHECK(options.num_nodes >= 1 && options.num_nodes <= map.ep_size,
               "{} ranks that share the experts out lie on 1 to {} nodes, got {}", map.ep_size,
               map.ep_size, options.num_nodes);
  return NodeMap::shares(map.ep_size, options.num_nodes);
}

/// Room for later placements: enough for the first one, and for all experts.
void set_headroom(const PlanOptions& options, Problem& problem) {
  const int64_t slots = options.slots_per_rank;
  MOEKIT_CHECK(slots >= 0 && options.staging_slots >= 0,
               "slots_per_rank and staging_slots must be 0 or more, got {} and {}", slots,
               options.staging_slots);
  MOEKIT_CHECK(slots > 0 || options.staging_slots == 0,
               "staging_slots of {} need slots_per_rank: without it the placement is fixed",
               options.staging_slots);
  if (slots == 0) return;
  const int64_t most = problem.placement->max_slots();
  MOEKIT_CHECK(most <= slots,
               "the placement gives a rank {} experts, the plan has {} slots a rank: plan with at "
               "least {}",
               most, slots, most);
  problem.slots_per_rank = std::min(slots, problem.config.num_experts);
  const int64_t staged = options.staging_slots > 0 ? options.staging_slots : slots;
  problem.staging_slots = std::min(staged, problem.slots_per_rank);
}

void check_activation(const ActivationSpec& activation) {
  MOEKIT_CHECK(activation.limit >= 0.0f,  // false for NaN
               "the activation's limit must be 0 or more, +infinity for none, got {}",
               activation.limit);
  MOEKIT_CHECK(std::isfinite(activation.alpha) && std::isfinite(activation.beta),
               "the activation's alpha and beta must be finite, got {} and {}", activation.alpha,
               activation.beta);
}

/// Static scales of every expert that one is read from.
void check_static_scales(const CanonicalLayer& layer, const MoeConfig& config) {
  for (const StoredExpert& expert : layer.experts) {
    quant::check_static_scale(config.gate_up_input, expert.up.input_scale);
    if (config.activation.gated)
      quant::check_static_scale(config.gate_up_input, expert.gate.input_scale);
    quant::check_static_scale(config.down_input, expert.down.input_scale);
  }
  if (config.shared.inter == 0) return;
  const SharedSpec& shared = config.shared;
  quant::check_static_scale(shared.gate_up_input, layer.shared.up.input_scale);
  if (config.activation.gated)
    quant::check_static_scale(shared.gate_up_input, layer.shared.gate.input_scale);
  quant::check_static_scale(shared.down_input, layer.shared.down.input_scale);
}

/// The source may quantize with a static scale only where all experts, gate and up, share one.
void find_static_scale(const CanonicalLayer& layer, Problem& problem) {
  if (!problem.config.gate_up_input.static_scale || layer.experts.empty()) return;
  const float scale = layer.experts.front().up.input_scale;
  for (const StoredExpert& expert : layer.experts) {
    if (expert.up.input_scale != scale) return;
    if (problem.config.activation.gated && expert.gate.input_scale != scale) return;
  }
  problem.one_static_input_scale = true;
  problem.static_input_scale = scale;
}

}  // namespace

Problem make_problem(const CanonicalLayer& layer, const PlanOptions& options) {
  Problem problem;
  problem.config = layer.config;
  MoeConfig& config = problem.config;
  MOEKIT_CHECK(options.max_tokens > 0,
               "max_tokens is the token capacity of one call and must be positive, got {}",
               options.max_tokens);
  MOEKIT_CHECK(options.max_tokens <= (int64_t{1} << 40), "max_tokens of {} is beyond any machine",
               options.max_tokens);
  MOEKIT_CHECK(!config.weight_on_input || config.top_k == 1,
               "the router weight on the experts' input is defined for top_k = 1 only, this layer "
               "has top_k = {}",
               config.top_k);
  MOEKIT_CHECK(options.combine_dtype == DType::f32 || options.combine_dtype == DType::bf16,
               "combine_dtype must be f32 or bf16, got {}", to_string(options.combine_dtype));
  MOEKIT_CHECK(options.capacity == CapacityMode::exact || options.capacity_rows > 0,
               "capacity refuse and drop need a positive row count, got {}", options.capacity_rows);
  MOEKIT_CHECK(options.capacity_rows >= 0, "capacity_rows must be 0 or more, got {}",
               options.capacity_rows);
  MOEKIT_CHECK(options.device.type != DeviceType::cpu || options.device.index == 0,
               "the CPU is one device of index 0, got index {}", options.device.index);
  check_activation(config.activation);
  router::validate(config.router, config.num_experts, config.top_k);
  resolve_activations(config, options);

  const comm::Communicator* comm = options.comm.impl.get();
  const RankMap map = RankMap::of(comm != nullptr ? comm->size() : 1, options.tp);
  const RankCoords mine = map.coords_of(comm != nullptr ? comm->rank() : 0);
  problem.num_ranks = map.ep_size;
  problem.rank = mine.ep;
  problem.tp_size = map.tp_size;
  problem.tp_rank = mine.tp;
  problem.nodes = nodes_of(options, map, mine);
  problem.max_tokens = options.max_tokens;
  problem.placement = make_placement(options, config.num_experts, problem.num_ranks);
  set_headroom(options, problem);
  problem.combine = options.combine;
  problem.combine_dtype = options.combine_dtype;
  problem.wire = options.wire;
  problem.batch_invariant = options.batch_invariant;
  problem.capacity.policy = static_cast<CapacityPolicy>(options.capacity);
  problem.capacity.max_rows = options.capacity_rows;
  problem.device = options.device;
  MOEKIT_CHECK(options.arch.empty() || options.device.type == DeviceType::cuda,
               "arch {} names a GPU, the device is the CPU: plan for device cuda", options.arch);
  if (options.device.type == DeviceType::cuda) {
    problem.gpu = device::find_gpu(options.device.index, options.arch);
  }
  problem.hidden_dtype = options.hidden_dtype;
  problem.checked = options.checked;
  check_static_scales(layer, config);
  find_static_scale(layer, problem);
  return problem;
}

CanonicalLayer hollow_layer(const MoeConfig& config) {
  CanonicalLayer layer;
  layer.config = config;
  layer.family = "custom";
  // Grids as a synthetic layer's, so that scales count; nothing is read through them.
  static constexpr std::byte kNowhere{};
  auto matrix = [](const WeightScheme& scheme, int64_t rows, int64_t cols) {
    return quant::EncodedLayout::of(scheme, rows, cols, synthetic_encoding(scheme, {}))
        .view(&kNowhere);
  };
  auto expert_of = [&](int64_t inter, int64_t width, WeightScheme gate_up, WeightScheme down) {
    StoredExpert expert;
    if (config.activation.gated) expert.gate = matrix(gate_up, inter, width);
    expert.up = matrix(gate_up, inter, width);
    expert.down = matrix(down, width, inter);
    return expert;
  };
  const StoredExpert expert =
      expert_of(config.inter, config.routed_width(), config.gate_up_weights, config.down_weights);
  layer.experts.assign(static_cast<size_t>(config.num_experts), expert);
  const WeightScheme plain{WeightFormat::bf16};
  layer.router.weight = matrix(plain, config.num_experts, config.hidden);
  if (config.shared.inter > 0) {
    layer.shared = expert_of(config.shared.inter, config.hidden, config.shared.gate_up_weights,
                             config.shared.down_weights);
    if (config.shared.sigmoid_gate) layer.shared_gate = matrix(plain, 1, config.hidden);
  }
  if (config.latent > 0) {
    layer.latent_in = matrix(plain, config.latent, config.hidden);
    layer.latent_out = matrix(plain, config.hidden, config.latent);
  }
  return layer;
}

int resolve_threads(const PlanOptions& options) {
  MOEKIT_CHECK(options.num_threads >= 0, "threads must be 0 (automatic) or more, got {}",
               options.num_threads);
  if (options.num_threads > 0) return options.num_threads;
  const comm::Communicator* comm = options.comm.impl.get();
  int ranks_here = 1;
  if (comm != nullptr && std::string_view(comm->name()) == "threads") ranks_here = comm->size();
  return std::max(1, usable_cpus() / ranks_here);
}

}  // namespace moekit::engine
