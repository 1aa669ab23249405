// What the row quantizers of quantize.cu and quantize_fp8_block.cu share.
#pragma once

#include "kernels/smxx_moe/api.h"

namespace moekit::kernels::smxx_moe {

struct QuantizeArgs {
  const void* rows;
  int64_t row_bytes;
  int64_t num_rows;
  const int32_t* live_rows;
  QuantizedRows out;
  bool independent_of_predecessor;
};

cudaError_t launch_quantize_fp8_block(RowType type, const QuantizeArgs& args, cudaStream_t stream,
                                      bool overlap);

}  // namespace moekit::kernels::smxx_moe
