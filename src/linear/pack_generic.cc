// Packing loops in 16-byte compiler vectors: what every build has. Scales, which are few, have no
// wider ones.
#include <cstddef>

#include "base/cpu_features.h"
#include "linear/pack_loops.h"
#include "linear/panel_shuffle.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace moekit::linear {
namespace {

struct Ops {
  static constexpr int kCols = 4;
  typedef uint8_t V __attribute__((vector_size(16)));
  typedef uint16_t V16 __attribute__((vector_size(16)));
  typedef uint32_t V32 __attribute__((vector_size(16)));
  typedef uint64_t V64 __attribute__((vector_size(16)));

  static V load(const std::byte* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  static V load_rows(const std::byte* const* rows, int64_t at) { return load(rows[0] + at); }
  static V load_lanes(const std::byte* low, const std::byte*) { return load(low); }
  static void store(std::byte* p, V v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static void store_lanes(std::byte* low, std::byte*, V v) { store(low, v); }
  static void store_low(std::byte* p, V v) { __builtin_memcpy(p, &v, 8); }
  static void store_high(std::byte* p, V v) { store_low(p, hi64(v, v)); }
#if defined(__SSE2__)
  static void stream(std::byte* p, V v) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
  }
  static void fence() { _mm_sfence(); }
#else
  static void stream(std::byte* p, V v) { store(p, v); }
  static void fence() {}
#endif
  static V splat(uint32_t x) { return (V)V32{x, x, x, x}; }
  static V exclusive_or(V a, V b) { return a ^ b; }
  static V either(V a, V b) { return a | b; }
  static V both(V a, V b) { return a & b; }
  template <int kBits>
  static V right(V x) {
    return (V)((V32)x >> static_cast<uint32_t>(kBits));
  }
  template <int kBits>
  static V left(V x) {
    return (V)((V32)x << static_cast<uint32_t>(kBits));
  }
  static V clear(V x, V mask) { return x & ~mask; }
  static bool any(V x) {
    const V64 v = (V64)x;
    return (v[0] | v[1]) != 0;
  }
  /// All ones in bytes that hold an e4m3 NaN.
  static V nan_bytes(V x) {
    const V magnitude = splat(0x7f7f7f7f);
    return (V)((x & magnitude) == magnitude);
  }

  static V lo8(V a, V b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  static V hi8(V a, V b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
  }
  static V lo16(V a, V b) {
    return (V)__builtin_shufflevector((V16)a, (V16)b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  static V hi16(V a, V b) {
    return (V)__builtin_shufflevector((V16)a, (V16)b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
  static V lo32(V a, V b) { return (V)__builtin_shufflevector((V32)a, (V32)b, 0, 4, 1, 5); }
  static V hi32(V a, V b) { return (V)__builtin_shufflevector((V32)a, (V32)b, 2, 6, 3, 7); }
  static V lo64(V a, V b) { return (V)__builtin_shufflevector((V64)a, (V64)b, 0, 2); }
  static V hi64(V a, V b) { return (V)__builtin_shufflevector((V64)a, (V64)b, 1, 3); }
  /// Words 0, 2, 1, 3.
  static V swap_middle(V x) { return (V)__builtin_shufflevector((V32)x, (V32)x, 0, 2, 1, 3); }
  static V spread32(V x) { return x; }
  static V spread64(V x) { return x; }

  static V join_pairs(V a, V b, int32_t shift) {
    const V32 low = (V32)a >> static_cast<uint32_t>(shift) & 0xffffu;
    return (V)(low | (V32)b >> static_cast<uint32_t>(shift) << 16u);
  }
  static V every_other_byte(V x, V y, int32_t shift) {
    const V a = (V)((V16)x >> static_cast<uint16_t>(shift));
    const V b = (V)((V16)y >> static_cast<uint16_t>(shift));
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  }
  static V shuffle_words(V x) {
    const V16 v = (V16)x;
    return (V)__builtin_shufflevector(v, v, 0, 2, 4, 6, 1, 3, 5, 7);
  }
  static V shuffle_nibbles(V x) {
    V32 v = (V32)x;
    V32 t = (v ^ v >> 4) & 0x00f000f0u;
    v ^= t ^ t << 4;
    t = (v ^ v >> 8) & 0x0000ff00u;
    return (V)(v ^ t ^ t << 8);
  }
};

#include "linear/pack_loops-inl.h"

/// Elements group, group + 1, ... of eight rows become pieces of eight columns. `nans` gets the
/// bytes that have all bits of `nan_mask`.
void transpose_scales8(const std::byte* const* rows, int64_t group, V nan_mask, V& nans,
                       std::byte* out) {
  V v[8], w[8];
  for (int i = 0; i < 8; ++i) {
    v[i] = Ops::load(rows[i] + group);
    nans = Ops::either(nans, (V)((v[i] & nan_mask) == nan_mask));
  }
  for (int i = 0; i < 4; ++i) {
    w[i] = Ops::lo8(v[2 * i], v[2 * i + 1]);
    w[4 + i] = Ops::hi8(v[2 * i], v[2 * i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // groups [0, 8), then [8, 16)
    const V a = Ops::lo16(w[i], w[i + 1]);
    const V b = Ops::hi16(w[i], w[i + 1]);
    const V c = Ops::lo16(w[i + 2], w[i + 3]);
    const V d = Ops::hi16(w[i + 2], w[i + 3]);
    const V done[4] = {Ops::lo32(a, c), Ops::hi32(a, c), Ops::lo32(b, d), Ops::hi32(b, d)};
    for (int j = 0; j < 4; ++j) {
      std::byte* to = out + (2 * i + 2 * j) * kPanelCols;
      Ops::store_low(to, done[j]);
      Ops::store_high(to + kPanelCols, done[j]);
    }
  }
}

void transpose_scales16(const std::byte* const* rows, int64_t group, std::byte* out) {
  V v[4];
  for (int i = 0; i < 4; ++i) v[i] = Ops::load(rows[i] + group * 2);
  const V a = Ops::lo16(v[0], v[1]);
  const V b = Ops::hi16(v[0], v[1]);
  const V c = Ops::lo16(v[2], v[3]);
  const V d = Ops::hi16(v[2], v[3]);
  const V done[4] = {Ops::lo32(a, c), Ops::hi32(a, c), Ops::lo32(b, d), Ops::hi32(b, d)};
  for (int j = 0; j < 4; ++j) {
    std::byte* to = out + 2 * j * kPanelCols * 2;
    Ops::store_low(to, done[j]);
    Ops::store_high(to + kPanelCols * 2, done[j]);
  }
}

void transpose_scales32(const std::byte* const* rows, int64_t group, std::byte* out) {
  V v[4];
  for (int i = 0; i < 4; ++i) v[i] = Ops::load(rows[i] + group * 4);
  transpose_words(v);
  for (int j = 0; j < 4; ++j) Ops::store(out + j * kPanelCols * 4, v[j]);
}

/// Elements of 16 bytes of each row at a time. They go past the caches as codes do, but for zero
/// points, which are looked at again.
bool pack_scales(const std::byte* const* rows, int64_t groups, int64_t element_bytes,
                 uint8_t nan_mask, std::byte* out) {
  const int64_t step = 16 / element_bytes;
  const int64_t whole = groups / step * step;
  const bool stays = element_bytes == 1 && nan_mask == 0;
  const V mask = Ops::splat(nan_mask * 0x01010101u);
  V nans = Ops::splat(0);
  Stage stage;
  for (int64_t g = 0; g < whole; g += step) {
    std::byte* to = out + g * kPanelCols * element_bytes;
    switch (element_bytes) {
      case 1:
        for (int64_t c = 0; c < kPanelCols; c += 8) {
          transpose_scales8(rows + c, g, mask, nans, (stays ? to : stage.bytes) + c);
        }
        break;
      case 2:
        for (int64_t c = 0; c < kPanelCols; c += 4) {
          transpose_scales16(rows + c, g, stage.bytes + c * 2);
        }
        break;
      default:
        for (int64_t c = 0; c < kPanelCols; c += 4) {
          transpose_scales32(rows + c, g, stage.bytes + c * 4);
        }
        break;
    }
    if (!stays) stage.flush(0, 16 * kPanelCols, to);
  }
  bool met = Ops::any(nans);
  for (int64_t g = whole; g < groups; ++g) {
    for (int64_t c = 0; c < kPanelCols; ++c) {
      const std::byte* from = rows[c] + g * element_bytes;
      std::byte* to = out + (g * kPanelCols + c) * element_bytes;
      for (int64_t i = 0; i < element_bytes; ++i) to[i] = from[i];
      met |= (std::to_integer<uint8_t>(*from) & nan_mask) == nan_mask;
    }
  }
  Ops::fence();
  return met && nan_mask != 0;
}

/// The nibbles of four words, one a byte, in the order of their outputs.
void store_nibbles(V words, bool awq, std::byte* out) {
  const V mask = Ops::splat(0x0f0f0f0f);
  const V even = Ops::both(words, mask);
  const V odd = Ops::both(Ops::right<4>(words), mask);
  V low = Ops::lo8(even, odd), high = Ops::hi8(even, odd);
  if (awq) {  // stored 0, 2, 4, 6, 1, 3, 5, 7
    low = __builtin_shufflevector(low, low, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    high =
        __builtin_shufflevector(high, high, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  }
  Ops::store(out, low);
  Ops::store(out + 16, high);
}

void pack_zero_words(const std::byte* base, int64_t word_stride, int64_t group_stride,
                     int64_t groups, bool awq, std::byte* out) {
  int64_t g = 0;
  for (; group_stride == 4 && g + 4 <= groups; g += 4) {
    V v[4];
    for (int w = 0; w < 4; ++w) v[w] = Ops::load(base + w * word_stride + g * 4);
    transpose_words(v);
    for (int i = 0; i < 4; ++i) store_nibbles(v[i], awq, out + (g + i) * kPanelCols);
  }
  for (; g < groups; ++g) {
    const std::byte* group = base + g * group_stride;
    if (word_stride == 4) {
      store_nibbles(Ops::load(group), awq, out + g * kPanelCols);
      continue;
    }
    std::byte words[16];
    for (int w = 0; w < 4; ++w) __builtin_memcpy(words + 4 * w, group + w * word_stride, 4);
    store_nibbles(Ops::load(words), awq, out + g * kPanelCols);
  }
}

}  // namespace

const PackLoops& generic_pack_loops() {
  static constexpr PackLoops kLoops{pack_rows,      pack_outer,      split_words,
                                    locate_columns, pack_columns,    pack_awq,
                                    pack_scales,    pack_zero_words, pack_shifted_zeros};
  return kLoops;
}

const PackLoops& pack_loops() {
  return has_cpu_isa(CpuIsa::avx2) ? avx2_pack_loops() : generic_pack_loops();
}

}  // namespace moekit::linear
