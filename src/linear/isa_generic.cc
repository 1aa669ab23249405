// Portable kernels: four f32 lanes as compiler vectors, no instruction beyond the build's baseline,
// products not fused. The other ISA files are tested against this one.
#include "linear/kernels.h"

namespace moekit::linear {
namespace {
namespace generic {

struct Isa {
  static constexpr int kLanes = 4;
  static constexpr int kPerDot = 1;
  static constexpr int kMaxRows = 3;
  static constexpr int kWideRows = 0;
  static constexpr int kShortRows = 0;
  static constexpr bool kAsksSecondCache = false;
  static constexpr bool kTakesPanelsBeside = false;
  static constexpr bool stepwise(int, int, int) { return false; }
  static constexpr int segments_at_once(int, int) { return 1; }
  static constexpr bool loops_plainly(int) { return false; }
  static constexpr float kE4m3Factor = 1.0f;
  typedef float V __attribute__((vector_size(16)));
  using W = V;
  using X = float;

  /// No decoder here reads subnormals.
  struct DenormalGuard {};

  static V zero() { return V{0, 0, 0, 0}; }
  static V splat(float x) { return V{x, x, x, x}; }
  static V load(const float* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store(float* p, V v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static void store_weight(std::byte* p, W w) { __builtin_memcpy(p, &w, sizeof(w)); }
  static W broadcast(const X* x) { return splat(*x); }
  static V dot(W w, W x, V acc) { return acc + w * x; }
  static V fma(V a, V b, V c) { return c + a * b; }
  static V mul(V a, V b) { return a * b; }

  static float from_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }

  /// Value of a float of `kBits` bits with `kExponent` exponent bits, specials by IEEE rules unless
  /// e4m3 (whose NaN never gets here: pack() moves it to the column scale).
  template <int kBits, int kExponent, bool kSpecials>
  static float small_float(uint32_t code) {
    constexpr int kMantissa = kBits - 1 - kExponent;
    constexpr uint32_t kExponentMask = (1u << kExponent) - 1;
    constexpr int kBias = (1 << (kExponent - 1)) - 1;
    const uint32_t sign = (code >> (kBits - 1) & 1u) << 31;
    const uint32_t exponent = code >> kMantissa & kExponentMask;
    const uint32_t mantissa = code & ((1u << kMantissa) - 1);
    if (kSpecials && exponent == kExponentMask) {
      return from_bits(sign | 0x7f800000u | mantissa << (23 - kMantissa));
    }
    if (exponent == 0) {
      const float unit = from_bits(static_cast<uint32_t>(128 - kBias - kMantissa) << 23);
      const float value = static_cast<float>(mantissa) * unit;
      return sign != 0 ? -value : value;
    }
    return from_bits(sign | (exponent + static_cast<uint32_t>(127 - kBias)) << 23 |
                     mantissa << (23 - kMantissa));
  }

  template <Code C>
  static float value(uint32_t code) {
    if constexpr (C == Code::bf16) return from_bits(code << 16);
    if constexpr (C == Code::f16) return small_float<16, 5, true>(code);
    if constexpr (C == Code::f32) return from_bits(code);
    if constexpr (C == Code::e4m3) return small_float<8, 4, false>(code);
    if constexpr (C == Code::e5m2) return small_float<8, 5, true>(code);
    if constexpr (C == Code::int8) return static_cast<float>(static_cast<int8_t>(code));
    constexpr int kTable = C == Code::int4;
    return from_bits(static_cast<uint32_t>(kNibbleHigh[kTable][code]) << 24 |
                     static_cast<uint32_t>(kNibbleLow[kTable][code]) << 16);
  }

  /// Bits of code j of column c in the 16 bytes at p: the inverse of the packer's permutations.
  template <Code C>
  static uint32_t code_bits(const std::byte* p, int c, int j) {
    const auto* b = reinterpret_cast<const uint8_t*>(p);
    if constexpr (C == Code::f32 || C == Code::bf16 || C == Code::f16) {
      uint32_t word = 0;
      constexpr int kBytes = bits_of(C) / 8;
      __builtin_memcpy(&word, b + 4 * c + kBytes * j, kBytes);
      return word;
    }
    if constexpr (C == Code::int8) return b[4 * c + j];
    if constexpr (C == Code::e4m3 || C == Code::e5m2) return b[8 * (j / 2) + 2 * c + j % 2];
    return b[4 * c + 2 * (j % 2) + j / 4] >> (4 * (j / 2 % 2)) & 15u;
  }

  template <Code C>
  struct Unit {
    const std::byte* at;
  };
  template <Code C>
  static Unit<C> unit(const std::byte* p) {
    return {p};
  }
  /// Word J of a unit.
  template <Code C, int J>
  static W step(const Unit<C>& u) {
    return V{value<C>(code_bits<C>(u.at, 0, J)), value<C>(code_bits<C>(u.at, 1, J)),
             value<C>(code_bits<C>(u.at, 2, J)), value<C>(code_bits<C>(u.at, 3, J))};
  }

  static float scale(Scale kind, const std::byte* base, int64_t group, int column) {
    const int64_t index = group * 32 + column;
    const auto* bytes = reinterpret_cast<const uint8_t*>(base);
    uint16_t half = 0;
    float full = 0;
    switch (kind) {
      case Scale::none: return 1.0f;
      case Scale::e8m0:
        return from_bits(bytes[index] == 0 ? 0x00400000u
                                           : static_cast<uint32_t>(bytes[index]) << 23);
      case Scale::e4m3: return small_float<8, 4, false>(bytes[index]);
      case Scale::f32_panel: __builtin_memcpy(&full, base + group * 4, 4); return full;
      case Scale::f32: __builtin_memcpy(&full, base + index * 4, 4); return full;
      case Scale::f16: __builtin_memcpy(&half, base + index * 2, 2); return value<Code::f16>(half);
      case Scale::bf16:
        __builtin_memcpy(&half, base + index * 2, 2);
        return value<Code::bf16>(half);
    }
    return 0.0f;
  }
  static V scales(Scale kind, const std::byte* base, int64_t group, int column) {
    return V{scale(kind, base, group, column), scale(kind, base, group, column + 1),
             scale(kind, base, group, column + 2), scale(kind, base, group, column + 3)};
  }
  static V negated_zeros(const int8_t* z) {
    return V{-static_cast<float>(z[0]), -static_cast<float>(z[1]), -static_cast<float>(z[2]),
             -static_cast<float>(z[3])};
  }

#include "linear/nibble_tables-inl.h"
};

#include "linear/elementwise-inl.h"
#include "linear/tile-inl.h"
#include "linear/whole_table-inl.h"

}  // namespace generic
}  // namespace

void fill_generic(Kernels& k) { generic::fill_f32<3>(k, CpuIsa::generic); }

}  // namespace moekit::linear
