#include "faults/rank_run.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/synthetic.h"
#include "moekit/layer.h"
#include "support/run_layer.h"

namespace moekit::faults {
namespace {

constexpr const char* kSpec = "E=6,k=3,H=32,I=16,weights=f32,activations=f32,tokens=4,shared_I=16";
constexpr int64_t kMaxTokens = 8;

const LayerSource& source() {
  static const LayerSource layer = test::make_layer(kSpec);
  return layer;
}

PlanOptions options_of(const std::string& prepare) {
  PlanOptions options = test::options_for("", 1);
  options.prepare = prepare;
  options.max_tokens = kMaxTokens;
  return options;
}

}  // namespace

/// Rows of one rank in one call: like no other rank's or call's.
struct RankRun::Batch {
  int64_t tokens = 0;
  int64_t hidden = 0;
  std::vector<float> rows, output;

  Batch(int rank, int64_t call) {
    hidden = source().config.hidden;
    tokens = (rank * 5 + call * 3 + 2) % (kMaxTokens + 1);
    rows = engine::make_hidden(tokens, hidden, static_cast<uint64_t>(1000 * (call + 1) + rank));
    output.assign(static_cast<size_t>(tokens * hidden + 1),
                  std::numeric_limits<float>::quiet_NaN());
  }
  LayerArgs args() {
    LayerArgs a;
    a.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, hidden});
    a.output = TensorView::contiguous(output.data(), DType::f32, {tokens, hidden});
    return a;
  }
};

const Expected& RankRun::expected_outputs(int ranks, int64_t calls) {
  static const Layer alone = Layer::from_canonical(source().canonical, options_of(""));
  static Expected all;
  for (int rank = 0; rank < ranks; ++rank) {
    for (int64_t call = 0; call < calls; ++call) {
      if (all.count({rank, call}) > 0) continue;
      Batch batch(rank, call);
      alone.run(batch.args());
      all[{rank, call}] = batch.output;
    }
  }
  return all;
}

RankOutcome RankRun::run(const MakeEnd& make_end) {
  try {
    run_calls(make_end());
  } catch (const Left&) {
    outcome_.gone = true;
  } catch (const Error& error) {
    outcome_.code = error.code();
    outcome_.error = error.what();
  } catch (const std::exception& error) {
    outcome_.code = ErrorCode::internal;
    outcome_.error = error.what();
  }
  meeting_.leave();
  return outcome_;
}

void RankRun::run_calls(std::shared_ptr<comm::Communicator> end) {
  PlanOptions options = options_of(world_.prepare);
  options.comm = {script_.wrap(std::move(end))};
  if (world_.another_plan && faulty()) options.combine_dtype = DType::bf16;
  meeting_.arrive_and_wait();  // all ranks are there
  const Layer layer = Layer::from_canonical(source().canonical, options);
  for (int64_t call = 0; call < world_.calls; ++call) {
    const auto& left_out = world_.left_out;
    if (faulty() && std::count(left_out.begin(), left_out.end(), call) > 0) continue;
    Batch batch(rank_, call);
    try {
      enter(call, 0);
      PendingCall pending = layer.dispatch(batch.args());
      enter(call, 1);
      pending.experts();
      enter(call, 2);
      pending.combine();
    } catch (...) {
      compare_rows(batch, call, true);
      throw;
    }
    compare_rows(batch, call, false);
    ++outcome_.finished;
  }
}

void RankRun::enter(int64_t call, int step) {
  const bool meets = world_.meets_at_steps && world_.left_out.empty();
  if (meets && script_.ahead(call, step)) meeting_.arrive_and_wait();
  script_.enter(rank_, call, step);
}

/// Every row is right; after an error a row may also be untouched.
void RankRun::compare_rows(const Batch& batch, int64_t call, bool failed) {
  const float* expected = expected_.at({rank_, call}).data();
  for (int64_t t = 0; t < batch.tokens; ++t) {
    const float* row = batch.output.data() + t * batch.hidden;
    const bool right = std::equal(row, row + batch.hidden, expected + t * batch.hidden);
    const bool untouched =
        std::all_of(row, row + batch.hidden, [](float x) { return std::isnan(x); });
    if (right || (failed && untouched) || !outcome_.wrong_row.empty()) continue;
    outcome_.wrong_row = "rank " + std::to_string(rank_) + ", call " + std::to_string(call) +
                         ", token " + std::to_string(t) + " got another row";
  }
}

}  // namespace moekit::faults
