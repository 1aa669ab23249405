#include "engine/synthetic.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/buffer.h"
#include "base/check.h"
#include "base/math.h"
#include "engine/synthetic_matrix.h"
#include "tensor/float_formats.h"
#include "tensor/rng.h"

namespace moekit::engine {
namespace {

// Streams of the generator: matrices count from 0, everything else has a base of its own.
constexpr uint64_t kVectorStreams = uint64_t{1} << 40;

constexpr int64_t kRowsPerTask = 128;

/// One matrix or vector of the layer and where it lies in the block.
struct MatrixPart {
  StoredMatrix* target;
  quant::EncodedLayout layout;
  double sigma;
  uint64_t stream;
  int64_t offset = 0;
};
struct VectorPart {
  StoredVector* target;
  int64_t size;
  float sigma;
  uint64_t stream;
  int64_t offset = 0;
};

/// Static input scale as a calibration would find it for inputs up to `amax`.
float static_scale(const ActivationScheme& input, float amax) {
  if (!input.static_scale) return 1.0f;
  const float range = input.format == ActivationFormat::nvfp4 ? 2688.0f : 448.0f;
  return input.sense == ScaleSense::multiplier ? amax / range : range / amax;
}

/// Largest input of the down matrix for gate and up of unit variance, with some room: products of
/// two normal values reach about 12, squares and shifted products more.
float down_amax(const ActivationSpec& act) {
  return act.kind == ActivationKind::relu2 || act.kind == ActivationKind::swiglu_oai ? 24.0f
                                                                                     : 12.0f;
}

class LayerMaker {
 public:
  LayerMaker(const ProblemSpec& spec, uint64_t seed, const SyntheticOptions& options)
      : seed_(seed), layer_(std::make_shared<CanonicalLayer>()) {
    const MoeConfig& c = spec.config;
    layer_->config = c;
    layer_->family = spec.name.empty() ? "custom" : spec.name;
    layer_->experts.resize(static_cast<size_t>(c.num_experts));
    for (int64_t e = 0; e < c.num_experts; ++e) {
      // 2^-2 ... 2^2, neighbours unlike.
      const double magnitude =
          options.unlike_experts ? std::ldexp(1.0, static_cast<int>(e * 3 % 5) - 2) : 1.0;
      add_expert(layer_->experts[static_cast<size_t>(e)], c.routed_width(), c.inter, magnitude,
                 c.gate_up_weights, c.down_weights, c.gate_up_input, c.down_input,
                 c.has_gate_up_bias, c.has_down_bias);
    }
    if (c.shared.inter > 0) {
      add_expert(layer_->shared, c.hidden, c.shared.inter, 1.0, c.shared.gate_up_weights,
                 c.shared.down_weights, c.shared.gate_up_input, c.shared.down_input, false, false);
      if (c.shared.sigmoid_gate) add_dense(layer_->shared_gate, 1, c.hidden);
    }
    if (c.latent > 0) {
      add_dense(layer_->latent_in, c.latent, c.hidden);
      add_dense(layer_->latent_out, c.hidden, c.latent);
    }
    if (options.router) add_router(c);
  }

  std::shared_ptr<const CanonicalLayer> make(ThreadPool& threads) {
    auto block = std::make_shared<Buffer>(total_);
    std::vector<SyntheticMatrix> writers;
    struct Task {
      size_t part;
      int64_t first, last;
    };
    std::vector<Task> tasks;
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const MatrixPart& part = matrices_[i];
      writers.emplace_back(part.layout, part.sigma, seed_, part.stream);
      for (int64_t r = 0; r < part.layout.rows; r += kRowsPerTask) {
        tasks.push_back({i, r, std::min(part.layout.rows, r + kRowsPerTask)});
      }
    }
    auto write = [&](int64_t t, int) {
      const Task& task = tasks[static_cast<size_t>(t)];
      writers[task.part].write_rows(task.first, task.last,
                                    block->data() + matrices_[task.part].offset);
    };
    threads.parallel_for(static_cast<int64_t>(tasks.size()), write);
    for (size_t i = 0; i < matrices_.size(); ++i) {
      const float input_scale = matrices_[i].target->input_scale;
      *matrices_[i].target = writers[i].view(block->data() + matrices_[i].offset);
      matrices_[i].target->input_scale = input_scale;
    }
    for (const VectorPart& part : vectors_) write_vector(part, block->data() + part.offset);
    layer_->keep_alive = std::move(block);
    return layer_;
  }

 private:
  int64_t reserve(int64_t bytes) {
    const int64_t offset = total_;
    total_ += round_up(bytes, 128);
    return offset;
  }

  void add_matrix(StoredMatrix& target, int64_t rows, int64_t cols, double sigma,
                  const WeightScheme& scheme, const ActivationScheme& input, float input_amax) {
    MatrixPart part{&target,
                    quant::EncodedLayout::of(scheme, rows, cols, synthetic_encoding(scheme, input)),
                    sigma, matrices_.size()};
    part.offset = reserve(part.layout.total_bytes);
    target.input_scale = static_scale(input, input_amax);
    matrices_.push_back(part);
  }

  void add_dense(StoredMatrix& target, int64_t rows, int64_t cols) {
    add_matrix(target, rows, cols, 1.0 / std::sqrt(static_cast<double>(cols)), {WeightFormat::bf16},
               {}, 1.0f);
  }

  void add_vector(StoredVector& target, int64_t size, float sigma) {
    VectorPart part{&target, size, sigma, kVectorStreams + vectors_.size()};
    part.offset = reserve(size * int64_t{sizeof(float)});
    vectors_.push_back(part);
  }

  void add_expert(StoredExpert& expert, int64_t width, int64_t inter, double magnitude,
                  const WeightScheme& gate_up, const WeightScheme& down,
                  const ActivationScheme& gate_up_input, const ActivationScheme& down_input,
                  bool gate_up_bias, bool down_bias) {
    const ActivationSpec& act = layer_->config.activation;
    const double in_gain = 1.0 / std::sqrt(static_cast<double>(width));
    // What comes out of the activation has an rms around 0.6.
    const double out_gain = magnitude * 1.7 / std::sqrt(static_cast<double>(inter));
    if (act.gated) add_matrix(expert.gate, inter, width, in_gain, gate_up, gate_up_input, 6.0f);
    add_matrix(expert.up, inter, width, in_gain, gate_up, gate_up_input, 6.0f);
    add_matrix(expert.down, width, inter, out_gain, down, down_input, down_amax(act));
    if (gate_up_bias && act.gated) add_vector(expert.gate_bias, inter, 0.1f);
    if (gate_up_bias) add_vector(expert.up_bias, inter, 0.1f);
    if (down_bias) add_vector(expert.down_bias, width, 0.1f);
  }

  void add_router(const MoeConfig& c) {
    add_dense(layer_->router.weight, c.num_experts, c.hidden);
    if (c.router.has_logit_bias) add_vector(layer_->router.logit_bias, c.num_experts, 0.1f);
    if (c.router.has_selection_bias)
      add_vector(layer_->router.selection_bias, c.num_experts, 0.05f);
  }

  void write_vector(const VectorPart& part, std::byte* storage) const {
    auto* out = reinterpret_cast<float*>(storage);
    const Rng rng(seed_, part.stream);
    for (int64_t i = 0; i < part.size; ++i) {
      out[i] = rng.normal(static_cast<uint64_t>(i)) * part.sigma;
    }
    *part.target = {storage, DType::f32, part.size, 0, 1};
  }

  uint64_t seed_;
  std::shared_ptr<CanonicalLayer> layer_;
  std::vector<MatrixPart> matrices_;
  std::vector<VectorPart> vectors_;
  int64_t total_ = 0;
};

}  // namespace

quant::EncodeOptions synthetic_encoding(const WeightScheme& scheme, const ActivationScheme& input) {
  quant::EncodeOptions options;
  const bool integer =
      scheme.format == WeightFormat::int4_group || scheme.format == WeightFormat::int8_group ||
      scheme.format == WeightFormat::int4_channel || scheme.format == WeightFormat::int8_channel;
  if (integer) options.scale_dtype = DType::bf16;
  options.global_sense = input.sense;
  return options;
}

std::shared_ptr<const CanonicalLayer> make_synthetic_layer(const ProblemSpec& spec, uint64_t seed,
                                                           ThreadPool& threads,
                                                           const SyntheticOptions& options) {
  return LayerMaker(spec, seed, options).make(threads);
}

int64_t synthetic_expert_bytes(const MoeConfig& c) {
  const auto bytes = [](const WeightScheme& scheme, const ActivationScheme& input, int64_t rows,
                        int64_t cols) {
    return round_up(
        quant::EncodedLayout::of(scheme, rows, cols, synthetic_encoding(scheme, input)).total_bytes,
        128);
  };
  const int64_t half = bytes(c.gate_up_weights, c.gate_up_input, c.inter, c.routed_width());
  const int64_t down = bytes(c.down_weights, c.down_input, c.routed_width(), c.inter);
  return c.num_experts * ((c.activation.gated ? 2 : 1) * half + down);
}

}  // namespace moekit::engine
