// What cpuid and the operating system say about x86 vector and matrix instructions.
#pragma once

#include <string>
#include <vector>

namespace moekit::api {

/// A feature counts only when the kernel saves the registers that it needs.
struct X86Features {
  bool avx2 = false, fma = false, f16c = false;
  bool avx512f = false, avx512bw = false, avx512vl = false, avx512dq = false;
  bool avx512_vbmi = false, avx512_vnni = false, avx512_bf16 = false, avx512_fp16 = false;
  bool avx_vnni = false, amx_tile = false, amx_bf16 = false, amx_int8 = false;
  std::string model;  ///< brand string

  /// Names of those that are there, in kernel spelling.
  std::vector<std::string> names() const;
};

/// Empty on other architectures. Read once.
const X86Features& x86_features();

}  // namespace moekit::api
