#include "checkpoint/layer_loader.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"
#include "checkpoint/block_reader.h"
#include "checkpoint/error_codes.h"

namespace moekit::checkpoint {
namespace {

/// Builds one layer. A class only to share what every step needs.
class LayerBuilder {
 public:
  LayerBuilder(const Model& model, const QuantConfig& quant, BlockReader& block,
               CanonicalLayer& layer)
      : model_(model), family_(*model.family), quant_(quant), block_(block), layer_(layer) {}

  const ExpertLayout* build() {
    const ExpertLayout& layout = choose_layout();
    read_router();
    read_experts(layout);
    read_shared();
    read_latent();
    block_.finish();
    return &layout;
  }

 private:
  /// The first layout of the family and method that has tensors in the block.
  const ExpertLayout& choose_layout() const {
    const ExpertLayout* first = nullptr;
    std::string names;
    for (const LayoutChoice& choice : family_.layouts) {
      if (choice.layout == nullptr || (choice.methods & quant_.method()) == 0) continue;
      if (block_.has_module(choice.layout->down)) return *choice.layout;
      if (first == nullptr) first = choice.layout;
      names += names.empty() ? "" : " or ";
      names += choice.layout->down;
    }
    MOEKIT_CHECK_AS(kUnsupported, first != nullptr, "experts of {} quantized by {} are not covered",
                    model_.model_type, quant_.method_name());
    block_.finish_unknown(
        fmt::format("no experts as {} was expected to name them ({})", model_.model_type, names));
  }

  void check_coverage(const ExpertLayout& layout) const {
    if (!layout.input_first || quant_.method() != kModelOpt) return;
    for (const std::string_view name : {layout.up, layout.down}) {
      const Scheme* scheme = quant_.scheme_of(block_.prefix() + std::string(name));
      if (scheme == nullptr) continue;
      // The packings of fused, transposed experts that ModelOpt's files were seen to have.
      const WeightFormat format = scheme->weights.format;
      const bool covered = format == WeightFormat::fp8_tensor || format == WeightFormat::nvfp4 ||
                           (format == WeightFormat::mxfp4 && layout.interleaved);
      MOEKIT_CHECK_AS(kUnsupported, covered, "fused experts of {} in ModelOpt's {} are not covered",
                      model_.model_type, scheme->label);
    }
  }

  /// The place of one expert matrix. `half`: 0 gate, 1 up; ignored for down.
  MatrixPlace expert_place(const ExpertLayout& layout, std::string_view name, int64_t expert,
                           bool down, int half) const {
    const MoeConfig& c = layer_.config;
    const int64_t width = c.routed_width();
    MatrixPlace place;
    place.module = block_.prefix() + fill(name, "e", expert);
    place.bare = layout.bare;
    place.experts = layout.stacked ? c.num_experts : 0;
    place.expert = layout.stacked ? expert : 0;
    place.flat = layout.flat;
    place.input_first = down ? layout.down_input_first : layout.input_first;
    if (layout.input_first && quant_.method() == kModelOpt) {
      const Scheme* scheme = quant_.scheme_of(place.module);
      place.along_outputs = scheme != nullptr && scheme->weights.format == WeightFormat::mxfp4;
    }
    place.rows = place.stored_rows = down ? width : c.inter;
    place.cols = down ? c.inter : width;
    if (!down && layout.fused && c.activation.gated) {
      place.stored_rows = 2 * c.inter;
      place.row_first = layout.interleaved ? half : half * c.inter;
      place.row_step = layout.interleaved ? 2 : 1;
    }
    return place;
  }

  MatrixPlace shared_place(std::string_view name, int64_t rows, int64_t cols) const {
    MatrixPlace place;
    place.module = fmt::format("{}{}.{}", block_.prefix(), family_.shared, name);
    place.rows = place.stored_rows = rows;
    place.cols = cols;
    return place;
  }

  /// Notes the scheme of a matrix; a second, different one for the same role is not covered.
  void note(const MatrixPlace& place, const ReadMatrix& read, WeightScheme& weights,
            ActivationScheme& input, std::string& first) const {
    if (read.matrix.empty()) return;  // missing: finish() reports it
    if (first.empty()) {
      weights = read.matrix.scheme;
      input = read.input;
      first = fmt::format("{} ({})", place.module, read.label);
      return;
    }
    MOEKIT_CHECK_AS(kUnsupported, weights == read.matrix.scheme && input == read.input,
                    "matrices of one role must share one scheme: {} differs from {} ({})", first,
                    place.module, read.label);
  }

  void read_experts(const ExpertLayout& layout) {
    check_coverage(layout);
    MoeConfig& c = layer_.config;
    std::string first_up;
    std::string first_down;
    layer_.experts.resize(static_cast<size_t>(c.num_experts));
    for (int64_t e = 0; e < c.num_experts; ++e) {
      StoredExpert& expert = layer_.experts[static_cast<size_t>(e)];
      if (c.activation.gated) {
        const std::string_view name = layout.fused ? layout.up : layout.gate;
        const MatrixPlace place = expert_place(layout, name, e, false, 0);
        const ReadMatrix gate = block_.matrix(place);
        note(place, gate, c.gate_up_weights, c.gate_up_input, first_up);
        expert.gate = gate.matrix;
        if (c.has_gate_up_bias) expert.gate_bias = block_.bias(place);
      }
      const MatrixPlace up_place = expert_place(layout, layout.up, e, false, 1);
      const ReadMatrix up = block_.matrix(up_place);
      note(up_place, up, c.gate_up_weights, c.gate_up_input, first_up);
      expert.up = up.matrix;
      if (c.has_gate_up_bias) expert.up_bias = block_.bias(up_place);

      const MatrixPlace down_place = expert_place(layout, layout.down, e, true, 0);
      const ReadMatrix down = block_.matrix(down_place);
      note(down_place, down, c.down_weights, c.down_input, first_down);
      expert.down = down.matrix;
      if (c.has_down_bias) expert.down_bias = block_.bias(down_place);
    }
  }

  void read_router() {
    MoeConfig& c = layer_.config;
    CanonicalRouter& router = layer_.router;
    router.weight = block_.plain(family_.router_weight, c.num_experts, c.hidden);
    if (c.router.has_logit_bias)
      router.logit_bias = block_.vector(family_.logit_bias, c.num_experts);
    if (c.router.has_selection_bias) {
      router.selection_bias = block_.vector(family_.selection_bias, c.num_experts);
    }
    if (c.router.hash_routing) {
      MOEKIT_CHECK_AS(kCorrupt, model_.vocabulary > 0,
                      "config.json: expected vocab_size, the number of rows of the routing table");
      router.hash_table =
          block_.table(family_.hash_table, model_.vocabulary, c.top_k, c.num_experts);
      router.hash_rows = model_.vocabulary;
    }
  }

  void read_shared() {
    MoeConfig& c = layer_.config;
    SharedSpec& shared = c.shared;
    if (shared.inter == 0) return;
    const ExpertLayout& layout = *family_.shared_layout;
    std::string first_up;
    std::string first_down;
    if (c.activation.gated) {
      const MatrixPlace place = shared_place(layout.gate, shared.inter, c.hidden);
      const ReadMatrix gate = block_.matrix(place);
      note(place, gate, shared.gate_up_weights, shared.gate_up_input, first_up);
      layer_.shared.gate = gate.matrix;
    }
    const MatrixPlace up_place = shared_place(layout.up, shared.inter, c.hidden);
    const ReadMatrix up = block_.matrix(up_place);
    note(up_place, up, shared.gate_up_weights, shared.gate_up_input, first_up);
    layer_.shared.up = up.matrix;
    const MatrixPlace down_place = shared_place(layout.down, c.hidden, shared.inter);
    const ReadMatrix down = block_.matrix(down_place);
    note(down_place, down, shared.down_weights, shared.down_input, first_down);
    layer_.shared.down = down.matrix;
    if (shared.sigmoid_gate) layer_.shared_gate = block_.dense(family_.shared_gate, 1, c.hidden);
  }

  void read_latent() {
    const MoeConfig& c = layer_.config;
    if (c.latent == 0) return;
    layer_.latent_in = block_.dense(family_.latent_in, c.latent, c.hidden);
    layer_.latent_out = block_.dense(family_.latent_out, c.hidden, c.latent);
  }

  const Model& model_;
  const Family& family_;
  const QuantConfig& quant_;
  BlockReader& block_;
  CanonicalLayer& layer_;
};

}  // namespace

Checkpoint::Checkpoint(const std::string& directory)
    : files_(directory),
      model_(read_model(files_.config())),
      quant_(QuantConfig::read(files_.config(), text_config(files_.config(), *model_.family),
                               files_.quantization_file())) {}

Checkpoint::LoadedLayer Checkpoint::load(int layer, bool read_values) {
  LoadedLayer loaded;
  const std::string prefix = model_.block(layer);
  const std::vector<Tensor> tensors = files_.with_prefix(prefix);
  MOEKIT_CHECK_AS(kCorrupt, !tensors.empty(),
                  "{}: config.json makes layer {} a MoE layer, but no tensor is named {}*",
                  files_.directory(), layer, prefix);
  auto owned = std::make_shared<OwnedData>();
  loaded.canonical = std::make_shared<CanonicalLayer>();
  CanonicalLayer& canonical = *loaded.canonical;
  canonical.config = model_.config_of(layer);
  canonical.family = model_.model_type;
  canonical.layer = layer;
  canonical.keep_alive = owned;
  BlockReader block(prefix, tensors, quant_, read_values, *owned);
  loaded.layout = LayerBuilder(model_, quant_, block, canonical).build();
  loaded.bytes = block.bytes();
  return loaded;
}

}  // namespace moekit::checkpoint
