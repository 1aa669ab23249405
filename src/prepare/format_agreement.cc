#include "prepare/format_agreement.h"

#include "base/check.h"

namespace moekit::prepare {

void FormatAgreement::take(int rank, int64_t format, const comm::CallSite& site) {
  if (format < 0) return;
  if (first_ < 0) {
    first_ = rank;
    format_ = format;
  }
  MOEKIT_CHECK(format == format_,
               "rank {} brings rows that travel as {}, rank {} as {} ({}): the hidden rows must "
               "have one type on all ranks",
               first_, to_string(static_cast<ActivationFormat>(format_)), rank,
               to_string(static_cast<ActivationFormat>(format)), to_string(site));
}

RowFormat FormatAgreement::rows(const RowFormat& wire) const {
  return first_ < 0 ? wire : RowFormat::of(static_cast<ActivationFormat>(format_), wire.width);
}

}  // namespace moekit::prepare
