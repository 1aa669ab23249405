#include "api/microbatches.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "base/check.h"

namespace moekit::api {
namespace {

/// Rows [first, first + count) of a view; an absent tensor stays absent.
TensorView rows_of(const TensorView& whole, int64_t first, int64_t count) {
  if (whole.empty()) return {};
  TensorView part = whole;
  part.shape[0] = count;
  part.data = static_cast<char*>(whole.data) + first * whole.strides[0] * bytes_of(whole.dtype);
  return part;
}

}  // namespace

Microbatches::Microbatches(const Layer& layer, int count) : layer_(layer) {
  MOEKIT_CHECK(count >= 1 && count <= kMost, "microbatches: expected 1 to {}, got {}", kMost,
               count);
  workspaces_.resize(static_cast<size_t>(count));
  for (size_t i = 1; i < workspaces_.size(); ++i) workspaces_[i] = layer.make_workspace();
  dropped_.resize(workspaces_.size());
}

LayerArgs Microbatches::part_of(const LayerArgs& args, int part) {
  const int64_t total = args.hidden.shape[0];
  const int64_t base = total / count(), extra = total % count();
  const int64_t first = part * base + std::min<int64_t>(part, extra);
  const int64_t rows = base + (part < extra ? 1 : 0);
  LayerArgs mine = args;
  for (TensorView LayerArgs::*tensor :
       {&LayerArgs::hidden, &LayerArgs::router_input, &LayerArgs::topk_ids,
        &LayerArgs::topk_weights, &LayerArgs::token_ids, &LayerArgs::output,
        &LayerArgs::out_topk_ids, &LayerArgs::out_topk_weights, &LayerArgs::out_router_logits,
        &LayerArgs::out_routed}) {
    mine.*tensor = rows_of(args.*tensor, first, rows);
  }
  mine.out_dropped = &dropped_[static_cast<size_t>(part)];
  return mine;
}

void Microbatches::run(const LayerArgs& args) {
  if (count() == 1) return layer_.run(args);
  MOEKIT_CHECK(args.hidden_scales.empty() && args.hidden_global.empty(),
               "microbatches split real rows only; pass hidden as f32, bf16 or f16");
  std::array<std::optional<PendingCall>, kMost> calls;
  std::fill(dropped_.begin(), dropped_.end(), 0);
  for (int i = 0; i < count(); ++i) {
    calls[i].emplace(layer_.dispatch(part_of(args, i), nullptr, workspaces_[i].get()));
  }
  for (int i = 0; i < count(); ++i) calls[i]->experts();
  for (int i = 0; i < count(); ++i) calls[i]->combine();
  if (args.out_dropped != nullptr) {
    *args.out_dropped = std::accumulate(dropped_.begin(), dropped_.end(), int64_t{0});
  }
}

}  // namespace moekit::api
