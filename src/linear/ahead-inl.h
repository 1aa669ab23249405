// What products ask for before they read it. Included once by tile-inl.h, inside the namespace of the
// ISA.

/// So far ahead codes are asked for at least. Decoding keeps a core from running into the next
/// lines by itself, and hardware stops at every page. Without it one row of fp8 took twice the time
/// (Zen 3, 2026-11).
constexpr int64_t kAheadBytes = 4096;
/// The same for scales and zero points, which lie by themselves behind the codes: without it mxfp8
/// read at 0.6 where fp8 without scales read at 1.0 of the probe (Zen 4, 2026-11).
constexpr int64_t kScalesAheadBytes = 512;
/// Tiles up to this height read a panel's scales for the first time.
constexpr int kAskingRows = 12;

/// Two lines for every unit of one block, for units [first, first + count).
struct BlockAhead {
  const std::byte* lines = nullptr;
  uint32_t first = 0, count = 0;

  /// In the order of addresses. In the order in which they are read, the two halves by turns, bf16
  /// lost a fifth of the bandwidth.
  [[gnu::always_inline]] inline void unit(int64_t u) const {
    if (static_cast<uint32_t>(u) - first >= count) return;
    __builtin_prefetch(lines + 2 * u * kUnitBytes);
    __builtin_prefetch(lines + 2 * u * kUnitBytes + kUnitBytes);
  }
};

/// Which lines a tile asks for while it reads: those `bytes` ahead, of some units of every block.
/// Tiles that read the same chunk one after the other share the lines out.
struct Ahead {
  int64_t bytes = 0;
  uint32_t first = 0, count = 0;
  const std::byte* end = nullptr;   ///< of the panel's codes
  const std::byte* next = nullptr;  ///< what is read after them

  [[gnu::always_inline]] inline BlockAhead of(const std::byte* block) const {
    const std::byte* lines = block + bytes;
    if (lines >= end) lines = next + (lines - end);
    return {lines, first, count};
  }
};

/// Asks for the first scales and zero points of the panel after this one, which has the same
/// layout, and for this one's column terms.
[[gnu::always_inline]] inline void ask_for_terms(const Panel& p) {
  for (int64_t i = 0; i < kPanelCols * 8; i += kUnitBytes) __builtin_prefetch(p.terms + i);
  if (p.segment == 0) return;
  const std::byte* scales = p.next + (p.scales - p.codes);
  for (int64_t i = 0; i < kScalesAheadBytes; i += kUnitBytes) __builtin_prefetch(scales + i);
}
