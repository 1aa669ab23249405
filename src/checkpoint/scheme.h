// Quantization schemes: which tensors make up a matrix, how they are laid out, what they mean. One
// value describes a scheme; quant_config.h chooses it, block_reader.h applies it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "moekit/config.h"
#include "quant/stored_matrix.h"

namespace moekit::checkpoint {

/// Shapes that the scale tensor of a [N, K] matrix may take. Several may be legal for one scheme.
enum ScaleShapes : unsigned {
  kScalar = 1,     ///< [] or [1]: one for the matrix, in stacks one for all experts
  kVector = 2,     ///< [N]
  kGrid = 4,       ///< [row groups, column groups]
  kGrid4 = 8,      ///< [row groups, 1, column groups, 1]
  kIfSingle = 16,  ///< [] where the grid has one element
};

/// DTypes that a tensor may have, as bits of 1 << DType.
constexpr unsigned bit(DType t) { return 1u << static_cast<unsigned>(t); }

struct Scheme {
  std::string label;  ///< as the checkpoint spells it
  WeightScheme weights{};
  ActivationScheme input{};

  // Codes.
  std::string_view codes = "weight";
  unsigned code_dtypes = 0;
  DType unit = DType::f8_e4m3;
  PackAxis pack_axis = PackAxis::none;
  PackOrder pack_order = PackOrder::sequential;
  int32_t pack = 1;
  int32_t code_offset = 0;
  bool input_first = false;                ///< AWQ, GPTQ: stored [K, N]
  bool blocks_of_16 = false;               ///< codes' last axis is split into [K/32, 16] bytes
  std::string_view plain_name = "weight";  ///< the unquantized tensor that may stand instead

  // Scales.
  std::string_view scales{};
  unsigned scale_dtypes = 0;
  unsigned scale_shapes = 0;
  bool scale_is_e8m0 = false;
  int64_t row_group = 0;  ///< 0: one for the whole axis
  int64_t col_group = 0;
  std::string_view global{};  ///< nvfp4
  ScaleSense global_sense = ScaleSense::multiplier;
  std::string_view input_scale{};  ///< empty: the scheme has none

  // Integer zero points and the order of groups.
  std::string_view zeros{};
  DType zero_unit = DType::i32;
  PackAxis zero_pack_axis = PackAxis::none;
  int32_t zero_pack = 1;
  int32_t zero_offset = 0;
  std::string_view group_index{};     ///< tensor [K]
  bool group_index_required = false;  ///< the configuration says that groups are out of order
  std::string_view shape{};           ///< tensor [2] that repeats N and K
};

}  // namespace moekit::checkpoint
