// One MoE layer of a checkpoint, first on one rank, then expert-parallel over two ranks that are
// threads of this process. The sum over experts is made in slot order, so both give the same bits.
//   cpp_layer MODEL_DIR [LAYER]
#include <moekit/moekit.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kTokens = 12;

std::vector<float> some_hidden_states(int64_t hidden) {
  std::vector<float> x(static_cast<size_t>(kTokens * hidden));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.37f * static_cast<float>(i));
  return x;
}

// Tokens [first, first + count) of `x` through a layer opened with `options`.
void run_layer(const std::string& model, int index, moekit::PlanOptions options, float* x, float* y,
               int64_t first, int64_t count) {
  options.max_tokens = kTokens;
  const moekit::Layer layer = moekit::Layer::open(model, index, options);
  const int64_t hidden = layer.config().hidden;
  moekit::LayerArgs args;
  args.hidden =
      moekit::TensorView::contiguous(x + first * hidden, moekit::DType::f32, {count, hidden});
  args.output =
      moekit::TensorView::contiguous(y + first * hidden, moekit::DType::f32, {count, hidden});
  layer.run(args);
}

int run_example(const std::string& model, int index) {
  moekit::PlanOptions options;
  options.max_tokens = kTokens;
  const moekit::Layer layer = moekit::Layer::open(model, index, options);
  const moekit::MoeConfig& config = layer.config();
  std::printf("E=%lld k=%lld H=%lld I=%lld, weights %s, back-end %s\n",
              static_cast<long long>(config.num_experts), static_cast<long long>(config.top_k),
              static_cast<long long>(config.hidden), static_cast<long long>(config.inter),
              to_string(config.gate_up_weights.format), layer.explanation().plan.backend.c_str());

  std::vector<float> x = some_hidden_states(config.hidden);
  std::vector<float> alone(x.size()), together(x.size());
  run_layer(model, index, {}, x.data(), alone.data(), 0, kTokens);

  // Each rank holds half of the experts and brings half of the tokens. Opening and running are
  // collective, so each rank has a thread of its own.
  const std::vector<moekit::CommunicatorHandle> ranks = moekit::make_thread_ranks(2);
  std::vector<std::exception_ptr> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        moekit::PlanOptions mine;
        mine.comm = ranks[r];
        run_layer(model, index, mine, x.data(), together.data(),
                  static_cast<int64_t>(r) * kTokens / 2, kTokens / 2);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }

  double squares = 0;
  for (float v : alone) squares += static_cast<double>(v) * v;
  std::printf("rms of the output %.6f\n", std::sqrt(squares / static_cast<double>(alone.size())));
  const bool same = std::memcmp(alone.data(), together.data(), alone.size() * sizeof(float)) == 0;
  std::printf("two ranks give %s bits as one\n", same ? "the same" : "OTHER");
  return same ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s MODEL_DIR [LAYER]\n", argv[0]);
    return 2;
  }
  try {
    return run_example(argv[1], argc > 2 ? std::atoi(argv[2]) : -1);
  } catch (const moekit::Error& e) {
    std::fprintf(stderr, "%s: %s\n", to_string(e.code()), e.what());
    return EXIT_FAILURE;
  }
}
