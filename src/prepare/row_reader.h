// Reads the caller's rows and writes them as records: copies, conversions and quantization by the
// source. Also quantization after dispatch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "prepare/prepare_finalize.h"
#include "problem/workspace_layout.h"

namespace moekit::prepare {

/// How rows change between the caller's tensor and the experts.
class RowPath {
 public:
  /// Throws invalid_argument where the caller's tensor does not fit the problem or the duties.
  /// Rows that do not move are quantized in one step, whoever's duty it is.
  RowPath(const PrepareArgs& args, bool moves_rows);

  /// Format of this rank's rows in flight. Without tokens it says nothing about the peers' rows.
  const RowFormat& travelling() const { return travelling_; }
  /// Format that the experts get; equal to travelling() but for QuantDuty::destination.
  const RowFormat& delivered() const { return delivered_; }
  /// The caller's rows can be read in place: no conversion, elements of a row adjacent.
  bool in_place() const { return in_place_; }
  const std::byte* rows() const { return rows_; }     ///< when in_place()
  int64_t row_stride() const { return row_stride_; }  ///< bytes, when in_place()

  /// Writes token's travelling record. `scratch` has `width` floats of the calling task.
  void write(int64_t token, float* scratch, std::byte* record) const;
  /// A record of `from_format` (f32 or bf16) -> delivered(), for QuantDuty::destination.
  void requantize(const RowFormat& from_format, const std::byte* from, float* scratch,
                  std::byte* to) const;

  /// Largest travelling record of any caller's tensor.
  static int64_t max_travelling_bytes(const RowFormat& wire, QuantDuty quant_duty);
  /// Scratch of all tasks.
  static Region add_scratch(WorkspaceLayout& layout, int64_t width);

 private:
  const PrepareArgs& args_;
  RowFormat travelling_;
  RowFormat delivered_;
  ActivationScheme scheme_;  // of whoever quantizes
  bool in_place_ = false;
  const std::byte* rows_ = nullptr;
  int64_t row_stride_ = 0;
};

/// Whether rows that came as `from` still have to be quantized by this rank.
bool quantizes_here(const PrepareArgs& args, const RowFormat& from);

/// The same rows in the format that the experts get, written to `records` in row order.
ExpertRows quantize_rows(const PrepareArgs& args, const ExpertRows& rows, float* scratch,
                         std::byte* records);

}  // namespace moekit::prepare
