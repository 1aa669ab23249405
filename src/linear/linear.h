// Linear: y = x W^T for one dense matrix: router logits, latent projections, shared experts'
// matrices.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/thread_pool.h"
#include "quant/row_format.h"
#include "quant/stored_matrix.h"

namespace moekit::linear {

struct Args {
  const StoredMatrix* weight = nullptr;  ///< canonical, for members that read it in place
  const std::byte* blob = nullptr;       ///< packed, from pack()
  ActivationScheme input;                ///< format in which the product reads x
  int64_t num_rows = 0;
  const float* x = nullptr;  ///< [num_rows, cols] f32, row stride x_stride elements; quantized
                             ///< inside as `input` says
  int64_t x_stride = 0;
  float* y = nullptr;  ///< [num_rows, rows] f32, row stride y_stride
  int64_t y_stride = 0;
  std::byte* workspace = nullptr;
  ThreadPool* threads = nullptr;
};

class Linear {
 public:
  virtual ~Linear() = default;
  virtual std::string_view name() const = 0;
  /// Empty string: yes. Otherwise the reason.
  virtual bool supports(const StoredMatrix& weight, const ActivationScheme& input) const = 0;
  virtual int64_t packed_bytes(const StoredMatrix& weight) const = 0;
  virtual void pack(const StoredMatrix& weight, std::byte* blob, ThreadPool& threads) const = 0;
  virtual int64_t workspace_bytes(const StoredMatrix& weight, const ActivationScheme& input,
                                  int64_t max_rows, int num_threads) const = 0;
  /// Each output row depends on its input row only, bit for bit. Never allocates.
  virtual void run(const Args& args) const = 0;
};

std::span<const Linear* const> registry();

}  // namespace moekit::linear
