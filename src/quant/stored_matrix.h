// StoredMatrix: one weight matrix exactly as a checkpoint or a caller holds it: codes, scales,
// conventions, strides. Logical shape is [rows = outputs N, cols = inputs K], whatever the storage
// order. Non-owning; never changed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moekit/dtype.h"
#include "moekit/quant.h"

namespace moekit {

/// Axis along which several codes share one storage unit (a byte of two FP4 codes, an int32 of
/// eight int4 codes).
enum class PackAxis : uint8_t { none, rows, cols };

/// Order of the codes inside a unit, lowest bits first.
enum class PackOrder : uint8_t {
  sequential,  ///< code i at bits [i*b, (i+1)*b)
  awq,         ///< eight int4 codes a word stored in the order 0,2,4,6,1,3,5,7
};

/// A strided grid of codes in *storage coordinates* (p, q): p runs over stored outputs, q over
/// inputs.
struct CodeGrid {
  const std::byte* data = nullptr;
  DType unit = DType::bf16;  ///< type of one storage unit (bf16, f8_e4m3, u8, i32, ...)
  PackAxis pack_axis = PackAxis::none;
  PackOrder order = PackOrder::sequential;
  int32_t pack = 1;  ///< codes a unit
  int64_t row_stride =
      0;  ///< bytes from unit (u, v) to (u + 1, v); u = p / pack if packed along rows, else p
  int64_t col_stride = 0;  ///< bytes from unit (u, v) to (u, v + 1)
  bool empty() const { return data == nullptr; }
};

/// One scale (or zero point) per row_group x col_group elements, indexed by storage coordinates: (p
/// / row_group, q / col_group). A group of 0 means "one for the whole axis".
struct ScaleGrid {
  CodeGrid values;
  int64_t row_group = 0;
  int64_t col_group = 0;
  bool empty() const { return values.empty(); }
};

struct StoredMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  WeightScheme scheme{};
  // Logical row n lies at storage row p = row_first + row_step * n: interleaved gate/up is step 2,
  // stacked is first = I.
  int64_t row_first = 0;
  int64_t row_step = 1;
  CodeGrid codes;
  ScaleGrid scales;
  ScaleGrid zeros;          ///< integer zero points, empty when symmetric
  int32_t zero_offset = 0;  ///< added to a stored zero point (GPTQ v1 stores z - 1)
  int32_t code_offset = 0;  ///< subtracted from a stored unsigned code (pack-quantized: 2^(bits-1))
  const int32_t* group_index =
      nullptr;          ///< [cols] scale group of each input (GPTQ act-order); null: q / col_group
  float global = 1.0f;  ///< nvfp4: fp32 global
  ScaleSense global_sense = ScaleSense::multiplier;
  float input_scale =
      1.0f;  ///< static activation scale of this matrix's input, if its scheme has one
  bool empty() const { return codes.empty(); }
};

/// A strided fp32-convertible vector (bias): element n at data + (first + step * n) *
/// bytes_of(dtype).
struct StoredVector {
  const std::byte* data = nullptr;
  DType dtype = DType::f32;
  int64_t size = 0;
  int64_t first = 0;
  int64_t step = 1;
  bool empty() const { return data == nullptr; }
};

/// One expert (or the shared expert). `gate` is empty when the activation has no gate.
struct StoredExpert {
  StoredMatrix gate, up, down;
  StoredVector gate_bias, up_bias, down_bias;
};

}  // namespace moekit
