// CpuIsa: the instruction sets that CPU kernels are built for, what this machine has, and the
// user's choice (MOEKIT_CPU_ISA).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace moekit {

/// Weakest first. Each has kernels of its own; results may differ in the last bits between two.
enum class CpuIsa : uint8_t {
  generic,      ///< portable C++
  avx2,         ///< AVX2, FMA, F16C
  avx512,       ///< AVX-512 F, BW, DQ, VL
  avx512_bf16,  ///< and VBMI, BF16
  amx,          ///< and AMX-TILE, AMX-BF16 with the kernel's permission for tile data
};
inline constexpr int kNumCpuIsas = 5;

const char* to_string(CpuIsa isa);
/// The ISA called `name` as to_string spells it.
std::optional<CpuIsa> cpu_isa_of(std::string_view name);

/// Whether this CPU and operating system run `isa` code. Asked once, then remembered.
bool has_cpu_isa(CpuIsa isa);
/// Every ISA that runs here, weakest first. Never empty.
std::vector<CpuIsa> available_cpu_isas();

/// Whether Intel made this CPU, as it says itself.
bool is_intel_cpu();

/// The best ISA here that is taken without being named: at most avx512_bf16. AMX is
/// used when named only: one row reads weights more slowly through tiles (0.6 to 0.8 of avx512_bf16
/// on a Xeon of 2023), many rows run twice as fast, and a row's bits may not depend on its batch.
CpuIsa best_cpu_isa();

/// best_cpu_isa(), or the one that MOEKIT_CPU_ISA names. Throws `unsupported` when that one is
/// not available and invalid_argument when no ISA has that name.
CpuIsa chosen_cpu_isa();

}  // namespace moekit
