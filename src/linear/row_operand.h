// Rows on their way into a product: from the caller's record to the kernels' operand, through the
// exact quantization of the scheme.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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

/// c[row][32] = rows x panel, K in [0, k_padded).
struct Product {
  const Kernels* kernels = nullptr;
  Code code = Code::bf16;
  Panel panel;
  int64_t k_padded = 0;
  const RowOperand* rows = nullptr;
  float* c = nullptr;

  /// Of the panel at `data`, after which the one at `next` is likely read.
  static Product of(const ProductPlan& plan, const std::byte* data, const std::byte* next,
                    const RowOperand* rows, float* c);
};

/// `scratch` has kScratchBytes.
void multiply_panel(const Product& product, int64_t num_rows, std::byte* scratch);

/// Tasks that every thread should find where they take several panels each, so that it waits little
/// for the last one.
inline constexpr int64_t kTasksPerThread = 4;

/// Whether up to kMaxRowsBeside rows take panels of `code` side by side in multiply_panels().
bool takes_panels_beside(const Kernels& kernels, Code code);

/// The same for products of the same rows whose panels are read one after the other. A few rows
/// take panels that lie at even distances side by side, where the CPU reads several streams faster
/// than one. Where codes are decoded first, pairs take each chunk of K in turns, so that what it
/// has of the rows is near (128 rows of 14336 K in f32 are 7 MB: 8 to 20 % faster on a Xeon,
/// 2026-12).
void multiply_panels(std::span<const Product> products, int64_t num_rows, std::byte* scratch);

/// Scales and bias of the panel at `data`.
ColumnTerms column_terms(const ProductPlan& plan, const std::byte* data);

}  // namespace moekit::linear
