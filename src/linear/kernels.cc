#include "linear/kernels.h"

namespace moekit::linear {
namespace {

struct Tables {
  Kernels full[kNumCpuIsas];   // f32 rows
  Kernels pairs[kNumCpuIsas];  // bf16 rows

  // Even filling a table runs code of its ISA: only what this machine has is entered.
  Tables() {
    fill_generic(full[0]);
    if (has_cpu_isa(CpuIsa::avx2)) fill_avx2(full[1]);
    for (int i = 2; i < kNumCpuIsas; ++i) {
      if (has_cpu_isa(static_cast<CpuIsa>(i))) fill_avx512(full[i]);
      full[i].isa = static_cast<CpuIsa>(i);
    }
    if (has_cpu_isa(CpuIsa::avx512_bf16)) fill_avx512_bf16(pairs[3]);
    if (has_cpu_isa(CpuIsa::amx)) {
      fill_avx512_bf16(pairs[4]);
      fill_amx(pairs[4]);
    }
    for (int i = 0; i < kNumCpuIsas; ++i) {
      if (!pairs[i].pairs) pairs[i] = full[i];
      // Intel's cores run only some 20 lines ahead in a page, so that one stream that is decoded on
      // its way reads at 12 GB/s a core and four at 15 (Xeon, 2026-12). Not measured on others,
      // whose caches follow one stream farther.
      full[i].prefers_beside = pairs[i].prefers_beside = is_intel_cpu();
    }
  }
};

}  // namespace

const Kernels& kernels(CpuIsa isa, bool pairs) {
  static const Tables tables;
  const int i = static_cast<int>(isa);
  return pairs ? tables.pairs[i] : tables.full[i];
}

}  // namespace moekit::linear
