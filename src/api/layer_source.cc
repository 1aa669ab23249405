// LayerSource: a checkpoint's layer and its names.
#include "base/check.h"
#include "moekit/tools.h"
#include "problem/canonical_layer.h"

namespace moekit {

LayerSource open_source(const std::string& model_dir, int layer) {
  LayerSource source;
  source.canonical = load_canonical(model_dir, layer);
  source.config = source.canonical->config;
  source.model = model_dir;
  source.family = source.canonical->family;
  source.layer = source.canonical->layer;
  source.hash_rows = source.canonical->router.hash_rows;
  return source;
}

}  // namespace moekit
