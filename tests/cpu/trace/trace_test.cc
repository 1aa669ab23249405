// Spans: what is recorded, what is not, and what the file says of it.
#include "moekit/trace.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "moekit/error.h"
#include "moekit/tools.h"
#include "support/run_layer.h"
#include "trace/parallel.h"
#include "trace/span.h"

namespace moekit::test {
namespace {

using nlohmann::json;
using trace::Context;
using trace::Recorder;
using trace::Span;
using trace::Stage;

Context context_of(Recorder& recorder, int rank = 0, int threads = 1) {
  Context context;
  context.recorder = &recorder;
  context.rings = recorder.add_rank(rank, threads);
  return context;
}

TEST(Recorder, TakesNothingWhileItIsOff) {
  Recorder recorder(8);
  const Context context = context_of(recorder);
  {
    const trace::Attach attach(context);
    EXPECT_EQ(trace::current(), nullptr);
    const Span span(Stage::route);
    EXPECT_FALSE(span.on());
  }
  EXPECT_EQ(context.rings->threads[0]->size(), 0);
}

TEST(Recorder, OneThatIsOnDoesNotTurnAnotherOn) {
  Recorder on(8), off(8);
  const Context quiet = context_of(off);
  on.start();
  {
    const trace::Attach attach(quiet);
    const Span span(Stage::route);
    EXPECT_FALSE(span.on());
  }
  EXPECT_EQ(quiet.rings->threads[0]->size(), 0);
}

TEST(Recorder, KeepsTheLastSpansOfAFullRing) {
  Recorder recorder(3);  // rounded up to 4
  Context context = context_of(recorder);
  recorder.start();
  for (context.call = 0; context.call < 10; ++context.call) {
    const trace::Attach attach(context);
    const Span span(Stage::route);
  }
  recorder.stop();
  const std::vector<trace::Event> events = context.rings->threads[0]->events();
  ASSERT_EQ(events.size(), 4u);
  for (size_t i = 0; i < events.size(); ++i) EXPECT_EQ(events[i].call, 6 + static_cast<int>(i));
  EXPECT_EQ(recorder.lost(), 6);
  recorder.start();
  EXPECT_EQ(context.rings->threads[0]->size(), 0) << "a start forgets what was there";
}

TEST(Span, NotesGoToTheInnermost) {
  Recorder recorder(8);
  const Context context = context_of(recorder);
  recorder.start();
  {
    const trace::Attach attach(context);
    const Span outer(Stage::dispatch);
    {
      const Span inner(Stage::copy);
      trace::note_moved(5, 1, 2);
    }
    trace::note_moved(30, 2, 3);
    trace::note_moved(40, 2, 4);
  }
  trace::note_moved(1000, 1000, 1000);  // nobody listens
  recorder.stop();
  const std::vector<trace::Event> events = context.rings->threads[0]->events();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].stage, Stage::copy);
  EXPECT_EQ(events[0].facts.bytes, 5);
  EXPECT_EQ(events[1].facts.bytes, 70);
  EXPECT_EQ(events[1].facts.own_bytes, 4);
  EXPECT_EQ(events[1].facts.rows, 7);
  EXPECT_LE(events[1].begin_ns, events[0].begin_ns);
  EXPECT_GE(events[1].end_ns, events[0].end_ns);
}

TEST(Span, ThreadsOfAPoolHaveTracksOfTheirOwn) {
  Recorder recorder(64);
  const Context context = context_of(recorder, 0, 3);
  recorder.start();
  ThreadPool pool(3);
  std::atomic<int> ran{0};
  std::atomic<int> seen{0};
  {
    const trace::Attach attach(context);
    // A worker that sleeps longer than the job takes no part in it: tasks wait for all three.
    auto body = [&](int64_t, int thread) {
      ran.fetch_add(1);
      seen.fetch_or(1 << thread);
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
      while (seen.load() != 7 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
    };
    trace::parallel_for(Stage::gemm1, pool, 12, body);
  }
  EXPECT_EQ(ran.load(), 12);
  EXPECT_EQ(seen.load(), 7);
  for (const auto& ring : context.rings->threads) {
    ASSERT_EQ(ring->size(), 1);
    EXPECT_EQ(ring->events()[0].stage, Stage::gemm1);
  }
}

TEST(Span, MoreThreadsThanTracksAreNoFault) {
  Recorder recorder(64);
  const Context context = context_of(recorder, 0, 1);
  recorder.start();
  { const Span span(Stage::gemm1, &context, 7); }
  EXPECT_EQ(context.rings->threads[0]->size(), 1);
}

TEST(Chrome, WindowsAreAsynchronousPairs) {
  Recorder recorder(8);
  Context context = context_of(recorder, 3);
  context.workspace = 1;
  context.call = 9;
  recorder.start();
  trace::Window window;
  window.open(context);
  window.close(context, Stage::rows_in_flight);
  window.close(context, Stage::rows_in_flight);  // closed already: nothing
  recorder.stop();
  const json file = json::parse(trace::to_chrome_json(recorder));
  std::map<std::string, json> by_phase;
  for (const json& event : file["traceEvents"]) by_phase[event["ph"]] = event;
  EXPECT_EQ(file["traceEvents"].size(), 4u);  // two names, a begin, an end
  EXPECT_EQ(by_phase["b"]["id"], by_phase["e"]["id"]);
  EXPECT_EQ(by_phase["b"]["pid"], 3);
  EXPECT_LE(by_phase["b"]["ts"].get<double>(), by_phase["e"]["ts"].get<double>());
  EXPECT_EQ(by_phase["b"]["args"]["call"], 9);
  EXPECT_EQ(by_phase["b"]["args"]["microbatch"], 1);
}

TEST(Chrome, ARecorderWithoutRanksIsAFileToo) {
  const Recorder recorder(1);
  EXPECT_TRUE(json::parse(trace::to_chrome_json(recorder))["traceEvents"].empty());
}

struct Traced {
  Trace trace{256};
  std::vector<float> output;
  RankedOutputs outputs;
};

Traced run_traced(const std::string& spec, int num_ranks, int microbatches, int64_t tokens) {
  Traced traced;
  const LayerSource layer = make_layer(spec);
  const std::vector<float> rows = make_rows(layer, tokens);
  PlanOptions options = options_for("", 2);
  options.trace = traced.trace;
  const RankedLayer ranks(layer, options, num_ranks, tokens);
  RankedInputs inputs;
  inputs.hidden = TensorView::contiguous(rows.data(), DType::f32, {tokens, layer.config.hidden});
  traced.trace.start();
  ranks.run(inputs, traced.outputs, RunOptions{.repeat = 2, .microbatches = microbatches});
  traced.trace.stop();
  return traced;
}

constexpr const char* kLayer = "E=8,k=3,H=128,I=64,shared_I=64@gate,latent=64";

std::map<std::string, StageTime> stages_of(const Trace& trace) {
  std::map<std::string, StageTime> stages;
  for (StageTime& time : trace.summary()) stages[time.stage] = time;
  return stages;
}

TEST(TraceOfALayer, HasEveryStageOfEveryRank) {
  const Traced traced = run_traced(kLayer, 2, 1, 9);
  const auto stages = stages_of(traced.trace);
  for (const char* name :
       {"route", "latent in", "dispatch send", "dispatch receive", "experts", "gemm1", "gemm2",
        "combine send", "shared experts", "shared gemm1", "shared gemm2", "combine receive",
        "latent out", "output", "wait", "copy rows", "rows in flight", "results in flight"}) {
    ASSERT_TRUE(stages.count(name)) << name;
    EXPECT_GE(stages.at(name).spans, 2 * 2) << name;  // ranks x calls
    EXPECT_GT(stages.at(name).total_us, 0) << name;
    EXPECT_GE(stages.at(name).max_us * 2, stages.at(name).total_us) << name;
  }
  double share = 0;
  for (const auto& [name, time] : stages) share += time.nested || time.window ? 0 : time.share;
  EXPECT_NEAR(share, 1.0, 1e-9);
  EXPECT_EQ(traced.trace.lost(), 0);
  // 9 tokens on each of their ranks at most, as bf16 or wider; slot rows of f32 on the way back.
  const StageTime& back = stages.at("combine send");
  EXPECT_EQ(back.rows, 2 * 9 * 3);
  EXPECT_EQ(back.bytes + back.own_bytes, 2 * 9 * 3 * 64 * 4);
  EXPECT_GT(stages.at("dispatch send").bytes, 0);
}

TEST(TraceOfALayer, OneRankHasNoExchange) {
  const auto stages = stages_of(run_traced(kLayer, 1, 1, 5).trace);
  EXPECT_FALSE(stages.count("rows in flight"));
  EXPECT_FALSE(stages.count("copy rows"));
  EXPECT_EQ(stages.at("experts").rows, 2 * 5 * 3);
}

TEST(Microbatches, NeverChangeBits) {
  for (int64_t tokens : {0, 1, 2, 9, 14}) {
    const Traced whole = run_traced(kLayer, 3, 1, tokens);
    for (int parts : {2, 3}) {
      const Traced split = run_traced(kLayer, 3, parts, tokens);
      EXPECT_EQ(split.outputs.output, whole.outputs.output) << tokens << " in " << parts;
      EXPECT_EQ(split.outputs.topk_ids, whole.outputs.topk_ids);
      EXPECT_EQ(split.outputs.router_logits, whole.outputs.router_logits);
    }
  }
}

TEST(Microbatches, ACountOutOfRangeIsRefused) {
  EXPECT_THROW(run_traced(kLayer, 1, 0, 3), Error);
  EXPECT_THROW(run_traced(kLayer, 2, 9, 3), Error);
}

TEST(TraceOfALayer, AnEmptyTraceSaysSo) {
  const Trace none;
  EXPECT_TRUE(none.empty());
  EXPECT_THROW(none.summary(), Error);
  EXPECT_THROW(Trace(0), Error);
}

}  // namespace
}  // namespace moekit::test
