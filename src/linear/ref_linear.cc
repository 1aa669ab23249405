// The reference dense layer: what CpuLinear is tested against.
#include <cstring>

#include "linear/cpu_linear.h"
#include "problem/workspace_layout.h"
#include "quant/row_codec.h"
#include "quant/stored_codec.h"

namespace moekit::linear {
namespace {

class RefLinear final : public Linear {
 public:
  std::string_view name() const override { return "ref"; }
  bool supports(const StoredMatrix& weight, const ActivationScheme&) const override {
    return weight.rows > 0 && weight.cols > 0;
  }
  int64_t packed_bytes(const StoredMatrix&) const override { return 0; }
  void pack(const StoredMatrix&, std::byte*, ThreadPool&) const override {}
  int64_t workspace_bytes(const StoredMatrix& weight, const ActivationScheme&, int64_t max_rows,
                          int num_threads) const override {
    return scratch_of(weight, max_rows, num_threads).total();
  }

  void run(const Args& args) const override {
    const StoredMatrix& w = *args.weight;
    auto* rows = reinterpret_cast<float*>(args.workspace);
    WorkspaceLayout layout;
    layout.add(args.num_rows * w.cols, 4);
    auto* weights = reinterpret_cast<float*>(args.workspace + layout.total());
    const int64_t weight_stride = round_up(w.cols, 32);
    auto prepare = [&](int64_t i, int) {
      std::memcpy(rows + i * w.cols, args.x + i * args.x_stride, static_cast<size_t>(w.cols) * 4);
      quant::round_trip_row(args.input, w.input_scale, rows + i * w.cols, w.cols);
    };
    args.threads->parallel_for(args.num_rows, prepare);
    auto column = [&](int64_t n, int thread) {
      float* v = weights + thread * weight_stride;
      quant::decode_weights(w, n, 0, w.cols, v);
      for (int64_t i = 0; i < args.num_rows; ++i) {
        const float* x = rows + i * w.cols;
        float sum = 0.0f;
        for (int64_t k = 0; k < w.cols; ++k) sum += v[k] * x[k];
        args.y[i * args.y_stride + n] = sum;
      }
    };
    args.threads->parallel_for(w.rows, column);
  }

 private:
  static WorkspaceLayout scratch_of(const StoredMatrix& w, int64_t max_rows, int num_threads) {
    WorkspaceLayout layout;
    layout.add(max_rows * w.cols, 4);
    layout.add(num_threads * round_up(w.cols, 32), 4);
    return layout;
  }
};

}  // namespace

const Linear& ref_linear() {
  static const RefLinear member;
  return member;
}

}  // namespace moekit::linear
