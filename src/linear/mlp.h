// Mlp: one dense expert (a shared expert), packed and run by the kernels of the routed ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/thread_pool.h"
#include "moekit/config.h"
#include "quant/stored_matrix.h"

namespace moekit::linear {

/// y = down(act(gate x, up x)) for one StoredExpert. A plain value over views: `expert` must
/// outlive it.
class Mlp {
 public:
  Mlp() = default;
  Mlp(const StoredExpert& expert, const ActivationSpec& activation,
      const ActivationScheme& gate_up_input, const ActivationScheme& down_input)
      : expert_(&expert),
        activation_(activation),
        gate_up_input_(gate_up_input),
        down_input_(down_input) {}

  /// Every format of moekit is covered; false only for matrices whose shapes do not fit together.
  bool supports() const;
  int64_t packed_bytes() const;
  /// Fills blob[0, packed_bytes()), in parallel.
  void pack(std::byte* blob, ThreadPool& threads) const;
  /// For at most max_rows rows a call.
  int64_t workspace_bytes(int64_t max_rows, int num_threads) const;

  struct Args {
    const std::byte* blob = nullptr;
    const float* x = nullptr;  ///< [num_rows, up.cols], rows x_stride floats apart
    int64_t x_stride = 0;
    int64_t num_rows = 0;
    float* y = nullptr;  ///< [num_rows, down.rows], contiguous
    std::byte* workspace = nullptr;
    ThreadPool* threads = nullptr;
  };
  /// Rows are independent, bit for bit. Never allocates, never throws.
  void run(const Args& args) const;

 private:
  const StoredExpert* expert_ = nullptr;
  ActivationSpec activation_;
  ActivationScheme gate_up_input_, down_input_;
};

}  // namespace moekit::linear
