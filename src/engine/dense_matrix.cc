#include "engine/dense_matrix.h"

#include "base/check.h"

namespace moekit::engine {

const linear::Linear& dense_member(const StoredMatrix& weight) {
  for (const linear::Linear* member : linear::registry()) {
    if (member->supports(weight, kDenseInput)) return *member;
  }
  fail(ErrorCode::unsupported, "no dense linear member takes a {} weight with {} input",
       to_string(weight.scheme.format), to_string(kDenseInput.format));
}

DenseMatrix DenseMatrix::make(const StoredMatrix& weight, ThreadPool& threads,
                              Allocator* allocator) {
  DenseMatrix dense;
  dense.weight = &weight;
  dense.member = &dense_member(weight);
  dense.blob = Buffer(dense.member->packed_bytes(weight), allocator);
  dense.member->pack(weight, dense.blob.data(), threads);
  return dense;
}

void DenseMatrix::run(const float* x, int64_t x_stride, int64_t num_rows, float* y,
                      std::byte* workspace, ThreadPool& threads) const {
  member->run({.weight = weight,
               .blob = blob.data(),
               .input = kDenseInput,
               .num_rows = num_rows,
               .x = x,
               .x_stride = x_stride,
               .y = y,
               .y_stride = weight->rows,
               .workspace = workspace,
               .threads = &threads});
}

}  // namespace moekit::engine
