#include "base/cpu_features.h"

#include <string>

#include "base/check.h"
#include "base/env.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moekit {
namespace {

constexpr CpuIsa kIsas[kNumCpuIsas] = {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512,
                                       CpuIsa::avx512_bf16, CpuIsa::amx};

#if defined(__x86_64__)

bool bit(unsigned word, int index) { return (word >> index & 1u) != 0; }

uint64_t enabled_states() {
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

/// Linux hands out AMX tile data on request only, once a process.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct Detected {
  bool has[kNumCpuIsas] = {true, false, false, false, false};
  bool intel = false;

  Detected() {
    unsigned a, b, c, d;
    if (__get_cpuid(0, &a, &b, &c, &d) != 0) {
      intel = b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx;
    }
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || !bit(c, 27)) return;  // OSXSAVE
    const bool fma = bit(c, 12);
    const bool f16c = bit(c, 29);
    const uint64_t states = enabled_states();
    unsigned b7, c7, d7;
    if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) == 0) return;
    const unsigned subleaves = a;
    has[1] = (states & 0x6) == 0x6 && fma && f16c && bit(b7, 5);
    const bool f_dq_bw_vl = bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31);
    has[2] = has[1] && (states & 0xe6) == 0xe6 && f_dq_bw_vl;
    unsigned a71 = 0;
    if (subleaves >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    has[3] = has[2] && bit(c7, 1) && bit(a71, 5);
    has[4] =
        has[3] && (states & 0x60000) == 0x60000 && bit(d7, 22) && bit(d7, 24) && may_use_tiles();
  }
};

const Detected& detected() {
  static const Detected d;
  return d;
}
bool runs(CpuIsa isa) { return detected().has[static_cast<int>(isa)]; }
bool intel() { return detected().intel; }

#else

bool runs(CpuIsa isa) { return isa == CpuIsa::generic; }
bool intel() { return false; }

#endif

}  // namespace

const char* to_string(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::generic: return "generic";
    case CpuIsa::avx2: return "avx2";
    case CpuIsa::avx512: return "avx512";
    case CpuIsa::avx512_bf16: return "avx512_bf16";
    case CpuIsa::amx: return "amx";
  }
  return "?";
}

std::optional<CpuIsa> cpu_isa_of(std::string_view name) {
  for (CpuIsa isa : kIsas) {
    if (name == to_string(isa)) return isa;
  }
  return std::nullopt;
}

bool has_cpu_isa(CpuIsa isa) { return runs(isa); }

bool is_intel_cpu() { return intel(); }

std::vector<CpuIsa> available_cpu_isas() {
  std::vector<CpuIsa> isas;
  for (CpuIsa isa : kIsas) {
    if (has_cpu_isa(isa)) isas.push_back(isa);
  }
  return isas;
}

CpuIsa best_cpu_isa() {
  for (int i = static_cast<int>(CpuIsa::avx512_bf16); i > 0; --i) {
    if (has_cpu_isa(kIsas[i])) return kIsas[i];
  }
  return CpuIsa::generic;
}

CpuIsa chosen_cpu_isa() {
  const std::string name = env("MOEKIT_CPU_ISA");
  if (name.empty()) return best_cpu_isa();
  const std::optional<CpuIsa> isa = cpu_isa_of(name);
  MOEKIT_CHECK(isa.has_value(),
               "MOEKIT_CPU_ISA must be generic, avx2, avx512, avx512_bf16 or amx, got \"{}\"",
               name);
  MOEKIT_CHECK_AS(ErrorCode::unsupported, has_cpu_isa(*isa),
                  "MOEKIT_CPU_ISA asks for {}, which this CPU does not run; unset it or name one "
                  "of the weaker ones (best here: {})",
                  name, to_string(available_cpu_isas().back()));
  return *isa;
}

}  // namespace moekit
