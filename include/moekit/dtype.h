// Element types that moekit stores or exchanges.
#pragma once

#include <cstdint>

namespace moekit {

enum class DType : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,  ///< OCP E4M3: no infinity, NaN is S.1111.111, largest 448
  f8_e5m2,  ///< OCP E5M2: IEEE-like, largest finite 57344
  f8_e8m0,  ///< power-of-two scale 2^(byte - 127); 255 is NaN
  f4_e2m1,  ///< two codes a byte along the last axis, low nibble first; a shape counts elements,
            ///< not bytes
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean,
};

constexpr int bits_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
    case DType::u64: return 64;
    case DType::f32:
    case DType::i32:
    case DType::u32: return 32;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16: return 16;
    case DType::f4_e2m1: return 4;
    default: return 8;
  }
}

/// Bytes of one element; sub-byte types have none (0).
constexpr int bytes_of(DType t) { return bits_of(t) / 8; }

constexpr const char* to_string(DType t) {
  switch (t) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::f8_e4m3: return "f8_e4m3";
    case DType::f8_e5m2: return "f8_e5m2";
    case DType::f8_e8m0: return "f8_e8m0";
    case DType::f4_e2m1: return "f4_e2m1";
    case DType::i64: return "i64";
    case DType::i32: return "i32";
    case DType::i16: return "i16";
    case DType::i8: return "i8";
    case DType::u64: return "u64";
    case DType::u32: return "u32";
    case DType::u16: return "u16";
    case DType::u8: return "u8";
    case DType::boolean: return "bool";
  }
  return "?";
}

}  // namespace moekit
