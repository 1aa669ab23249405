// Layers of one group on threads, for tests of what changes under them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "moekit/layer.h"
#include "moekit/placement.h"
#include "problem/canonical_layer.h"
#include "support/run_layer.h"

namespace moekit::test {

/// body(rank) on a thread a rank; what each threw, or empty.
inline std::vector<std::string> on_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& e) {
        errors[r] = e.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

inline void expect_none(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// Layers on threads, and a batch that they share.
struct Group {
  LayerSource source;
  std::vector<std::shared_ptr<CanonicalLayer>> canonical;  // one a rank, changed by tests
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<float> rows, output;
  int64_t tokens = 0;

  Group(const std::string& spec, int ranks, PlanOptions options, int64_t num_tokens = 7)
      : source(make_layer(spec)), tokens(num_tokens) {
    rows = make_rows(source, tokens * ranks);
    output.resize(rows.size());
    canonical.resize(static_cast<size_t>(ranks));
    layers.resize(static_cast<size_t>(ranks));
    for (auto& mine : canonical) mine = std::make_shared<CanonicalLayer>(*source.canonical);
    options.max_tokens = tokens;
    open(options);
  }
  void open(PlanOptions options) {
    const auto ends = make_thread_ranks(static_cast<int>(layers.size()));
    expect_none(on_ranks(size(), [&](int r) {
      PlanOptions mine = options;
      mine.comm = ends[r];
      layers[r] = std::make_unique<Layer>(Layer::from_canonical(canonical[r], mine));
    }));
  }
  int size() const { return static_cast<int>(layers.size()); }
  LayerArgs args(int r) {
    const int64_t hidden = source.config.hidden;
    LayerArgs a;
    a.hidden =
        TensorView::contiguous(rows.data() + r * tokens * hidden, DType::f32, {tokens, hidden});
    a.output =
        TensorView::contiguous(output.data() + r * tokens * hidden, DType::f32, {tokens, hidden});
    return a;
  }
  void run() {
    std::fill(output.begin(), output.end(), std::numeric_limits<float>::quiet_NaN());
    expect_none(on_ranks(size(), [&](int r) { layers[r]->run(args(r)); }));
  }
  /// The same on all ranks.
  std::vector<PlacementChange> change(const Placement& placement) {
    std::vector<PlacementChange> changes(layers.size());
    expect_none(on_ranks(size(), [&](int r) { changes[r] = layers[r]->set_placement(placement); }));
    return changes;
  }
  /// Every rank throws an error with `words`, and nothing has changed.
  void expect_refused(const std::function<Placement(int)>& wanted, const std::string& words) {
    const Placement before = layers[0]->placement();
    const auto errors = on_ranks(size(), [&](int r) { layers[r]->set_placement(wanted(r)); });
    for (int r = 0; r < size(); ++r) {
      EXPECT_NE(errors[r].find(words), std::string::npos) << "rank " << r << ": " << errors[r];
      EXPECT_NE(errors[r].find("the old placement stays in force"), std::string::npos) << errors[r];
      EXPECT_EQ(layers[r]->placement(), before);
    }
  }
};

inline PlanOptions changeable(int64_t slots, const std::string& prepare = "") {
  PlanOptions options = options_for("", 1);
  options.prepare = prepare;
  options.slots_per_rank = slots;
  return options;
}

}  // namespace moekit::test
