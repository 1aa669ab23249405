// CanonicalLayer: a MoE layer as its owner stores it (mapped checkpoint or the caller's tensors).
// Views only; `keep_alive` owns what they point into. Packing reads it, nothing changes it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moekit/config.h"
#include "quant/stored_matrix.h"

namespace moekit {

struct CanonicalRouter {
  StoredMatrix
      weight;  ///< [E, hidden] bf16, f16 or f32; empty when only precomputed ids are ever used
  StoredVector logit_bias;              ///< [E]
  StoredVector selection_bias;          ///< [E]
  const int64_t* hash_table = nullptr;  ///< [hash_rows, top_k] token id -> expert ids
  int64_t hash_rows = 0;
};

struct CanonicalLayer {
  MoeConfig config;
  std::string family;  ///< model_type, or "custom" for tensors in memory
  int layer = -1;      ///< decoder layer number, -1 unknown
  CanonicalRouter router;
  std::vector<StoredExpert>
      experts;          ///< [E], all of them; only touched pages of a mapped file become resident
  StoredExpert shared;  ///< empty matrices when config.shared.inter == 0
  StoredMatrix shared_gate;  ///< [1, hidden] when config.shared.sigmoid_gate
  StoredMatrix latent_in;    ///< [latent, hidden] when config.latent > 0
  StoredMatrix latent_out;   ///< [hidden, latent]
  std::shared_ptr<const void> keep_alive;
};

}  // namespace moekit
