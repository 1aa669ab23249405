// AMX-BF16 on top of the AVX-512 BF16 table: products of at most 32 rows x 32 columns as 2 x 2
// tiles. Tiles serve every row count, so that a row has the same bits alone and in any batch; only
// the order inside a tile product (even and odd K apart) differs from vdpbf16ps.
#include "linear/kernels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__AVX512VBMI__)

#include <immintrin.h>

namespace moekit::linear {
namespace {
namespace amx {

#include "linear/avx512_bf16-inl.h"
#include "linear/tile-inl.h"

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;
constexpr int64_t kSumStride = kPanelCols * 4;

/// Palette 1: rows and bytes a row of each tile register (Intel SDM, LDTILECFG).
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// Tiles 0-3 hold sums (upper left, upper right, lower left, lower right), 4 and 5 rows, 6 and 7
/// weights.
TileConfig config_of(int64_t upper, int64_t lower, int64_t step) {
  TileConfig c;
  const auto set = [&](int tile, int64_t rows, int64_t bytes) {
    if (rows == 0) return;  // a tile without rows may have no bytes either: LDTILECFG faults (#GP)
    c.rows[tile] = static_cast<uint8_t>(rows);
    c.row_bytes[tile] = static_cast<uint16_t>(bytes);
  };
  for (int tile = 0; tile < 4; ++tile) set(tile, tile < 2 ? upper : lower, kTileBytes);
  set(4, upper, step * 2);
  set(5, lower, step * 2);
  for (int tile = 6; tile < 8; ++tile) set(tile, step / 2, kTileBytes);
  return c;
}

/// At most 32 rows of one product.
struct Block {
  const Panel& panel;
  const RowOperand* rows;
  int64_t upper;   ///< rows of the upper tiles, 1 to 16
  int64_t lower;   ///< of the lower ones; 0: there are none
  int64_t step;    ///< K of one tile product: 32, or 16 where segments are no longer
  int64_t stride;  ///< bytes between rows, 0 when they lie anywhere
  alignas(64) std::byte gathered[2 * kTileRows * kTileBytes];

  /// Equal distances need no copy.
  static int64_t stride_of(const RowOperand* rows, int64_t n) {
    const auto at = [&](int64_t i) { return static_cast<const std::byte*>(rows[i].x); };
    if (n == 1) return kTileBytes;
    const int64_t stride = at(1) - at(0);
    for (int64_t i = 2; i < n; ++i) {
      if (at(i) - at(i - 1) != stride) return 0;
    }
    return stride;
  }

  void load_rows(int64_t k) {
    const std::byte* first = static_cast<const std::byte*>(rows[0].x) + k * 2;
    int64_t distance = stride;
    if (stride == 0) {
      for (int64_t i = 0; i < upper + lower; ++i) {
        const std::byte* from = static_cast<const std::byte*>(rows[i].x) + k * 2;
        // A step of 16 reads 32 bytes; operands are padded to whole blocks of 32 K.
        __builtin_memcpy(gathered + i * kTileBytes, from, static_cast<size_t>(step) * 2);
      }
      first = gathered;
      distance = kTileBytes;
    }
    _tile_loadd(4, first, distance);
    if (lower > 0) _tile_loadd(5, first + upper * distance, distance);
  }

  void multiply_step(int64_t k) {
    const std::byte* weights = panel.codes + (k - panel.first_k) / kBlockK * 2 * panel.half_bytes +
                               k % kBlockK / 2 * kUnitBytes;
    load_rows(k);
    _tile_loadd(6, weights, kUnitBytes);
    _tile_dpbf16ps(0, 4, 6);
    if (lower > 0) _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, weights + panel.half_bytes, kUnitBytes);
    _tile_dpbf16ps(1, 4, 7);
    if (lower > 0) _tile_dpbf16ps(3, 5, 7);
  }

  void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (lower > 0) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  void load_sums(const float* c) {
    _tile_loadd(0, c, kSumStride);
    _tile_loadd(1, c + 16, kSumStride);
    if (lower > 0) {
      _tile_loadd(2, c + kTileRows * kPanelCols, kSumStride);
      _tile_loadd(3, c + kTileRows * kPanelCols + 16, kSumStride);
    }
  }
  void store_sums(float* c) {
    _tile_stored(0, c, kSumStride);
    _tile_stored(1, c + 16, kSumStride);
    if (lower > 0) {
      _tile_stored(2, c + kTileRows * kPanelCols, kSumStride);
      _tile_stored(3, c + kTileRows * kPanelCols + 16, kSumStride);
    }
  }
};

/// c = fma(scale, sums, c) row by row.
void finish_rows(const Panel& p, int64_t k, const RowOperand* rows, int64_t n, const float* sums,
                 float* c) {
  for (int64_t r = 0; r < n; ++r) {
    Tile<1, 2> tile;
    Tile<1, 2> total;
    tile.load(sums + r * kPanelCols);
    total.load(c + r * kPanelCols);
    finish_segment(p, static_cast<uint32_t>(k), 0, rows + r, tile, total);
    total.store(c + r * kPanelCols);
  }
}

void multiply_block(Block& b, int64_t k0, int64_t k1, float* c) {
  const Panel& p = b.panel;
  const int64_t n = b.upper + b.lower;
  const TileConfig config = config_of(b.upper, b.lower, b.step);
  _tile_loadconfig(&config);
  if (p.segment == 0) {
    if (k0 == 0) {
      b.zero_sums();
    } else {
      b.load_sums(c);
    }
    for (int64_t k = k0; k < k1; k += b.step) b.multiply_step(k);
    b.store_sums(c);
    return;
  }
  alignas(64) float sums[2 * kTileRows * kPanelCols];
  if (k0 == 0) __builtin_memset(c, 0, static_cast<size_t>(n * kSumStride));
  for (int64_t k = k0; k < k1;) {
    const int64_t start = k;
    const int64_t end = k + p.segment < k1 ? k + p.segment : k1;
    b.zero_sums();
    for (; k < end; k += b.step) b.multiply_step(k);
    b.store_sums(sums);
    finish_rows(p, start, b.rows, n, sums, c);
  }
}

/// bf16 panels, packed or decoded.
void tile_multiply(const Panel& p, int64_t k0, int64_t k1, const RowOperand* rows, int64_t num_rows,
                   float* c) {
  const int64_t step = p.segment != 0 && p.segment < kBlockK ? p.segment : kBlockK;
  while (num_rows > 0) {
    const int64_t n = num_rows < 2 * kTileRows ? num_rows : 2 * kTileRows;
    const int64_t upper = n < kTileRows ? n : kTileRows;
    Block b{p, rows, upper, n - upper, step, Block::stride_of(rows, n), {}};
    multiply_block(b, k0, k1, c);
    rows += n;
    c += n * kPanelCols;
    num_rows -= n;
  }
  _tile_release();
}

}  // namespace amx
}  // namespace

void fill_amx(Kernels& k) {
  using namespace amx;
  k.isa = CpuIsa::amx;
  k.direct_rows = 0;  // every other code goes through scratch
  add_decoder<Code::e4m3>(k);
  add_decoder<Code::e5m2>(k);
  add_decoder<Code::e2m1>(k);
  add_decoder<Code::int4>(k);
  add_decoder<Code::int8>(k);
  k.scratch_half_bytes = kBlockK / 2 * kUnitBytes;
  k.multiply[static_cast<int>(Code::bf16)] = tile_multiply;
  k.scratch_multiply = tile_multiply;
  // Tiles add in an order of their own, which one row must keep.
  for (MultiplyBeside& multiply : k.multiply_beside) multiply = nullptr;
}

}  // namespace moekit::linear

#else

namespace moekit::linear {
void fill_amx(Kernels&) {}
}  // namespace moekit::linear

#endif
