#include "engine/shared_expert.h"

#include "base/check.h"

namespace moekit::engine {

linear::Mlp shared_mlp(const CanonicalLayer& layer, const MoeConfig& config) {
  return {layer.shared, config.activation, config.shared.gate_up_input, config.shared.down_input};
}

SharedExpert::SharedExpert(const CanonicalLayer& layer, const MoeConfig& config,
                           ThreadPool& threads, Allocator* allocator)
    : mlp_(shared_mlp(layer, config)) {
  MOEKIT_CHECK(mlp_.supports(),
               "the shared expert's matrices do not fit together: up [{}, {}], down [{}, {}]",
               layer.shared.up.rows, layer.shared.up.cols, layer.shared.down.rows,
               layer.shared.down.cols);
  blob_ = Buffer(mlp_.packed_bytes(), allocator);
  mlp_.pack(blob_.data(), threads);
}

void SharedExpert::run(const float* x, int64_t x_stride, int64_t num_rows, float* y,
                       std::byte* workspace, ThreadPool& threads) const {
  mlp_.run({.blob = blob_.data(),
            .x = x,
            .x_stride = x_stride,
            .num_rows = num_rows,
            .y = y,
            .workspace = workspace,
            .threads = &threads});
}

}  // namespace moekit::engine
