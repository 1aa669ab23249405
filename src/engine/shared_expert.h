// SharedExpert: the dense MLP beside the routed experts, packed once.
#pragma once

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "linear/mlp.h"
#include "problem/canonical_layer.h"

namespace moekit::engine {

/// The shared expert of `layer`, which must outlive the result; `config` has the resolved
/// activation schemes. Shapes are enough to ask for its workspace.
linear::Mlp shared_mlp(const CanonicalLayer& layer, const MoeConfig& config);

class SharedExpert {
 public:
  SharedExpert() = default;
  /// `layer` must outlive the result; `config` has the resolved activation schemes. Packs in
  /// parallel.
  SharedExpert(const CanonicalLayer& layer, const MoeConfig& config, ThreadPool& threads,
               Allocator* allocator);

  bool empty() const { return blob_.size() == 0; }
  /// y[num_rows, hidden] = MLP(x[num_rows, hidden]); x rows x_stride floats apart. Never allocates.
  void run(const float* x, int64_t x_stride, int64_t num_rows, float* y, std::byte* workspace,
           ThreadPool& threads) const;

 private:
  linear::Mlp mlp_;
  Buffer blob_;
};

}  // namespace moekit::engine
