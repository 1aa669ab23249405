// TensorView: a non-owning strided view, the only tensor type of the public API. Field for field
// convertible to DLTensor.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "moekit/dtype.h"

namespace moekit {

/// Device codes are DLPack's.
enum class DeviceType : int32_t { cpu = 1, cuda = 2 };

struct Device {
  DeviceType type = DeviceType::cpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 6;

/// Shape and strides count elements (for f4_e2m1 as well: a [N, K] view has K/2 bytes a row). The
/// caller keeps `data` alive. Strides may be negative or 0 (read-only views); where a view enters
/// the library, its elements must lie within 2^47 bytes of `data`, and those of a result apart.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};
  Device device{};

  bool empty() const { return data == nullptr && rank == 0; }

  int64_t num_elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }

  /// Row-major without gaps (any stride will do for an axis of length 1).
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) return false;
      expected *= shape[i];
    }
    return true;
  }

  /// A row-major view of `data`.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<int64_t> shape) {
    TensorView v;
    v.data = data;
    v.dtype = dtype;
    for (int64_t s : shape) v.shape[v.rank++] = s;
    int64_t stride = 1;
    for (int i = v.rank - 1; i >= 0; --i) {
      v.strides[i] = stride;
      stride *= v.shape[i];
    }
    return v;
  }
  static TensorView contiguous(const void* data, DType dtype,
                               std::initializer_list<int64_t> shape) {
    return contiguous(const_cast<void*>(data), dtype, shape);
  }
};

}  // namespace moekit
