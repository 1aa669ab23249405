// TensorMapSpec: what a TMA descriptor says, checked against the rules of the hardware on any host.
#pragma once

#include <array>
#include <cstdint>

namespace moekit::kernels {

/// Element type of a TMA descriptor; only the width matters to our tiles.
enum class TileElement : uint8_t { b8, b16 };

/// A box of a tensor in device memory, innermost dimension first, always in the 128-byte swizzle,
/// with zeros outside of the tensor.
struct TensorMapSpec {
  const void* base = nullptr;
  TileElement element = TileElement::b16;
  uint32_t rank = 0;
  std::array<uint64_t, 5> dims{};
  std::array<uint64_t, 4> strides{};  ///< bytes between neighbours along dimensions 1...
  std::array<uint32_t, 5> box{};
};

constexpr uint64_t element_bytes(TileElement element) { return element == TileElement::b8 ? 1 : 2; }

/// Null where the driver will accept the descriptor, else the rule that it breaks (CUDA driver API,
/// cuTensorMapEncodeTiled).
inline const char* broken_rule(const TensorMapSpec& spec) {
  if (reinterpret_cast<uintptr_t>(spec.base) % 16 != 0) return "the base must be 16-byte aligned";
  if (spec.rank < 2 || spec.rank > 5) return "the rank must be 2 to 5";
  if (spec.box[0] * element_bytes(spec.element) != 128) return "the box must be 128 bytes wide";
  for (uint32_t d = 0; d < spec.rank; ++d) {
    if (spec.dims[d] == 0 || spec.dims[d] > (uint64_t{1} << 32)) {
      return "dimensions must lie in [1, 2^32]";
    }
    if (spec.box[d] == 0 || spec.box[d] > 256) return "box sides must lie in [1, 256]";
    if (d + 1 < spec.rank &&
        (spec.strides[d] % 16 != 0 || spec.strides[d] >= (uint64_t{1} << 40))) {
      return "strides must be multiples of 16 bytes below 2^40";
    }
  }
  return nullptr;
}

}  // namespace moekit::kernels
