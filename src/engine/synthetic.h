// Synthetic layers and inputs for benches, combos and tests: made directly in the asked number
// format, the same on every machine and for every thread count.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "problem/canonical_layer.h"
#include "problem/spec.h"
#include "quant/weight_codec.h"

namespace moekit::engine {

struct SyntheticOptions {
  /// Experts differ in magnitude by up to 16x, so that an expert's weights or scales used for
  /// another's show in the result.
  bool unlike_experts = false;
  /// Router weights and their biases; without them only precomputed ids can be used.
  bool router = true;
};

/// A layer with random weights of about unit gain in the spec's formats, biases, shared experts,
/// latent projections and router included. Codes are drawn directly (bell-shaped), scales differ
/// between neighbouring groups. Memory: the stored bytes, one block. Throws out_of_memory,
/// invalid_argument.
std::shared_ptr<const CanonicalLayer> make_synthetic_layer(const ProblemSpec& spec, uint64_t seed,
                                                           ThreadPool& threads,
                                                           const SyntheticOptions& options = {});

/// How such a layer stores a matrix: integer scales in half precision, as the tools that write them
/// do.
quant::EncodeOptions synthetic_encoding(const WeightScheme& scheme, const ActivationScheme& input);

/// Bytes of the routed experts' weights as make_synthetic_layer stores them.
int64_t synthetic_expert_bytes(const MoeConfig& config);

/// Hidden rows [num_tokens, hidden] of unit variance, every value a bf16 value. `first_token` lets
/// ranks make their shares of one batch.
std::vector<float> make_hidden(int64_t num_tokens, int64_t hidden, uint64_t seed,
                               int64_t first_token = 0);

/// [num_tokens, top_k]: distinct ids a row (except with `holes`), weights descending with sum 1.
struct SyntheticRouting {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

/// Routing of tokens [first_token, first_token + num_tokens). `first_rank` lists the experts of
/// rank 0, for one_rank; other patterns ignore it.
SyntheticRouting make_routing(const RoutingPattern& pattern, int64_t num_tokens,
                              int64_t num_experts, int64_t top_k, uint64_t seed,
                              std::span<const int32_t> first_rank = {}, int64_t first_token = 0);

}  // namespace moekit::engine
