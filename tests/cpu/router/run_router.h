// Runs a router over vectors, with everything that it must overwrite poisoned beforehand.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "base/buffer.h"
#include "router/router.h"

namespace moekit::router {

struct Input {
  RouterSpec spec;
  int64_t num_experts = 0;
  int64_t top_k = 0;
  std::vector<float> logits;  ///< [T, E]
  std::vector<float> bias;    ///< [E] or empty
  std::vector<int64_t> token_ids;
  std::vector<int64_t> hash_table;
  int64_t num_tokens() const {
    return num_experts == 0 ? 0 : static_cast<int64_t>(logits.size()) / num_experts;
  }
};

struct Output {
  std::vector<int32_t> ids;
  std::vector<float> weights;
  int64_t nan_rows = -1;
  /// Bits, so that NaN equals itself and the zeros differ.
  friend bool operator==(const Output& a, const Output& b) {
    return a.ids == b.ids && a.nan_rows == b.nan_rows && a.weights.size() == b.weights.size() &&
           std::memcmp(a.weights.data(), b.weights.data(), a.weights.size() * sizeof(float)) == 0;
  }
};

/// threads == 0: without a pool.
inline Output run(const Router& router, const Input& in, int threads = 1) {
  validate(in.spec, in.num_experts, in.top_k);
  const int64_t bytes =
      router.workspace_bytes(in.spec, in.num_experts, in.top_k, std::max(threads, 1));
  // Guard bytes behind the workspace show a member that takes more than it asked for.
  constexpr int64_t kGuard = 256;
  Buffer workspace(bytes + kGuard);
  std::memset(workspace.data(), 0xff, static_cast<size_t>(workspace.size()));
  std::unique_ptr<ThreadPool> pool;
  if (threads > 0) pool = std::make_unique<ThreadPool>(threads);
  Output out;
  out.ids.assign(in.num_tokens() * in.top_k, -77);
  out.weights.assign(in.num_tokens() * in.top_k, -77.0f);
  Args args;
  args.spec = &in.spec;
  args.num_tokens = in.num_tokens();
  args.num_experts = in.num_experts;
  args.top_k = in.top_k;
  args.logits = in.logits.data();
  args.selection_bias = in.bias.empty() ? nullptr : in.bias.data();
  args.token_ids = in.token_ids.empty() ? nullptr : in.token_ids.data();
  args.hash_table = in.hash_table.empty() ? nullptr : in.hash_table.data();
  args.hash_rows = static_cast<int64_t>(in.hash_table.size()) / in.top_k;
  args.ids = reinterpret_cast<GlobalExpert*>(out.ids.data());
  args.weights = out.weights.data();
  args.nan_rows = &out.nan_rows;
  args.workspace = workspace.data();
  args.threads = pool.get();
  router.run(args);
  for (int64_t i = bytes; i < bytes + kGuard; ++i) {
    if (workspace.data()[i] != std::byte{0xff}) throw std::logic_error("workspace overrun");
  }
  return out;
}

inline const Router& member(std::string_view name) {
  for (const Router* r : registry()) {
    if (r->name() == name) return *r;
  }
  throw std::logic_error("no such router");
}

}  // namespace moekit::router
