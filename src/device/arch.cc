#include "device/arch.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "base/check.h"

namespace moekit::device {
namespace {

/// Compute capabilities that CUDA 13 compiles for.
constexpr std::array kKnown = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

}  // namespace

Arch parse_arch(std::string_view text) {
  std::string_view digits = text;
  Arch arch;
  if (digits.ends_with('a')) {
    arch.specific = true;
    digits.remove_suffix(1);
  }
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool known = error == std::errc{} && end == digits.data() + digits.size() &&
                     std::find(kKnown.begin(), kKnown.end(), number) != kKnown.end();
  MOEKIT_CHECK(known && (!arch.specific || number >= 90),
               "expected a compute capability such as 80, 90a, 100a or 120a, got '{}'", text);
  arch.major = number / 10;
  arch.minor = number % 10;
  return arch;
}

std::string to_string(const Arch& arch) {
  return fmt::format("{}{}", arch.number(), arch.specific ? "a" : "");
}

}  // namespace moekit::device
