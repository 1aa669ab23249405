// PackLoops: the inner loops of packing, for one instruction set each. All of them write the same
// bytes. Light: the ISA files include it and must not emit shared inline code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "linear/codes.h"

namespace moekit::linear {

/// Source bytes of one row that are transposed together: eight blocks of fp4, two of bf16. 32 such
/// rows make 4 KiB, which rest in the first cache between transposition and store.
inline constexpr int64_t kRowChunkBytes = 128;

/// Panels whose AWQ words of one K fill a line.
inline constexpr int kLinePanels = 4;

/// What becomes of codes in their panel (panel_spec.h).
struct CodeOrder {
  Code code = Code::bf16;
  uint32_t flip = 0;  ///< turns stored integers into centred ones, for every code of a word
};

/// 32-bit words of codes along K of a panel's columns, half by half: word w of 16 columns takes
/// kUnitBytes. Codes of 4 bits have a second copy of each half behind it, with the nibbles of each
/// byte swapped.
struct WordHalves {
  std::byte* data = nullptr;  ///< may be read from kMargin before it to kMargin behind it
  int64_t rows = 0;           ///< words of a column
  int64_t copies = 1;         ///< of each half: 1 or 2

  static constexpr int64_t kMargin = 64;
  int64_t copy_bytes() const { return rows * kUnitBytes; }
  int64_t total_bytes() const { return 2 * copies * copy_bytes(); }
};

/// Codes of 32 outputs stored with K outside: unit v of output c lies at base + v * k_stride + c *
/// element_bytes (twice as far where `paired`). A unit is one code, or a byte or 32-bit word of
/// codes along K.
struct OuterCodes {
  const std::byte* base = nullptr;  ///< paired: where the pair of output 0 starts
  int64_t k_stride = 0;
  int32_t element_bytes = 0;  ///< 1, 2 or 4; paired: 1 or 2
  bool paired = false;        ///< gate and up interleaved
  int32_t pair_shift = 0;     ///< paired: bits before the element in its pair
};

/// What may be brought into the caches while a panel is packed: hints without effect on results.
struct PackHints {
  const std::byte* next = nullptr;  ///< one piece of memory that the next panel reads
  int64_t next_bytes = 0;
  bool warm = false;  ///< this panel was the `next` of the one before
};

/// The words of the panel to come, two lines each, which may be asked for meanwhile.
struct WordsAhead {
  const std::byte* next = nullptr;  ///< null: nothing
  int64_t stride = 0;
};

struct PackLoops {
  /// Transposes `count` codes (a multiple of 32) of 32 dense rows into units from `out` on. Returns
  /// whether NaN codes of e4m3 were met; they are stored as zeros.
  bool (*rows)(const CodeOrder& order, const std::byte* const* rows, int64_t count,
               const PackHints& hints, std::byte* out) = nullptr;
  /// The same from storages with K outside.
  bool (*outer)(const CodeOrder& order, const OuterCodes& codes, int64_t count,
                std::byte* out) = nullptr;
  /// Fills words [first, first + count) of both halves: word w of the first 16 columns lies at
  /// `from` + (w - first) * stride, of the others `half` bytes behind.
  void (*split)(const std::byte* from, int64_t stride, int64_t half, uint32_t flip, int64_t first,
                int64_t count, const WordHalves& to) = nullptr;
  /// offsets[i] = where `columns` reads place i, which takes code columns[i] of each output.
  void (*locate)(Code code, const int32_t* columns, int64_t count, int64_t copy_bytes,
                 int32_t* offsets) = nullptr;
  /// Units of `count` codes (a multiple of 32) of 4 or 8 bits: a code is read so many bytes beside
  /// its own place that it lands on the one that it takes.
  void (*columns)(Code code, const WordHalves& words, const int32_t* offsets, int64_t count,
                  const WordsAhead& ahead, std::byte* out) = nullptr;
  /// AWQ: four words of eight outputs for each K, k_stride apart; as many panels as `outs`, at most
  /// kLinePanels, side by side.
  void (*awq)(const CodeOrder& order, const std::byte* base, int64_t k_stride, int64_t count,
              std::span<std::byte* const> outs) = nullptr;
  /// out[group][32] = element `group` of each of 32 dense rows of 1, 2 or 4 byte elements. Returns
  /// whether a byte has all bits of `nan_mask`; 0 for elements that are not bytes, and for bytes
  /// that are about to be read again, which stay in the caches.
  bool (*scales)(const std::byte* const* rows, int64_t groups, int64_t element_bytes,
                 uint8_t nan_mask, std::byte* out) = nullptr;
  /// out[group][32] = the 4-bit zero points of four words of eight outputs, word_stride apart, of
  /// each of `groups` groups, group_stride apart; in AWQ's order of outputs or in sequence.
  void (*zero_words)(const std::byte* base, int64_t word_stride, int64_t group_stride,
                     int64_t groups, bool awq, std::byte* out) = nullptr;
  /// zeros[i] += offset, from unsigned or signed bytes to signed ones, saturating.
  void (*shift_zeros)(std::byte* zeros, int64_t count, bool is_signed, int32_t offset) = nullptr;
};

/// The loops for this machine.
const PackLoops& pack_loops();

/// What the ISA files define.
const PackLoops& generic_pack_loops();
const PackLoops& avx2_pack_loops();

}  // namespace moekit::linear
