// Arch: a GPU's compute capability as plans and kernel tables see it. No CUDA is needed to talk
// about one, so that `explain --arch 90a` works on any machine.
#pragma once

#include <compare>
#include <string>
#include <string_view>

namespace moekit::device {

/// Compute capability major.minor. `specific` tells whether code for the `a` target of this
/// capability (wgmma, tcgen05) may run: true for every real device of 9.0 and above.
struct Arch {
  int major = 0;
  int minor = 0;
  bool specific = false;
  auto operator<=>(const Arch&) const = default;

  int number() const { return major * 10 + minor; }
};

/// "80", "90a", "120a". Throws invalid_argument with the accepted form otherwise.
Arch parse_arch(std::string_view text);
std::string to_string(const Arch& arch);

}  // namespace moekit::device
