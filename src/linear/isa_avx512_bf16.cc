// AVX-512 with VBMI and BF16; see avx512_bf16-inl.h.
#include "linear/kernels.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace moekit::linear {
namespace {
namespace avx512_bf16 {

#include "linear/avx512_bf16-inl.h"
#include "linear/elementwise-inl.h"
#include "linear/tile-inl.h"

}  // namespace avx512_bf16
}  // namespace

void fill_avx512_bf16(Kernels& k) {
  using namespace avx512_bf16;
  k.isa = CpuIsa::avx512_bf16;
  k.pairs = true;
  // Few instructions decode, on ports that products leave free: codes are read in place at any row
  // count.
  add_code<Code::bf16, 0>(k);
  add_code<Code::e4m3, 0>(k);
  add_code<Code::e5m2, 0>(k);
  add_code<Code::e2m1, 0>(k);
  add_code<Code::int4, 0>(k);
  add_code<Code::int8, 6, Isa::kMaxRows>(k);  // twice the instructions
  k.direct_rows = 6;
  k.scratch_multiply = multiply<Code::bf16, Isa::kMaxRows>;
  k.scratch_half_bytes = kBlockK / 2 * kUnitBytes;
  add_elementwise(k);
}

}  // namespace moekit::linear

#else

namespace moekit::linear {
void fill_avx512_bf16(Kernels&) {}
}  // namespace moekit::linear

#endif
