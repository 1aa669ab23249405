#include "experts/ref/ref.h"

#include <algorithm>
#include <cstring>

#include "experts/ref/activation.h"
#include "quant/row_codec.h"
#include "quant/stored_codec.h"

namespace moekit::experts {
namespace {

using quant::decode_weights;

/// One (row, slot) of one local expert, or one valid batched row.
struct Slot {
  int64_t record;  // row of `in.records`
  int64_t out;     // row of the slot output
  float weight;
};

constexpr int64_t kChunk = 16;  // output rows a task

/// Regions of the workspace.
struct Scratch {
  Region offsets, slots, gate_input, up_input, inter, rows, decode;
  WorkspaceLayout layout;

  Scratch(const Problem& problem, int64_t num_slots, int num_threads) {
    const MoeConfig& c = problem.config;
    const int64_t width = c.routed_width();
    offsets = layout.add(problem.num_local_experts() + 1, sizeof(int64_t));
    slots = layout.add(num_slots, sizeof(Slot));
    gate_input = layout.add(checked_mul(num_slots, width, "reference input"), sizeof(float));
    up_input = layout.add(checked_mul(num_slots, width, "reference input"), sizeof(float));
    inter = layout.add(checked_mul(num_slots, c.inter, "reference intermediate"), sizeof(float));
    rows = layout.add(checked_mul(num_slots, width, "reference output"), sizeof(float));
    decode = layout.add(num_threads * 2 * std::max(width, c.inter), sizeof(float));
  }
};

/// Eight interleaved partial sums, added pairwise at the end: a fixed order that compilers may
/// vectorize.
template <typename T>
T dot(const float* a, const float* b, int64_t n) {
  T sum[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sum[j] += T(a[i + j]) * T(b[i + j]);
  }
  for (; i < n; ++i) sum[i % 8] += T(a[i]) * T(b[i]);
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

template <typename T>
class Reference final : public Experts {
 public:
  Reference(std::string_view name, RowsLayout rows) : name_(name), rows_(rows) {}

  std::string_view name() const override { return name_; }

  Traits traits(const Problem&) const override {
    Traits t;
    t.rows = rows_;
    t.can_weight_and_sum = rows_ == RowsLayout::standard;
    t.can_weight_input = rows_ == RowsLayout::standard;
    t.quantizes_input = true;
    t.reads_quantized_rows = true;
    return t;
  }

  Support supports(const Problem& problem) const override {
    Support s;
    s.require(problem.device.type == DeviceType::cpu, ReasonCode::device,
              "runs on the CPU, the plan asks for CUDA device {}", problem.device.index);
    return s;
  }

  WeightLayout weight_layout(const CanonicalLayer& layer,
                             std::span<const int32_t> local_experts) const override {
    WeightLayout layout;
    layout.name = "canonical";
    layout.row_order = layer.config.activation.gated ? RowOrder::gate_up : RowOrder::not_gated;
    layout.gate_up = layer.config.gate_up_weights;
    layout.down = layer.config.down_weights;
    layout.num_local_experts = static_cast<int64_t>(local_experts.size());
    return layout;
  }

  void pack(const CanonicalLayer&, std::span<const int32_t>, const WeightLayout&, std::byte*,
            ThreadPool&) const override {}

  int64_t workspace_bytes(const Problem& problem, const WeightLayout&, int64_t max_rows,
                          int num_threads) const override {
    const int64_t copies =
        rows_ == RowsLayout::standard ? problem.config.top_k : problem.num_local_experts();
    return Scratch(problem, checked_mul(max_rows, copies, "reference slots"), num_threads)
        .layout.total();
  }

  std::vector<Knobs> candidates(const Problem&, int64_t) const override { return {"reference"}; }

  void run(const Args& args, const Knobs&) const override {
    const Problem& problem = *args.problem;
    const MoeConfig& config = problem.config;
    const int64_t max_slots = rows_ == RowsLayout::standard
                                  ? args.in.num_rows * args.in.top_k
                                  : args.in.rows_per_expert * problem.num_local_experts();
    const Scratch scratch(problem, max_slots, args.threads->num_threads());
    const int64_t num_experts = static_cast<int64_t>(args.local_experts.size());
    auto* offsets = scratch.offsets.in<int64_t>(args.workspace);
    auto* slots = scratch.slots.in<Slot>(args.workspace);
    sort_slots(args, num_experts, offsets, slots);

    quantize_input(args, scratch, num_experts, offsets, slots);
    auto gate_up = [&](int64_t task, int thread) {
      gate_up_task(args, scratch, offsets, task, thread);
    };
    args.threads->parallel_for(num_experts * ceil_div(config.inter, kChunk), gate_up);
    auto requantize = [&](int64_t e, int) { quantize_inter(args, scratch, offsets, e); };
    args.threads->parallel_for(num_experts, requantize);
    auto down = [&](int64_t task, int thread) {
      down_task(args, scratch, offsets, slots, task, thread);
    };
    args.threads->parallel_for(num_experts * ceil_div(config.routed_width(), kChunk), down);
    if (args.duty.summer == Summer::experts) sum_rows(args, scratch);
  }

 private:
  /// Lists the valid slots of each local expert, in row order.
  void sort_slots(const Args& args, int64_t num_experts, int64_t* offsets, Slot* slots) const {
    const ExpertRows& in = args.in;
    int64_t count = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      offsets[e] = count;
      if (rows_ == RowsLayout::batched) {
        for (int64_t t = 0; t < in.expert_num_rows[e]; ++t) {
          const int64_t row = e * in.rows_per_expert + t;
          slots[count++] = {row, row, 1.0f};
        }
        continue;
      }
      for (int64_t i = 0; i < in.num_rows * in.top_k; ++i) {
        if (index_of(in.ids[i]) == e) slots[count++] = {i / in.top_k, i, in.weights[i]};
      }
    }
    offsets[num_experts] = count;
  }

  /// Input rows of every slot as gate and up read them: decoded, weighted where the duty says so,
  /// quantized.
  void quantize_input(const Args& args, const Scratch& scratch, int64_t num_experts,
                      const int64_t* offsets, const Slot* slots) const {
    const MoeConfig& config = args.problem->config;
    const int64_t width = config.routed_width();
    auto task = [&](int64_t e, int) {
      const StoredExpert& expert = args.canonical->experts[args.local_experts[e]];
      for (int64_t s = offsets[e]; s < offsets[e + 1]; ++s) {
        float* up = scratch.up_input.in<float>(args.workspace) + s * width;
        float* gate = scratch.gate_input.in<float>(args.workspace) + s * width;
        const std::byte* record = args.in.record(slots[s].record);
        quant::decode_row(args.in.format, record, up);
        if (is_quantized(args.in.format.format) &&
            args.in.format.format == config.gate_up_input.format) {
          std::memcpy(gate, up, width * sizeof(float));  // prepare has quantized
          continue;
        }
        if (args.duty.weigher == Weigher::input) {
          for (int64_t i = 0; i < width; ++i) up[i] *= slots[s].weight;
        }
        std::memcpy(gate, up, width * sizeof(float));
        quant::round_trip_row(config.gate_up_input, expert.up.input_scale, up, width);
        if (config.activation.gated) {
          quant::round_trip_row(config.gate_up_input, expert.gate.input_scale, gate, width);
        }
      }
    };
    args.threads->parallel_for(num_experts, task);
  }

  /// kChunk rows of gate and up of one expert, for all its slots, through the activation.
  void gate_up_task(const Args& args, const Scratch& scratch, const int64_t* offsets, int64_t task,
                    int thread) const {
    const MoeConfig& config = args.problem->config;
    const int64_t width = config.routed_width();
    const int64_t chunks = ceil_div(config.inter, kChunk);
    const int64_t e = task / chunks;
    if (offsets[e] == offsets[e + 1]) return;
    const StoredExpert& expert = args.canonical->experts[args.local_experts[e]];
    float* gate_row =
        scratch.decode.in<float>(args.workspace) + thread * 2 * std::max(width, config.inter);
    float* up_row = gate_row + width;
    const int64_t first = task % chunks * kChunk;
    for (int64_t n = first; n < std::min(first + kChunk, config.inter); ++n) {
      if (config.activation.gated) decode_weights(expert.gate, n, 0, width, gate_row);
      decode_weights(expert.up, n, 0, width, up_row);
      const T gate_bias = expert.gate_bias.empty() ? T(0) : T(quant::element(expert.gate_bias, n));
      const T up_bias = expert.up_bias.empty() ? T(0) : T(quant::element(expert.up_bias, n));
      for (int64_t s = offsets[e]; s < offsets[e + 1]; ++s) {
        const float* up_input = scratch.up_input.in<float>(args.workspace) + s * width;
        const float* gate_input = scratch.gate_input.in<float>(args.workspace) + s * width;
        const T gate =
            config.activation.gated ? dot<T>(gate_input, gate_row, width) + gate_bias : T(0);
        const T up = dot<T>(up_input, up_row, width) + up_bias;
        scratch.inter.in<float>(args.workspace)[s * config.inter + n] =
            static_cast<float>(ref::activate<T>(config.activation, gate, up));
      }
    }
  }

  void quantize_inter(const Args& args, const Scratch& scratch, const int64_t* offsets,
                      int64_t e) const {
    const MoeConfig& config = args.problem->config;
    const StoredExpert& expert = args.canonical->experts[args.local_experts[e]];
    for (int64_t s = offsets[e]; s < offsets[e + 1]; ++s) {
      quant::round_trip_row(config.down_input, expert.down.input_scale,
                            scratch.inter.in<float>(args.workspace) + s * config.inter,
                            config.inter);
    }
  }

  void down_task(const Args& args, const Scratch& scratch, const int64_t* offsets,
                 const Slot* slots, int64_t task, int thread) const {
    const MoeConfig& config = args.problem->config;
    const int64_t width = config.routed_width();
    const int64_t chunks = ceil_div(width, kChunk);
    const int64_t e = task / chunks;
    if (offsets[e] == offsets[e + 1]) return;
    const StoredExpert& expert = args.canonical->experts[args.local_experts[e]];
    float* down_row =
        scratch.decode.in<float>(args.workspace) + thread * 2 * std::max(width, config.inter);
    float* out = args.duty.summer == Summer::experts ? scratch.rows.in<float>(args.workspace)
                                                     : args.out.data;
    const int64_t first = task % chunks * kChunk;
    for (int64_t n = first; n < std::min(first + kChunk, width); ++n) {
      decode_weights(expert.down, n, 0, config.inter, down_row);
      const T bias = expert.down_bias.empty() ? T(0) : T(quant::element(expert.down_bias, n));
      for (int64_t s = offsets[e]; s < offsets[e + 1]; ++s) {
        const float* inter = scratch.inter.in<float>(args.workspace) + s * config.inter;
        out[slots[s].out * width + n] =
            static_cast<float>(dot<T>(inter, down_row, config.inter) + bias);
      }
    }
  }

  /// The slot-ordered sum of docs/numerics.md: products rounded to fp32, added left to right.
  void sum_rows(const Args& args, const Scratch& scratch) const {
    const ExpertRows& in = args.in;
    const int64_t width = args.problem->config.routed_width();
    const float* rows = scratch.rows.in<float>(args.workspace);
    auto task = [&](int64_t m, int) {
      float* out = args.out.data + m * width;
      bool first = true;
      for (int64_t j = 0; j < in.top_k; ++j) {
        const int64_t i = m * in.top_k + j;
        if (in.ids[i] == LocalExpert::none) continue;
        const float weight = args.duty.weigher == Weigher::input ? 1.0f : in.weights[i];
        for (int64_t n = 0; n < width; ++n) {
          const float product = weight * rows[i * width + n];
          out[n] = first ? product : out[n] + product;
        }
        first = false;
      }
      if (first) std::fill_n(out, width, 0.0f);
    };
    args.threads->parallel_for(in.num_rows, task);
  }

  std::string_view name_;
  RowsLayout rows_;
};

}  // namespace

const Experts& ref_experts() {
  static const Reference<float> member("ref", RowsLayout::standard);
  return member;
}
const Experts& ref64_experts() {
  static const Reference<double> member("ref64", RowsLayout::standard);
  return member;
}
const Experts& ref_batched_experts() {
  static const Reference<float> member("ref_batched", RowsLayout::batched);
  return member;
}

}  // namespace moekit::experts
