// Microbatches: one call's rows in several parts, so that the exchange of one part is in flight
// while another part's experts run.
#pragma once

#include <memory>
#include <vector>

#include "moekit/layer.h"

namespace moekit::api {

/// A layer's call in `count` parts over as many workspaces. Rows are independent, so the output has
/// the bits of one call. Not thread-safe; the layer outlives it.
class Microbatches {
 public:
  static constexpr int kMost = 8;

  /// 1 <= count <= kMost; every rank uses the same count. Throws invalid_argument.
  Microbatches(const Layer& layer, int count);

  /// dispatch of every part, experts of every part, combine of every part, each in turn.
  /// Parts differ by at most one row; a part may be empty. hidden is not quantized. No allocation.
  void run(const LayerArgs& args);

  int count() const { return static_cast<int>(workspaces_.size()); }

 private:
  LayerArgs part_of(const LayerArgs& args, int part);

  const Layer& layer_;
  std::vector<std::unique_ptr<Workspace>> workspaces_;  // the first is null: the layer's own
  std::vector<int64_t> dropped_;
};

}  // namespace moekit::api
