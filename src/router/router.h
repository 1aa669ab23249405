// Router: logits -> top-k ids and weights, in fp32.
//
// A row goes through four steps: scores s = scoring(l); selection values c = (s or l) + selection
// bias; the top k experts by c, perhaps inside the best groups only; weights of those experts,
// renormalised over the k, times the scaling factor. The selection bias never reaches a weight.
//
// Order. Selection takes the higher value, then the lower id. Output columns are sorted by
// descending final weight, then by lower id.
//
// NaN and infinity. Ids are always distinct and in range, whatever the logits are (the rows of a
// hash table are taken as they are).
//   - A NaN selection value (NaN logit or NaN bias) ranks below -infinity: such an expert is
//     chosen only when the candidates run out. Its weight is then NaN and sorts last; a
//     renormalisation over the chosen experts makes the whole row NaN, as it should.
//   - Softmax: NaN logits take no part, the other experts share the mass among themselves. +inf
//     logits share the mass equally; so do all experts of a row that is -inf throughout. Rows of
//     finite logits are never affected by these rules.
//   - Sigmoid maps +-inf to 1 and 0. sqrt_softplus maps +inf to +inf, whose renormalised weight is
//     NaN.
//   - Groups: a group's score leaves its NaN experts out (max, or the sum of the best two of the
//     rest); a group of NaNs only ranks last. Experts of dropped groups are never chosen.
//   - Every NaN weight is the same quiet NaN, so that results can be compared bit for bit.
//   - nan_rows counts the rows with a NaN logit, for callers that report them.
// Sums over zero: Renormalize::sum and max_sum with epsilon > 0 give zero weights where every
// score underflows; with epsilon 0, and in p_norm, 0 / 0 is NaN.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/thread_pool.h"
#include "moekit/config.h"
#include "problem/canonical_layer.h"
#include "problem/expert_id.h"

namespace moekit::router {

struct Args {
  const RouterSpec* spec = nullptr;
  int64_t num_tokens = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  const float* logits = nullptr;          ///< [T, E], logit bias included
  const float* selection_bias = nullptr;  ///< [E] or null
  const int64_t* token_ids = nullptr;     ///< [T], hash routing only
  const int64_t* hash_table = nullptr;    ///< [hash_rows, top_k]
  int64_t hash_rows = 0;
  GlobalExpert* ids = nullptr;  ///< [T, top_k] out, by descending weight, then lower id
  float* weights = nullptr;     ///< [T, top_k] out
  int64_t* nan_rows = nullptr;  ///< out, may be null: rows that held a NaN logit
  std::byte* workspace = nullptr;
  ThreadPool* threads = nullptr;
};

/// Throws invalid_argument, with the figures, when a recipe can't work: k > E, groups that do not
/// divide E, k above the kept groups' experts, hash routing with groups, parameters that are not
/// finite. Meant for plan time; run() relies on it.
void validate(const RouterSpec& spec, int64_t num_experts, int64_t top_k);

class Router {
 public:
  virtual ~Router() = default;
  virtual std::string_view name() const = 0;
  /// Bytes of Args::workspace, which is aligned to 64 bytes. num_threads is the pool's, 1 without.
  virtual int64_t workspace_bytes(const RouterSpec& spec, int64_t num_experts, int64_t top_k,
                                  int num_threads) const = 0;
  /// Never allocates, but for the text of an error. Throws invalid_argument for a token id outside
  /// the hash table, an expert id in the table outside [0, E), and a missing pointer. threads may
  /// be null.
  virtual void run(const Args& args) const = 0;
};

/// Ordered registry: cpu, then ref. Both give the same ids and the same bits of the weights: they
/// share the scalar arithmetic (router/scoring.h) and the order of every sum.
std::span<const Router* const> registry();

}  // namespace moekit::router
