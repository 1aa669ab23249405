// Products of prepared rows with panels: which kernel a number of rows takes, in what order panels
// and chunks of K are read, and what is asked for meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "linear/kernels.h"
#include "linear/row_operand.h"

namespace moekit::linear {

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

/// The same for products of the same rows whose panels are read one after the other. A few rows
/// take panels that lie at even distances side by side, where the CPU reads several streams faster
/// than one. Where codes are decoded first, pairs take each chunk of K in turns, so that what it
/// has of the rows is near (128 rows of 14336 K in f32 are 7 MB: 8 to 20 % faster on a Xeon,
/// 2026-12).
void multiply_panels(std::span<const Product> products, int64_t num_rows, std::byte* scratch);

/// Whether up to kMaxRowsBeside rows take panels of `code` side by side in multiply_panels().
bool takes_panels_beside(const Kernels& kernels, Code code);

/// Tasks that every thread should find where they take several panels each, so that it waits little
/// for the last one.
inline constexpr int64_t kTasksPerThread = 4;

/// Scales and bias of the panel at `data`.
ColumnTerms column_terms(const ProductPlan& plan, const std::byte* data);

}  // namespace moekit::linear
