// Products of a panel with rows, for any instruction set. Included once by each ISA file, inside
// its own namespace, after struct Isa (its vectors and decoders). Everything here is a template or
// static, so no code compiled for one ISA can be linked into another.
//
// Order of every sum: K ascending, one chain per (row, column); where there are scales inside K,
// one chain per segment and then c = fma(scale, chain, c). Tile heights differ in how many rows
// share a decoded word, never in this order.

template <Code C>
constexpr int64_t kUnitK = unit_k(C);

/// Stores one word of weights at the place where scratch_multiply looks for it.
struct ScratchStore {
  std::byte* to;
  template <typename W>
  [[gnu::always_inline]] inline void operator()(int j, W w) const {
    Isa::store_weight(to + j * kUnitBytes, w);
  }
};

/// R rows x NV vectors of columns.
template <int R, int NV>
struct Tile {
  typename Isa::V acc[R][NV];

  [[gnu::always_inline]] inline void zero() {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = Isa::zero();
    }
  }
  [[gnu::always_inline]] inline void load(const float* c) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = Isa::load(c + r * kPanelCols + v * Isa::kLanes);
    }
  }
  [[gnu::always_inline]] inline void store(float* c) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) Isa::store(c + r * kPanelCols + v * Isa::kLanes, acc[r][v]);
    }
  }
};

/// Bytes from a half's first vector to vector v; vectors past 16 columns lie in the next half.
template <int NV>
[[gnu::always_inline]] inline int64_t vector_offset(int v, int64_t half_bytes) {
  const int column = v * Isa::kLanes;
  return column / 16 * half_bytes + column % 16 * 4;
}

/// So far ahead codes are asked for. Decoding keeps a core from running into the next lines by
/// itself, and hardware stops at every page; what lies behind a panel is its scales and the next
/// panel. Without it one row of fp8 took twice the time (Zen 3, 2026-11).
constexpr int64_t kPrefetchBytes = 4096;

/// Two of a block's lines, in the order of addresses. In the order in which they are read, the two
/// halves by turns, bf16 lost a fifth of the bandwidth.
[[gnu::always_inline]] inline void prefetch_lines(const std::byte* block, int64_t unit) {
  const std::byte* lines = block + 2 * unit * kUnitBytes + kPrefetchBytes;
  __builtin_prefetch(lines);
  __builtin_prefetch(lines + kUnitBytes);
}

/// K J of a unit and those after it, for every vector of columns. I is Isa, where it makes a unit's
/// words in parts. Worth it where chains are long for their number (R * NV sums of kUnitK<C>
/// steps), and where many rows share a broadcast and words take an instruction.
template <typename I, Code C, int J, int R, int NV>
[[gnu::always_inline]] inline void run_steps(const typename I::template Unit<C> (&units)[NV],
                                             const typename I::X* const* x, int64_t x_index,
                                             Tile<R, NV>& tile) {
  if constexpr (R > 2) {  // all words first: one broadcast at a time is live
    typename I::W w[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) w[v] = I::template step<C, J>(units[v]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename I::W a = I::broadcast(x[r] + x_index + J);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) tile.acc[r][v] = I::dot(w[v], a, tile.acc[r][v]);
    }
  } else {
    typename I::W a[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) a[r] = I::broadcast(x[r] + x_index + J);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const typename I::W w = I::template step<C, J>(units[v]);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) tile.acc[r][v] = I::dot(w, a[r], tile.acc[r][v]);
    }
  }
  if constexpr (J + 1 < static_cast<int>(kUnitK<C>)) {
    run_steps<I, C, J + 1>(units, x, x_index, tile);
  }
}

template <typename I, Code C, int R, int NV>
[[gnu::always_inline]] inline void run_unit(const std::byte* unit, int64_t half_bytes,
                                            const typename I::X* const* x, int64_t x_index,
                                            Tile<R, NV>& tile) {
  typename I::template Unit<C> units[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    units[v] = I::template unit<C>(unit + vector_offset<NV>(v, half_bytes));
  }
  run_steps<I, C, 0>(units, x, x_index, tile);
}

/// Units [first, first + num_units) of the block at `codes`, into the tile.
template <Code C, int R, int NV>
[[gnu::always_inline]] inline void run_units(const std::byte* codes, int64_t half_bytes,
                                             int64_t first, int64_t num_units,
                                             const typename Isa::X* const* x, int64_t x_index,
                                             Tile<R, NV>& tile) {
  constexpr int kSteps = static_cast<int>(kUnitK<C>) / Isa::kPerDot;
#pragma GCC unroll 2
  for (int64_t u = first; u < first + num_units; ++u) {
    const std::byte* unit = codes + u * kUnitBytes;
    // Many rows read decoded scratch, or panels of a code that needs no decoding: work enough.
    if constexpr (C != Isa::kScratchCode || R <= 3) prefetch_lines(codes, u);
    if constexpr (kSteps == 1) {
      // All words first, so that one broadcast at a time is live: twelve accumulators leave AVX2
      // four registers.
      typename Isa::W w[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) w[v] = Isa::word(unit + vector_offset<NV>(v, half_bytes));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename Isa::W a = Isa::broadcast(x[r] + x_index);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) tile.acc[r][v] = Isa::dot(w[v], a, tile.acc[r][v]);
      }
    } else if constexpr (Isa::kStepwise && (R * 4 <= kSteps || (kSteps == 2 && NV == 2))) {
      run_unit<Isa, C>(unit, half_bytes, x, x_index, tile);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        Isa::template decode<C>(
            unit + vector_offset<NV>(v, half_bytes), [&](int j, typename Isa::W w) __attribute__((
                                                         always_inline)) {
#pragma GCC unroll 16
              for (int r = 0; r < R; ++r) {
                tile.acc[r][v] = Isa::dot(w, Isa::broadcast(x[r] + x_index + j), tile.acc[r][v]);
              }
            });
      }
    }
    x_index += kSteps;
  }
}

/// c = fma(scale, chain, c) for every accumulator of the finished segment that began at `k`: any
/// scales, zero points and block scales of the rows.
template <int R, int NV>
[[gnu::always_inline]] inline void finish_segment(const Panel& p, uint32_t k, int first_column,
                                                  const RowOperand* rows, Tile<R, NV>& tile,
                                                  float* c) {
  const int64_t group = p.group > 0 ? k / static_cast<uint32_t>(p.group) : 0;
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const int column = first_column + v * Isa::kLanes;
    const typename Isa::V scale = Isa::scales(p.scale, p.scales, group, column);
    const typename Isa::V zero = p.zeros != nullptr
                                     ? Isa::negated_zeros(p.zeros + group * kPanelCols + column)
                                     : Isa::zero();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      typename Isa::V sum = tile.acc[r][v];
      typename Isa::V s = scale;
      if (p.zeros != nullptr) {
        const float x_sum = rows[r].segment_sums[k / static_cast<uint32_t>(p.segment)];
        sum = Isa::fma(zero, Isa::splat(x_sum), sum);
      }
      if (rows[r].block_scales != nullptr) {
        s = Isa::mul(s, Isa::splat(rows[r].block_scales[k / 128]));
      }
      float* out = c + r * kPanelCols + v * Isa::kLanes;
      Isa::store(out, Isa::fma(s, sum, Isa::load(out)));
    }
  }
}

/// The same where `scales` are f32 already and nothing else takes part.
template <int R, int NV>
[[gnu::always_inline]] inline void finish_plain_segment(const float* scales, Tile<R, NV>& tile,
                                                        float* c) {
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const typename Isa::V scale = Isa::load(scales + v * Isa::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float* out = c + r * kPanelCols + v * Isa::kLanes;
      Isa::store(out, Isa::fma(scale, tile.acc[r][v], Isa::load(out)));
    }
  }
}

/// Decoded codes with one f32 scale a column and segment (Panel::wide_scales).
template <Code C, int R, int NV>
[[gnu::noinline]] void multiply_wide_tile(const Panel& p, int64_t k0, int64_t k1, int first_column,
                                          const RowOperand* rows, float* c) {
  const typename Isa::X* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const typename Isa::X*>(rows[r].x);
  const int64_t half_bytes = p.half_bytes;
  const std::byte* codes = p.codes + first_column / 16 * half_bytes + first_column % 16 * 4;
  const float* scales = p.wide_scales + first_column;
  const int64_t segment = p.segment;
  const int64_t run = segment < kBlockK ? segment : kBlockK;
  c += first_column;
  Tile<R, NV> tile;
  tile.zero();
  if (k0 == 0) tile.store(c);
  for (int64_t k = k0; k < k1; scales += kPanelCols) {
    const int64_t end = k + segment < k1 ? k + segment : k1;
    tile.zero();
    for (; k < end; k += run) {
      const int64_t at = k - k0;
      run_units<C, R, NV>(codes + (at >> 5) * 2 * half_bytes, half_bytes, (at & 31) / kUnitK<C>,
                          run / kUnitK<C>, x, k / Isa::kPerDot, tile);
    }
    finish_plain_segment<R, NV>(scales, tile, c);
  }
}

/// R rows x NV vectors starting at `first_column`, K in [k0, k1).
template <Code C, int R, int NV>
[[gnu::noinline]] void multiply_tile(const Panel& p, int64_t k0, int64_t k1, int first_column,
                                     const RowOperand* rows, float* c) {
  const typename Isa::X* x[R];
  for (int r = 0; r < R; ++r) x[r] = static_cast<const typename Isa::X*>(rows[r].x);
  const int64_t half_bytes = p.half_bytes;
  const std::byte* half = p.codes + first_column / 16 * half_bytes + first_column % 16 * 4;
  c += first_column;
  Tile<R, NV> tile;
  tile.zero();
  if (p.segment == 0) {
    if (k0 != 0) tile.load(c);
    for (int64_t k = k0; k < k1; k += kBlockK) {
      run_units<C, R, NV>(half + (k - p.first_k) / kBlockK * 2 * half_bytes, half_bytes, 0,
                          kBlockK / kUnitK<C>, x, k / Isa::kPerDot, tile);
    }
    tile.store(c);
    return;
  }
  if (k0 == 0) tile.store(c);
  const auto first_k = static_cast<uint32_t>(p.first_k);
  const auto segment = static_cast<uint32_t>(p.segment);
  const auto last = static_cast<uint32_t>(k1);
  auto k = static_cast<uint32_t>(k0);
  if constexpr (R == 1 && kUnitK<C> == 8) {
    // Eight K a word make long chains of dependent sums; a second segment beside the first hides
    // their latency. Chains are finished in the same order, so the bits are the same.
    const auto run_unit_at = [&](uint32_t at, Tile<R, NV> & sums) __attribute__((always_inline)) {
      run_units<C, R, NV>(half + int64_t{(at - first_k) / kBlockK} * 2 * half_bytes, half_bytes,
                          at % kBlockK / kUnitK<C>, 1, x, at / Isa::kPerDot, sums);
    };
    for (; segment <= 128 && k + 2 * segment <= last; k += 2 * segment) {
      Tile<R, NV> second;
      tile.zero();
      second.zero();
      for (uint32_t i = 0; i < segment; i += kUnitK<C>) {
        run_unit_at(k + i, tile);
        run_unit_at(k + segment + i, second);
      }
      finish_segment<R, NV>(p, k, first_column, rows, tile, c);
      finish_segment<R, NV>(p, k + segment, first_column, rows, second, c);
    }
  }
  while (k < last) {
    const uint32_t start = k;
    const uint32_t end = k + segment < last ? k + segment : last;
    tile.zero();
    while (k < end) {
      const uint32_t at = k % kBlockK;
      const uint32_t n = end - k < kBlockK - at ? end - k : static_cast<uint32_t>(kBlockK) - at;
      run_units<C, R, NV>(half + int64_t{(k - first_k) / kBlockK} * 2 * half_bytes, half_bytes,
                          at / kUnitK<C>, n / kUnitK<C>, x, k / Isa::kPerDot, tile);
      k += n;
    }
    finish_segment<R, NV>(p, start, first_column, rows, tile, c);
  }
}

/// One tile of r <= R rows, NV vectors from `first_column` on.
template <Code C, int NV, int R>
[[gnu::always_inline]] inline void multiply_up_to(int64_t r, const Panel& p, int64_t k0, int64_t k1,
                                                  int first_column, const RowOperand* rows,
                                                  float* c) {
  if constexpr (R > 1) {
    if (r < R) return multiply_up_to<C, NV, R - 1>(r, p, k0, k1, first_column, rows, c);
  }
  if constexpr (C == Isa::kScratchCode) {
    if (p.wide_scales != nullptr && rows[0].block_scales == nullptr) {
      multiply_wide_tile<C, R, NV>(p, k0, k1, first_column, rows, c);
      return;
    }
  }
  multiply_tile<C, R, NV>(p, k0, k1, first_column, rows, c);
}

/// Tiles of nearly equal height (13 rows of at most 12 go as 7 + 6), over NV vectors of columns.
template <Code C, int NV, int kRows>
[[gnu::always_inline]] inline void multiply_columns(const Panel& p, int64_t k0, int64_t k1,
                                                    int first_column, const RowOperand* rows,
                                                    int64_t num_rows, float* c) {
  for (int64_t tiles = (num_rows + kRows - 1) / kRows; tiles > 0; --tiles) {
    const int64_t r = (num_rows + tiles - 1) / tiles;
    multiply_up_to<C, NV, kRows>(r, p, k0, k1, first_column, rows, c);
    rows += r;
    c += r * kPanelCols;
    num_rows -= r;
  }
}

/// All 32 columns at once where the registers allow it. Else one half for all rows, then the other:
/// half a chunk of weights stays in L1 meanwhile.
template <Code C, int kRows>
void multiply(const Panel& p, int64_t k0, int64_t k1, const RowOperand* rows, int64_t num_rows,
              float* c) {
  [[maybe_unused]] const typename Isa::DenormalGuard guard{};
  constexpr int kWideVectors = static_cast<int>(kPanelCols) / Isa::kLanes;
  constexpr int kWide = Isa::kWideRows < kRows ? Isa::kWideRows : kRows;
  if constexpr (kWide > 0) {
    if (num_rows <= kWide || kWide == kRows) {
      multiply_columns<C, kWideVectors, kWide>(p, k0, k1, 0, rows, num_rows, c);
      return;
    }
  }
  if constexpr (kWide < kRows) {
    multiply_columns<C, kWideVectors / 2, kRows>(p, k0, k1, 0, rows, num_rows, c);
    multiply_columns<C, kWideVectors / 2, kRows>(p, k0, k1, 16, rows, num_rows, c);
  }
}

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
  constexpr int64_t kWords = kUnitK<C> / Isa::kPerDot;
  for (int64_t k = k0; k < k1; k += kBlockK) {
    const std::byte* codes = p.codes + (k - p.first_k) / kBlockK * 2 * p.half_bytes;
    std::byte* out = scratch + (k - k0) / kBlockK * 2 * kScratchHalf;
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t u = 0; u < kBlockK / kUnitK<C>; ++u) {
        __builtin_prefetch(codes + half * p.half_bytes + u * kUnitBytes + kPrefetchBytes);
#pragma GCC unroll 4
        for (int v = 0; v < 16 / Isa::kLanes; ++v) {
          const int64_t column_bytes = v * Isa::kLanes * 4;
          Isa::template decode<C>(
              codes + half * p.half_bytes + u * kUnitBytes + column_bytes,
              ScratchStore{out + half * kScratchHalf + u * kWords * kUnitBytes + column_bytes});
        }
      }
    }
  }
}

/// Enters the products of one code into the table. `kDirect` rows at most decode in registers; 0:
/// any number reads the codes in place, kRows at a time.
template <Code C, int kDirect, int kRows = kDirect == 0 ? Isa::kMaxRows : kDirect>
void add_code(Kernels& k) {
  constexpr int kIndex = static_cast<int>(C);
  k.multiply[kIndex] = multiply<C, kRows>;
  if constexpr (kDirect > 0) k.decode[kIndex] = decode_panel<C>;
  k.widen_scales = widen_scales;
  k.factor[kIndex] = C == Code::e4m3 ? Isa::kE4m3Factor : 1.0f;
}
