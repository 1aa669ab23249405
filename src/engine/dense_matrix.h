// DenseMatrix: a router, gate or latent projection, packed for the first Linear member that takes
// it.
#pragma once

#include "base/buffer.h"
#include "linear/linear.h"

namespace moekit::engine {

/// Every dense product of a layer reads its input in full precision.
inline constexpr ActivationScheme kDenseInput{.format = ActivationFormat::f32};

struct DenseMatrix {
  const StoredMatrix* weight = nullptr;
  const linear::Linear* member = nullptr;
  Buffer blob;

  bool empty() const { return member == nullptr; }
  /// `weight` must outlive the result.
  static DenseMatrix make(const StoredMatrix& weight, ThreadPool& threads, Allocator* allocator);
  void run(const float* x, int64_t x_stride, int64_t num_rows, float* y, std::byte* workspace,
           ThreadPool& threads) const;
};

/// The member that DenseMatrix::make takes; throws unsupported when there is none. `weight` may be
/// hollow.
const linear::Linear& dense_member(const StoredMatrix& weight);

}  // namespace moekit::engine
