// Which layer and which rows: the flags that run and check share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "moekit/tools.h"

namespace moekit::cli {

/// Tensors that a verb feeds to a layer, with their memory.
struct Inputs {
  OwnedTensor hidden, token_ids, topk_ids, topk_weights;
  int64_t num_tokens() const { return hidden.view.shape[0]; }
  RankedInputs views() const {
    return {hidden.view, token_ids.view, topk_ids.view, topk_weights.view};
  }
};

/// --tokens and its relatives.
struct InputFlags {
  std::string tokens, token_ids, topk_ids, topk_weights;
  int64_t random = 16;

  void add_to(CLI::App& verb);
  /// Reads or makes what the layer needs. Throws invalid_argument for what does not fit.
  Inputs load(const LayerSource& source, uint64_t seed) const;
};

/// --layer, where -1 (not given) is the first MoE layer.
void add_layer_flag(CLI::App& verb, int& layer);

}  // namespace moekit::cli
