// A product of a dense layer's member, from stored weights to the output.
#pragma once

#include <cmath>
#include <vector>

#include "base/buffer.h"
#include "base/thread_pool.h"
#include "linear/linear.h"

namespace moekit::testing {

/// y [rows, w.rows] = x [rows, w.cols] times w, packed for this one call. What is not written stays
/// `unwritten`: a value that the product does not give.
inline std::vector<float> run_member(const linear::Linear& member, const StoredMatrix& w,
                                     const ActivationScheme& input, const std::vector<float>& x,
                                     int64_t rows, int threads, float unwritten = std::nanf("")) {
  ThreadPool pool(threads);
  Buffer blob(member.packed_bytes(w));
  member.pack(w, blob.data(), pool);
  Buffer workspace(member.workspace_bytes(w, input, rows, threads));
  std::vector<float> y(static_cast<size_t>(rows * w.rows), unwritten);
  member.run({.weight = &w,
              .blob = blob.data(),
              .input = input,
              .num_rows = rows,
              .x = x.data(),
              .x_stride = w.cols,
              .y = y.data(),
              .y_stride = w.rows,
              .workspace = workspace.data(),
              .threads = &pool});
  return y;
}

}  // namespace moekit::testing
