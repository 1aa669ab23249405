// The kernel table of an instruction set whose rows are f32. Included by its file inside the
// namespace of the ISA, after tile-inl.h and elementwise-inl.h.

/// Every code, decoded in registers for up to kDirect rows, else through a scratch of f32. bf16,
/// which an instruction decodes, is read in place for tiles of kBf16Rows rows where that is not 0.
template <int kDirect, int kBf16Rows = 0>
void fill_f32(Kernels& k, CpuIsa isa) {
  k.isa = isa;
  if constexpr (kBf16Rows > 0) {
    add_code<Code::bf16, 0, kBf16Rows>(k);
  } else {
    add_code<Code::bf16, kDirect>(k);
  }
  add_code<Code::f16, kDirect>(k);
  add_code<Code::f32, 0>(k);
  add_code<Code::e4m3, kDirect>(k);
  add_code<Code::e5m2, kDirect>(k);
  add_code<Code::e2m1, kDirect>(k);
  add_code<Code::int4, kDirect>(k);
  add_code<Code::int8, kDirect>(k);
  k.direct_rows = kDirect;
  k.scratch_multiply = multiply<Code::f32, Isa::kMaxRows>;
  k.scratch_half_bytes = kBlockK * kUnitBytes;
  add_elementwise(k);
}
