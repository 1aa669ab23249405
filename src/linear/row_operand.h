// Rows on their way into a product: from the caller's record to the kernels' operand, through the
// exact quantization of the scheme.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/kernels.h"
#include "linear/panel_spec.h"
#include "quant/row_format.h"

namespace moekit::linear {

/// Below so many values one thread prepares all rows: a barrier would cost more.
inline constexpr int64_t kSerialValues = 32768;

/// The kernel table, number formats and panels of one product.
struct ProductPlan {
  const Kernels* kernels = nullptr;
  ActivationScheme input;
  StoreAs store = StoreAs::f32;
  int64_t segment = 0;  ///< of the weights that the rows will meet
  bool sums = false;    ///< the weights have zero points
  Code code = Code::bf16;
  int64_t k_padded = 0;
  Panel panel;  ///< without its places
  /// What a PanelSpec says, worked out once: a call of one row asks a thousand times.
  int64_t panel_bytes = 0, scale_offset = 0, zero_offset = 0, terms_offset = 0;

  static ProductPlan of(CpuIsa isa, const PanelSpec& spec, const ActivationScheme& input);
};

/// Bytes of one operand row of `cols` values, pad included. Rows are not a multiple of 4 KiB apart,
/// so that a tile's rows do not share cache sets.
int64_t operand_stride(int64_t cols);
/// Floats beside each row: block scales and segment sums.
int64_t operand_extras(int64_t cols, ActivationFormat input, bool sums);
/// Bytes of scratch for one thread that prepares rows of `cols` values, permuted to `places` of
/// them (0: never).
int64_t prepare_scratch_bytes(int64_t cols, int64_t places);

/// Where a row comes from.
struct RowRecord {
  const RowFormat* format = nullptr;
  const std::byte* data = nullptr;
  float weight = 1.0f;             ///< multiplies values that are not in the scheme's format yet
  float static_scale = 1.0f;       ///< of the matrix, in the scheme's sense
  const int32_t* order = nullptr;  ///< value of each place, of a sorted matrix; null: as they come
  int64_t places = 0;
};

/// Fills `operand` (operand_stride bytes) and `extras`. A record that already has the scheme's
/// format is taken as it is. Quantization sees values in their own order, before they are permuted.
/// Never throws.
RowOperand prepare_row(const ProductPlan& plan, const RowRecord& record, std::byte* operand,
                       float* extras, std::byte* scratch);

}  // namespace moekit::linear
