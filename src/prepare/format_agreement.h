// FormatAgreement: rows that meet in one call travel in one format, whichever rank brought them.
#pragma once

#include <cstdint>

#include "comm/communicator.h"
#include "quant/row_format.h"

namespace moekit::prepare {

/// Takes the ranks' formats in rank order, as their headers state them.
class FormatAgreement {
 public:
  /// `format` is an ActivationFormat, or -1 from a rank without rows. Throws invalid_argument
  /// naming both ranks where it differs from the first one.
  void take(int rank, int64_t format, const comm::CallSite& site);
  /// The rows' format: `wire`'s width, and `wire` itself where no rank brought rows.
  RowFormat rows(const RowFormat& wire) const;

 private:
  int first_ = -1;
  int64_t format_ = -1;
};

}  // namespace moekit::prepare
