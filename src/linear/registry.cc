#include "linear/cpu_isa.h"
#include "linear/cpu_linear.h"
#include "linear/linear.h"

namespace moekit::linear {

CpuIsa default_isa() {
  static const CpuIsa isa = chosen_cpu_isa();
  return isa;
}

std::span<const Linear* const> registry() {
  static const CpuLinear cpu;
  static const Linear* const members[] = {&cpu, &ref_linear()};
  return members;
}

}  // namespace moekit::linear
