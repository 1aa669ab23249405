#include "kernels/common/tensor_map.h"

#include <cudaTypedefs.h>

namespace moekit::kernels {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result{};
  constexpr unsigned kVersion = 12000;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, kVersion,
                                       cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
}

}  // namespace

cudaError_t encode_tensor_map(const TensorMapSpec& spec, CUtensorMap* map) {
  if (broken_rule(spec) != nullptr) return cudaErrorInvalidValue;
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult status =
      encode(map,
             spec.element == TileElement::b8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             spec.rank, const_cast<void*>(spec.base),
             reinterpret_cast<const cuuint64_t*>(spec.dims.data()),
             reinterpret_cast<const cuuint64_t*>(spec.strides.data()),
             reinterpret_cast<const cuuint32_t*>(spec.box.data()), steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace moekit::kernels
