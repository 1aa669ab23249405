// Joins config, family table, quantization and tensors into one MoE layer.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/families.h"
#include "checkpoint/model_files.h"
#include "checkpoint/quant_config.h"
#include "problem/canonical_layer.h"

namespace moekit::checkpoint {

/// A checkpoint directory, understood. Not thread-safe (files are opened on demand).
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& directory);

  const Model& model() const { return model_; }
  const QuantConfig& quant() const { return quant_; }
  ModelFiles& files() { return files_; }

  struct LoadedLayer {
    std::shared_ptr<CanonicalLayer> canonical;
    const ExpertLayout* layout = nullptr;
    int64_t bytes = 0;
  };
  /// Views of a MoE layer. With `read_values` false only headers are read: the layer's config is
  /// whole, its scalars are not.
  LoadedLayer load(int layer, bool read_values);

 private:
  ModelFiles files_;
  Model model_;
  QuantConfig quant_;
};

}  // namespace moekit::checkpoint
