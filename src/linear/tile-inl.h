// Products of a panel with rows, for any instruction set. Included once by each ISA file, inside
// its own namespace, after struct Isa (its vectors and decoders). Everything here is a template or
// static, so no code compiled for one ISA can be linked into another.
//
// Order of every sum: K ascending, one chain per (row, column); where there are scales inside K,
// one chain per segment and then total = fma(scale, chain, total). Tile heights differ in how many
// rows share a decoded word and how many chains run side by side, never in this order.

template <Code C>
constexpr int64_t kUnitK = unit_k(C);
/// Words of weights that a unit makes for each vector of columns.
template <Code C>
constexpr int kSteps = static_cast<int>(kUnitK<C>) / Isa::kPerDot;

/// f(j, w) for the words of a unit in ascending order of K.
template <Code C, int J = 0, typename F>
[[gnu::always_inline]] inline void each_word(const typename Isa::template Unit<C>& unit, F&& f) {
  f(J, Isa::template step<C, J>(unit));
  if constexpr (J + 1 < kSteps<C>) each_word<C, J + 1>(unit, f);
}

#include "linear/ahead-inl.h"
#include "linear/scratch-inl.h"

/// Where a tile's vector v lies: in which of the panels side by side, and from which column on.
constexpr int panel_of(int v) { return v * Isa::kLanes / static_cast<int>(kPanelCols); }
constexpr int column_of(int v) { return v * Isa::kLanes % static_cast<int>(kPanelCols); }
/// Panels that NV vectors reach into.
template <int NV>
constexpr int kPanelsOf = panel_of(NV - 1) + 1;

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
  /// `c_stride`: floats from the sums of a panel to those of the one beside it.
  [[gnu::always_inline]] inline void store(float* c, int64_t c_stride = 0) const {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        Isa::store(c + r * kPanelCols + panel_of(v) * c_stride + column_of(v), acc[r][v]);
      }
    }
  }
};

/// Bytes from a tile's first vector of codes to vector v: those past 16 columns lie in the next
/// half, those past 32 in the panel beside.
[[gnu::always_inline]] inline int64_t vector_offset(int v, const Panel& p) {
  return panel_of(v) * p.stride + column_of(v) / 16 * p.half_bytes + column_of(v) % 16 * 4;
}

/// What a tile of R rows by NV vectors asks for at a time.
template <bool kSegments, int R, int NV>
using AskedOf = BlockAhead<locality(kSegments, R, kPanelsOf<NV>), kPanelsOf<NV>>;

/// Words of K J of a unit and those after it, for every vector of columns. Worth it where chains
/// are long for their number (R * NV sums of kSteps<C> steps), and where many rows share a
/// broadcast.
template <Code C, int J, int R, int NV>
[[gnu::always_inline]] inline void run_steps(const typename Isa::template Unit<C> (&units)[NV],
                                             const typename Isa::X* const* x, int64_t x_index,
                                             Tile<R, NV>& tile) {
  if constexpr (R > 2) {  // all words first: one broadcast at a time is live
    typename Isa::W w[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) w[v] = Isa::template step<C, J>(units[v]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const typename Isa::W a = Isa::broadcast(x[r] + x_index + J);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) tile.acc[r][v] = Isa::dot(w[v], a, tile.acc[r][v]);
    }
  } else {
    typename Isa::W a[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) a[r] = Isa::broadcast(x[r] + x_index + J);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const typename Isa::W w = Isa::template step<C, J>(units[v]);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) tile.acc[r][v] = Isa::dot(w, a[r], tile.acc[r][v]);
    }
  }
  if constexpr (J + 1 < kSteps<C>) run_steps<C, J + 1>(units, x, x_index, tile);
}

/// Units [first, first + num_units) of the block at `codes`, into the tile.
template <Code C, bool kSegments, int R, int NV>
[[gnu::always_inline]] inline void run_units(const Panel& p, const std::byte* codes, int64_t first,
                                             int64_t num_units, const typename Isa::X* const* x,
                                             int64_t x_index,
                                             const AskedOf<kSegments, R, NV>& ahead,
                                             Tile<R, NV>& tile) {
#pragma GCC unroll 2
  for (int64_t u = first; u < first + num_units; ++u) {
    const std::byte* unit = codes + u * kUnitBytes;
    ahead.unit(u);
    if constexpr (kSteps<C> == 1 || Isa::stepwise(R, NV, kSteps<C>)) {
      typename Isa::template Unit<C> units[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        units[v] = Isa::template unit<C>(unit + vector_offset(v, p));
      }
      run_steps<C, 0>(units, x, x_index, tile);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        const auto add = [&](int j, typename Isa::W w) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            tile.acc[r][v] = Isa::dot(w, Isa::broadcast(x[r] + x_index + j), tile.acc[r][v]);
          }
        };
        each_word<C>(Isa::template unit<C>(unit + vector_offset(v, p)), add);
      }
    }
    x_index += kSteps<C>;
  }
}

/// total = fma(scale, chain, total) for every accumulator of the finished segment that began at
/// `k`: any scales, zero points and block scales of the rows.
template <int R, int NV>
[[gnu::always_inline]] inline void finish_segment(const Panel& p, uint32_t k, int first_column,
                                                  const RowOperand* rows, const Tile<R, NV>& sums,
                                                  Tile<R, NV>& total) {
  const int64_t group = p.group > 0 ? k / static_cast<uint32_t>(p.group) : 0;
  const bool plain = p.zeros == nullptr && rows[0].block_scales == nullptr;
  const float* wide =
      p.wide_scales == nullptr
          ? nullptr
          : p.wide_scales + (k - p.wide_k) / static_cast<uint32_t>(p.segment) * kPanelCols;
  if (p.next != nullptr && p.scale != Scale::f32_panel) {
#pragma GCC unroll 4
    for (int i = 0; i < kPanelsOf<NV>; ++i) {
      const int64_t ahead = i * p.stride + kScalesAheadBytes;
      __builtin_prefetch(p.scales + group * kPanelCols * bytes_of(p.scale) + ahead);
      if (p.zeros != nullptr) __builtin_prefetch(p.zeros + group * kPanelCols + ahead);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const int column = first_column + column_of(v);
    const int64_t beside = panel_of(v) * p.stride;
    const typename Isa::V scale = wide != nullptr
                                      ? Isa::load(wide + column)
                                      : Isa::scales(p.scale, p.scales + beside, group, column);
    if (plain) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        total.acc[r][v] = Isa::fma(scale, sums.acc[r][v], total.acc[r][v]);
      }
      continue;
    }
    const typename Isa::V zero =
        p.zeros != nullptr ? Isa::negated_zeros(p.zeros + beside + group * kPanelCols + column)
                           : Isa::zero();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      typename Isa::V sum = sums.acc[r][v];
      typename Isa::V s = scale;
      if (p.zeros != nullptr) {
        const float x_sum = rows[r].segment_sums[k / static_cast<uint32_t>(p.segment)];
        sum = Isa::fma(zero, Isa::splat(x_sum), sum);
      }
      if (rows[r].block_scales != nullptr) {
        s = Isa::mul(s, Isa::splat(rows[r].block_scales[k / 128]));
      }
      total.acc[r][v] = Isa::fma(s, sum, total.acc[r][v]);
    }
  }
}

/// What a tile reads: rows of R operands, and a panel from `first_column` on.
template <int R>
struct TileInput {
  const Panel& panel;
  const RowOperand* rows;
  int first_column;
  Ahead ahead;
  const std::byte* half = nullptr;
  const typename Isa::X* x[R] = {};

  TileInput(const Panel& p, int column, const RowOperand* r, const Ahead& a)
      : panel(p), rows(r), first_column(column), ahead(a) {
    half = p.codes + column / 16 * p.half_bytes + column % 16 * 4;
    for (int i = 0; i < R; ++i) x[i] = static_cast<const typename Isa::X*>(rows[i].x);
  }
  /// What is asked for while the block at `codes` is read.
  template <bool kSegments, int NV>
  [[gnu::always_inline]] inline AskedOf<kSegments, R, NV> asked(const Ahead& a,
                                                                const std::byte* codes) const {
    return a.of<locality(kSegments, R, kPanelsOf<NV>), kPanelsOf<NV>>(codes, panel.stride);
  }
  /// The block that holds K index k.
  [[gnu::always_inline]] inline const std::byte* block(uint32_t k) const {
    return half +
           int64_t{(k - static_cast<uint32_t>(panel.first_k)) / kBlockK} * 2 * panel.half_bytes;
  }
};

/// Segments from k on, S at a time: one row alone has few chains of dependent sums, and those of
/// the next segments hide their latency. Segments are finished in order, so the bits are the same.
/// Returns where it stopped: fewer than S are left.
template <Code C, int S, int R, int NV>
[[gnu::always_inline]] inline uint32_t run_segments(const TileInput<R>& in, uint32_t k,
                                                    uint32_t last, Tile<R, NV>& total) {
  const Panel& p = in.panel;
  const auto segment = static_cast<uint32_t>(p.segment);
  constexpr uint32_t kBlock = static_cast<uint32_t>(kBlockK);
  const uint32_t run = segment < kBlock ? segment : kBlock;
  Ahead ahead = in.ahead;
  // All S places move together: whole windows of them are asked for.
  const int64_t window = int64_t{S} * segment * 2 * p.half_bytes / kBlockK;
  ahead.bytes = (ahead.bytes + window - 1) / window * window;
  while (k < last && last - k >= S * segment) {
    Tile<R, NV> sums[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) sums[s].zero();
    for (uint32_t i = 0; i < segment; i += run) {
      const std::byte* codes[S];
      AskedOf<true, R, NV> asked[S];
#pragma GCC unroll 4
      for (uint32_t s = 0; s < S; ++s) {
        codes[s] = in.block(k + s * segment + i);
        asked[s] = in.template asked<true, NV>(ahead, codes[s]);
      }
      for (uint32_t j = 0; j < run; j += kUnitK<C>) {
#pragma GCC unroll 4
        for (uint32_t s = 0; s < S; ++s) {
          const uint32_t at = k + s * segment + i + j;
          run_units<C, true>(p, codes[s], at % kBlock / kUnitK<C>, 1, in.x, at / Isa::kPerDot,
                             asked[s], sums[s]);
        }
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s) {
      finish_segment(p, k, in.first_column, in.rows, sums[s], total);
      k += segment;
    }
  }
  return k;
}

/// Segments are whole blocks or this (see segment_of()).
constexpr uint32_t kMinSegment = 16;

/// Whether weights come with these scales and a group is a segment: products of one or two rows
/// have a loop of their own.
constexpr bool has_plain_loop(Code code, Scale scale) {
  switch (code) {
    case Code::e2m1: return scale == Scale::e8m0 || scale == Scale::e4m3;
    case Code::e4m3:
    case Code::e5m2: return scale == Scale::e8m0 || scale == Scale::f32_panel;
    case Code::int4:
    case Code::int8: return scale == Scale::bf16 || scale == Scale::f16 || scale == Scale::f32;
    default: return false;
  }
}

/// Whole segments whose scales lie in order, without zero points or scales of the rows. A row alone
/// has few instructions to hide divisions and choices of formats behind. Returns where it stopped.
template <Code C, Scale S, int R, int NV>
[[gnu::always_inline]] inline uint32_t run_plain_segments(const TileInput<R>& in, uint32_t k,
                                                          uint32_t last, Tile<R, NV>& total) {
  const Panel& p = in.panel;
  constexpr uint32_t kBlock = static_cast<uint32_t>(kBlockK);
  constexpr int64_t kStride = S == Scale::f32_panel ? 4 : kPanelCols * bytes_of(S);
  const auto segment = static_cast<uint32_t>(p.segment);
  const Ahead ahead = in.ahead;
  const std::byte* scales = p.scales + k / segment * kStride;
  const std::byte* codes = in.block(k);
  for (; last - k >= segment; scales += kStride) {
    Tile<R, NV> sums;
    sums.zero();
    if (segment < kBlock) {
      run_units<C, true>(p, codes, k % kBlock / kUnitK<C>, kMinSegment / kUnitK<C>, in.x,
                         k / Isa::kPerDot, in.template asked<true, NV>(ahead, codes), sums);
      k += kMinSegment;
      if (k % kBlock == 0) codes += 2 * p.half_bytes;
    } else {
      for (uint32_t end = k + segment; k < end; k += kBlock, codes += 2 * p.half_bytes) {
        run_units<C, true>(p, codes, 0, kBlockK / kUnitK<C>, in.x, k / Isa::kPerDot,
                           in.template asked<true, NV>(ahead, codes), sums);
      }
    }
    if constexpr (S != Scale::f32_panel) {
#pragma GCC unroll 4
      for (int i = 0; i < kPanelsOf<NV>; ++i) {
        __builtin_prefetch(scales + i * p.stride + kScalesAheadBytes);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const typename Isa::V scale =
          Isa::scales(S, scales + panel_of(v) * p.stride, 0, in.first_column + column_of(v));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        total.acc[r][v] = Isa::fma(scale, sums.acc[r][v], total.acc[r][v]);
      }
    }
  }
  return k;
}

/// The same for the panel's own scales, where there is such a loop.
template <Code C, int R, int NV>
[[gnu::always_inline]] inline uint32_t run_where_plain(const TileInput<R>& in, uint32_t k,
                                                       uint32_t last, Tile<R, NV>& total) {
  const Panel& p = in.panel;
  const auto run = [&]<Scale S>() __attribute__((always_inline)) {
    if constexpr (has_plain_loop(C, S)) {
      if (p.scale == S) k = run_plain_segments<C, S>(in, k, last, total);
    }
  };
  if (p.zeros != nullptr || p.wide_scales != nullptr || in.rows[0].block_scales != nullptr ||
      p.group != p.segment) {
    return k;
  }
  run.template operator()<Scale::e8m0>();
  run.template operator()<Scale::e4m3>();
  run.template operator()<Scale::f32_panel>();
  run.template operator()<Scale::f32>();
  run.template operator()<Scale::f16>();
  run.template operator()<Scale::bf16>();
  return k;
}

/// One segment at a time; the last one may be cut off by `last`.
template <Code C, int R, int NV>
[[gnu::always_inline]] inline void run_single_segments(const TileInput<R>& in, uint32_t k,
                                                       uint32_t last, Tile<R, NV>& total) {
  const Panel& p = in.panel;
  constexpr uint32_t kBlock = static_cast<uint32_t>(kBlockK);
  while (k < last) {
    const uint32_t start = k;
    const uint32_t end = last - k > static_cast<uint32_t>(p.segment) ? k + p.segment : last;
    Tile<R, NV> sums;
    sums.zero();
    // Counts that the compiler sees: a loop's end that is foretold wrong leaves memory waiting.
    if (p.segment < kBlockK) {
      const std::byte* codes = in.block(k);
      run_units<C, true>(p, codes, k % kBlock / kUnitK<C>, kMinSegment / kUnitK<C>, in.x,
                         k / Isa::kPerDot, in.template asked<true, NV>(in.ahead, codes), sums);
      k += kMinSegment;
    }
    for (; k < end; k += kBlock) {
      const std::byte* codes = in.block(k);
      run_units<C, true>(p, codes, 0, kBlockK / kUnitK<C>, in.x, k / Isa::kPerDot,
                         in.template asked<true, NV>(in.ahead, codes), sums);
    }
    finish_segment(p, start, in.first_column, in.rows, sums, total);
  }
}

/// R rows x NV vectors starting at `first_column`, K in [k0, k1).
template <Code C, int R, int NV>
[[gnu::noinline]] void multiply_tile(const Panel& p, int64_t k0, int64_t k1, int first_column,
                                     const RowOperand* rows, const Ahead& ahead, float* c,
                                     int64_t c_stride = 0) {
  const TileInput<R> in(p, first_column, rows, ahead);
  c += first_column;
  Tile<R, NV> tile;
  tile.zero();
  if (k0 != 0) tile.load(c);
  if (p.segment == 0) {
    for (int64_t k = k0; k < k1; k += kBlockK) {
      const std::byte* codes = in.block(static_cast<uint32_t>(k));
      run_units<C, false>(p, codes, 0, kBlockK / kUnitK<C>, in.x, k / Isa::kPerDot,
                          in.template asked<false, NV>(ahead, codes), tile);
    }
  } else {
    auto k = static_cast<uint32_t>(k0);
    const auto last = static_cast<uint32_t>(k1);
    constexpr int kMany = Isa::segments_at_once(R, kSteps<C>);
    if constexpr (kMany > 1) {
      if (kMany * p.segment <= kScratchK) k = run_segments<C, kMany>(in, k, last, tile);
    }
    if constexpr (Isa::loops_plainly(R)) k = run_where_plain<C>(in, k, last, tile);
    run_single_segments<C>(in, k, last, tile);
  }
  tile.store(c, c_stride);
}

/// One tile of r <= R rows, NV vectors from `first_column` on.
template <Code C, int NV, int R>
[[gnu::always_inline]] inline void multiply_up_to(int64_t r, const Panel& p, int64_t k0, int64_t k1,
                                                  int first_column, const RowOperand* rows,
                                                  const Ahead& ahead, float* c) {
  if constexpr (R > 1) {
    if (r < R) return multiply_up_to<C, NV, R - 1>(r, p, k0, k1, first_column, rows, ahead, c);
  }
  multiply_tile<C, R, NV>(p, k0, k1, first_column, rows, ahead, c);
}

/// Tiles of nearly equal height (13 rows of at most 12 go as 7 + 6), over NV vectors of columns.
template <Code C, int NV, int kRows>
[[gnu::always_inline]] inline void multiply_columns(const Panel& p, int64_t k0, int64_t k1,
                                                    int first_column, const RowOperand* rows,
                                                    int64_t num_rows, Ahead ahead, float* c) {
  constexpr int64_t kUnits = kBlockK / kUnitK<C>;
  const int64_t all = (num_rows + kRows - 1) / kRows;
  for (int64_t tile = 0; tile < all; ++tile) {
    const int64_t tiles = all - tile;
    const int64_t r = (num_rows + tiles - 1) / tiles;
    if (ahead.bytes != 0) {
      ahead.first = static_cast<uint32_t>(tile * kUnits / all);
      ahead.count = static_cast<uint32_t>((tile + 1) * kUnits / all) - ahead.first;
    }
    if (p.soon != nullptr && first_column == 0) ask_for_share(p, tile, all);
    multiply_up_to<C, NV, kRows>(r, p, k0, k1, first_column, rows, ahead, c);
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
  Ahead ahead;
  if (p.next != nullptr) {
    ahead.bytes = (k1 - k0) / kBlockK * 2 * p.half_bytes;
    if (k0 == 0 && k1 == p.last_k) {
      const bool far = locality(p.segment != 0, static_cast<int>(num_rows), 1) != 3;
      const int64_t most = far ? kFarAheadBytes : kAheadBytes;
      if (ahead.bytes > most) ahead.bytes = most;
    }
    ahead.end = p.codes + (p.last_k - p.first_k) / kBlockK * 2 * p.half_bytes;
    ahead.next = p.next;
    if (k0 == 0) ask_for_terms(p, 0);
  }
  if constexpr (Isa::kShortRows > 0 && Isa::kShortRows < kWide) {
    if (p.segment != 0 && p.segment <= kBlockK) {
      multiply_columns<C, kWideVectors, Isa::kShortRows>(p, k0, k1, 0, rows, num_rows, ahead, c);
      return;
    }
  }
  if constexpr (kWide > 0) {
    if (num_rows <= kWide || kWide == kRows) {
      multiply_columns<C, kWideVectors, kWide>(p, k0, k1, 0, rows, num_rows, ahead, c);
      return;
    }
  }
  if constexpr (kWide < kRows) {
    multiply_columns<C, kWideVectors / 2, kRows>(p, k0, k1, 0, rows, num_rows, ahead, c);
    multiply_columns<C, kWideVectors / 2, kRows>(p, k0, k1, 16, rows, num_rows, Ahead{}, c);
  }
}

/// R rows by kPanels panels side by side.
template <Code C, int R, int kPanels>
[[gnu::always_inline]] inline void multiply_together(const Panel& p, const RowOperand* rows,
                                                     float* c, int64_t c_stride) {
  constexpr int kVectors = kPanels * static_cast<int>(kPanelCols) / Isa::kLanes;
  Ahead ahead;
  ahead.bytes = kBesideAheadBytes;
  ahead.count = static_cast<uint32_t>(kBlockK / kUnitK<C>);
  ahead.end = p.codes + p.last_k / kBlockK * 2 * p.half_bytes;
  ahead.next = p.next;
  for (int i = 0; i < kPanels; ++i) ask_for_terms(p, i * p.stride);
  multiply_tile<C, R, kVectors>(p, 0, p.last_k, 0, rows, ahead, c, c_stride);
}

/// Four panels with one row, or two with up to kMaxRowsBeside.
template <Code C>
void multiply_beside(const Panel& p, int64_t num_panels, const RowOperand* rows, int64_t num_rows,
                     float* c, int64_t c_stride) {
  [[maybe_unused]] const typename Isa::DenormalGuard guard{};
  if (num_panels == 4) return multiply_together<C, 1, 4>(p, rows, c, c_stride);
  if (num_rows == 1) return multiply_together<C, 1, 2>(p, rows, c, c_stride);
  if (num_rows == 2) return multiply_together<C, 2, 2>(p, rows, c, c_stride);
  if (num_rows == 3) return multiply_together<C, 3, 2>(p, rows, c, c_stride);
  multiply_together<C, 4, 2>(p, rows, c, c_stride);
}

/// Enters the decoder of one code into the table: its products go through scratch.
template <Code C>
void add_decoder(Kernels& k) {
  k.decode[static_cast<int>(C)] = decode_panel<C>;
}

/// Enters the products of one code into the table. `kDirect` rows at most decode in registers; 0:
/// any number reads the codes in place, kRows at a time.
template <Code C, int kDirect, int kRows = kDirect == 0 ? Isa::kMaxRows : kDirect>
void add_code(Kernels& k) {
  constexpr int kIndex = static_cast<int>(C);
  k.multiply[kIndex] = multiply<C, kRows>;
  if constexpr (Isa::kTakesPanelsBeside) k.multiply_beside[kIndex] = multiply_beside<C>;
  if constexpr (kDirect > 0) add_decoder<C>(k);
  k.widen_scales = widen_scales;
  k.factor[kIndex] = C == Code::e4m3 ? Isa::kE4m3Factor : 1.0f;
}
