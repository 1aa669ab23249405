#include "tensor/convert.h"

#include <cstring>

#include "base/check.h"
#include "tensor/float_formats.h"

namespace moekit {
namespace {

std::byte* row_start(const TensorView& view, int64_t row) {
  MOEKIT_CHECK(view.rank == 2, "rows are read from a tensor of rank 2 [rows, width], got rank {}",
               view.rank);
  MOEKIT_CHECK(view.device.type == DeviceType::cpu,
               "rows are read from host memory, got a tensor on device type {}; copy it first",
               static_cast<int>(view.device.type));
  MOEKIT_CHECK(row >= 0 && row < view.shape[0], "row must be in [0, {}), got {}", view.shape[0],
               row);
  return static_cast<std::byte*>(view.data) + row * view.strides[0] * bytes_of(view.dtype);
}

template <typename Stored, typename Decode>
void load(const std::byte* data, int64_t count, int64_t stride, float* out, Decode decode) {
  const auto* in = reinterpret_cast<const Stored*>(data);
  for (int64_t i = 0; i < count; ++i) out[i] = decode(in[i * stride]);
}

template <typename Stored, typename Encode>
void store(std::byte* data, int64_t count, int64_t stride, const float* in, Encode encode) {
  auto* out = reinterpret_cast<Stored*>(data);
  for (int64_t i = 0; i < count; ++i) out[i * stride] = encode(in[i]);
}

}  // namespace

void load_row_f32(const TensorView& view, int64_t row, float* out) {
  const std::byte* data = row_start(view, row);
  const int64_t count = view.shape[1];
  const int64_t stride = view.strides[1];
  switch (view.dtype) {
    case DType::f32:
      if (stride == 1) {
        std::memcpy(out, data, static_cast<size_t>(count) * 4);
      } else {
        load<float>(data, count, stride, out, [](float x) { return x; });
      }
      return;
    case DType::f64:
      load<double>(data, count, stride, out, [](double x) { return static_cast<float>(x); });
      return;
    case DType::f16: load<uint16_t>(data, count, stride, out, f16_to_f32); return;
    case DType::bf16: load<uint16_t>(data, count, stride, out, bf16_to_f32); return;
    default:
      fail(ErrorCode::invalid_argument,
           "rows are f64, f32, f16 or bf16, got {}; convert them first", to_string(view.dtype));
  }
}

void store_row_f32(const TensorView& view, int64_t row, const float* in) {
  std::byte* data = row_start(view, row);
  const int64_t count = view.shape[1];
  const int64_t stride = view.strides[1];
  switch (view.dtype) {
    case DType::f32:
      if (stride == 1) {
        std::memcpy(data, in, static_cast<size_t>(count) * 4);
      } else {
        store<float>(data, count, stride, in, [](float x) { return x; });
      }
      return;
    case DType::f16: store<uint16_t>(data, count, stride, in, f32_to_f16); return;
    case DType::bf16: store<uint16_t>(data, count, stride, in, f32_to_bf16); return;
    default:
      fail(ErrorCode::invalid_argument, "results are stored as f32, f16 or bf16, got {}",
           to_string(view.dtype));
  }
}

}  // namespace moekit
