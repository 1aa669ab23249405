// Panels decoded into scratch, and scales widened there. Included once by tile-inl.h, inside the
// namespace of the ISA, after each_word().

/// Stores one word of weights at the place where scratch_multiply looks for it.
struct ScratchStore {
  std::byte* to;
  template <typename W>
  [[gnu::always_inline]] inline void operator()(int j, W w) const {
    Isa::store_weight(to + j * kUnitBytes, w);
  }
};

/// Scales of [k0, k1) as f32, one row of 32 a segment.
[[maybe_unused]] static void widen_scales(const Panel& p, int64_t k0, int64_t k1, float* out) {
  for (int64_t k = k0; k < k1; k += p.segment, out += kPanelCols) {
    const int64_t group = p.group > 0 ? k / p.group : 0;
    for (int column = 0; column < kPanelCols; column += Isa::kLanes) {
      Isa::store(out + column, Isa::scales(p.scale, p.scales, group, column));
    }
  }
}

template <Code C>
void decode_panel(const Panel& p, int64_t k0, int64_t k1, std::byte* scratch) {
  [[maybe_unused]] const typename Isa::DenormalGuard guard{};
  constexpr int64_t kScratchHalf = kBlockK / Isa::kPerDot * kUnitBytes;
  for (int64_t k = k0; k < k1; k += kBlockK) {
    const std::byte* codes = p.codes + (k - p.first_k) / kBlockK * 2 * p.half_bytes;
    std::byte* out = scratch + (k - k0) / kBlockK * 2 * kScratchHalf;
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t u = 0; u < kBlockK / kUnitK<C>; ++u) {
        __builtin_prefetch(codes + half * p.half_bytes + u * kUnitBytes + kDecodeAheadBytes);
#pragma GCC unroll 4
        for (int v = 0; v < 16 / Isa::kLanes; ++v) {
          const int64_t column_bytes = v * Isa::kLanes * 4;
          each_word<C>(
              Isa::template unit<C>(codes + half * p.half_bytes + u * kUnitBytes + column_bytes),
              ScratchStore{out + half * kScratchHalf + u * kSteps<C> * kUnitBytes + column_bytes});
        }
      }
    }
  }
}
