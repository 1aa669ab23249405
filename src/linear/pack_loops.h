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
  uint32_t flip = 0;          ///< turns stored integers into centred ones, for every code of a word
  bool is_read_next = false;  ///< stored through the caches, not past them
};

/// Where 32-bit word `w` of 32 columns lies in a panel of words (laid out as f32 codes are): the
/// first 16 columns here, the others kWordHalf behind.
inline constexpr int64_t kWordHalf = kBlockK * kUnitBytes;
constexpr int64_t word_offset(int64_t w) {
  return w / kBlockK * 2 * kWordHalf + w % kBlockK * kUnitBytes;
}
/// Codes of a panel of words may be read from this many bytes before it to this many behind it.
inline constexpr int64_t kWordMargin = 64;

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

struct PackLoops {
  /// Transposes `count` codes (a multiple of 32) of 32 dense rows into units from `out` on. Returns
  /// whether NaN codes of e4m3 were met; they are stored as zeros.
  bool (*rows)(const CodeOrder& order, const std::byte* const* rows, int64_t count,
               const PackHints& hints, std::byte* out) = nullptr;
  /// The same from storages with K outside.
  bool (*outer)(const CodeOrder& order, const OuterCodes& codes, int64_t count,
                std::byte* out) = nullptr;
  /// to[i] = from[i] with the nibbles of each byte swapped; `bytes` is a multiple of 64.
  void (*swap_nibbles)(const std::byte* from, int64_t bytes, std::byte* to) = nullptr;
  /// offsets[i] = from where pack_columns reads place i, which takes code columns[i] of each
  /// output. `swapped`: bytes from the panel of words to the one with nibbles swapped.
  void (*locate)(Code code, const int32_t* columns, int64_t count, int64_t swapped,
                 int32_t* offsets) = nullptr;
  /// Units of `count` codes (a multiple of 32) of 4 or 8 bits from a panel of words: a code is read
  /// so many bytes beside its own place that it lands on the one that it takes.
  void (*columns)(Code code, const std::byte* words, const int32_t* offsets, int64_t count,
                  std::byte* out) = nullptr;
  /// AWQ: four words of eight outputs for each K, k_stride apart; as many panels as `outs`, at most
  /// kLinePanels, side by side.
  void (*awq)(const CodeOrder& order, const std::byte* base, int64_t k_stride, int64_t count,
              std::span<std::byte* const> outs) = nullptr;
  /// out[group][32] = element `group` of each of 32 dense rows of 1, 2 or 4 byte elements.
  void (*scales)(const std::byte* const* rows, int64_t groups, int64_t element_bytes,
                 std::byte* out) = nullptr;
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
