// Support: a back-end's answer to a problem: yes, or every reason against it.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

namespace moekit {

/// Why a back-end refuses. The text carries the figures; the code is what tests and tools match on.
enum class ReasonCode : uint8_t {
  not_in_build,
  device,
  arch,
  isa,
  weight_format,
  activation_format,
  activation_function,
  shape,
  bias,
  router,
  parallel,
  rows_format,
  reduce_duty,
  quant_duty,
  combine,
  capacity,
  layout,
  not_requested,
  self_test,
};

struct Reason {
  ReasonCode code;
  std::string text;
};

class Support {
 public:
  bool ok() const { return reasons_.empty(); }
  const std::vector<Reason>& reasons() const { return reasons_; }

  /// Adds a reason unless `condition` holds. All checks of a back-end run, so the user sees every
  /// reason at once.
  template <typename... Args>
  Support& require(bool condition, ReasonCode code, fmt::format_string<Args...> format,
                   Args&&... args) {
    if (!condition) reasons_.push_back({code, fmt::format(format, std::forward<Args>(args)...)});
    return *this;
  }
  void add(const Support& other) {
    reasons_.insert(reasons_.end(), other.reasons_.begin(), other.reasons_.end());
  }

 private:
  std::vector<Reason> reasons_;
};

const char* to_string(ReasonCode code);

}  // namespace moekit
