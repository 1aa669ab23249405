// The public functions of moekit/checkpoint.h.
#include "moekit/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "checkpoint/layer_loader.h"

namespace moekit {
namespace {

using checkpoint::Checkpoint;
using checkpoint::ExpertLayout;
using checkpoint::LayerKind;
using checkpoint::safetensors_name;
using checkpoint::Scheme;

std::string moe_layers_text(const checkpoint::Model& model) {
  std::string text;
  int count = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    if (model.layers[i] == LayerKind::dense) continue;
    if (++count > 8) return text + ", ...";
    text += fmt::format("{}{}", text.empty() ? "" : ", ", i);
  }
  return text.empty() ? "none" : text;
}

const char* row_order(const ExpertLayout& layout, bool gated) {
  if (!gated) return "up only";
  if (!layout.fused) return "separate";
  return layout.interleaved ? "interleaved" : "gate_up";
}

void add_conventions(const Checkpoint& source, const Checkpoint::LoadedLayer& loaded,
                     CheckpointInfo& info) {
  const CanonicalLayer& layer = *loaded.canonical;
  auto add = [&](const char* key, std::string value) {
    info.conventions.emplace_back(key, std::move(value));
  };
  const ExpertLayout& layout = *loaded.layout;
  const StoredExpert& expert = layer.experts.front();
  add("expert_layout", std::string(layout.name));
  add("row_order", row_order(layout, layer.config.activation.gated));
  add("orientation", layout.input_first ? "in_out" : "out_in");
  add("router_dtype", safetensors_name(layer.router.weight.codes.unit));
  if (!layer.router.selection_bias.empty()) {
    add("selection_bias_dtype", safetensors_name(layer.router.selection_bias.dtype));
  }
  const WeightFormat format = layer.config.gate_up_weights.format;
  if (format == WeightFormat::nvfp4 || format == WeightFormat::mxfp4) {
    add("fp4_nibbles", "low_first");
  }
  if (format == WeightFormat::nvfp4) {
    add("global_scale", expert.up.global_sense == ScaleSense::divisor ? "divisor" : "multiplier");
  }
  if (!expert.up.scales.empty()) {
    add("scale_dtype", safetensors_name(expert.up.scales.values.unit));
    add("scale", "multiplier");
  }
  if (layer.config.gate_up_input.static_scale) {
    add("input_scale",
        layer.config.gate_up_input.sense == ScaleSense::divisor ? "divisor" : "multiplier");
  }
  if (!expert.up.zeros.empty()) {
    add("zero_point", expert.up.zero_offset == 1 ? "stored minus 1" : "as stored");
  }
  if (const Scheme* scheme = source.quant().main_scheme()) add("scheme", scheme->label);
}

}  // namespace

CheckpointInfo inspect_checkpoint(const std::string& model_dir, bool with_tensors) {
  Checkpoint source(model_dir);
  const checkpoint::Model& model = source.model();
  CheckpointInfo info;
  info.family = model.model_type;
  info.quant_method = source.quant().method_name();
  info.quant_format = source.quant().format();
  info.ignored = source.quant().ignored();
  for (size_t i = 0; i < model.layers.size(); ++i) {
    LayerInfo layer;
    layer.index = static_cast<int>(i);
    layer.moe = model.layers[i] != LayerKind::dense;
    layer.kind = layer.moe ? "moe" : "dense";
    if (layer.moe) {
      const Checkpoint::LoadedLayer loaded = source.load(layer.index, false);
      layer.config = loaded.canonical->config;
      layer.bytes = loaded.bytes;
      if (info.conventions.empty()) add_conventions(source, loaded, info);
    }
    info.layers.push_back(std::move(layer));
  }
  // Opens every shard, so that a damaged one shows even where it holds no expert.
  for (const checkpoint::Tensor& t : source.files().with_prefix("")) {
    if (!with_tensors) break;
    info.tensors.push_back({t.name(), safetensors_name(t.entry->dtype), t.entry->shape,
                            t.file->path().substr(t.file->path().rfind('/') + 1),
                            t.entry->bytes()});
  }
  return info;
}

std::shared_ptr<const CanonicalLayer> load_canonical(const std::string& model_dir, int layer) {
  Checkpoint source(model_dir);
  const std::vector<LayerKind>& kinds = source.model().layers;
  if (layer == -1) {
    const auto first =
        std::ranges::find_if(kinds, [](LayerKind kind) { return kind != LayerKind::dense; });
    MOEKIT_CHECK(first != kinds.end(), "{}: expected a MoE layer, but all {} layers are dense",
                 model_dir, kinds.size());
    layer = static_cast<int>(first - kinds.begin());
  }
  MOEKIT_CHECK(layer >= 0 && layer < static_cast<int>(kinds.size()),
               "{}: expected a layer from 0 to {}, came {} (MoE layers: {})", model_dir,
               static_cast<int>(kinds.size()) - 1, layer, moe_layers_text(source.model()));
  MOEKIT_CHECK(kinds[static_cast<size_t>(layer)] != LayerKind::dense,
               "{}: layer {} is dense; MoE layers: {}", model_dir, layer,
               moe_layers_text(source.model()));
  return source.load(layer, true).canonical;
}

}  // namespace moekit
