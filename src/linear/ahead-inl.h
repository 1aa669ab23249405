// What products ask for before they read it. Included once by tile-inl.h, inside the namespace of
// the ISA.

/// So far ahead codes are asked for at least. Decoding keeps a core from running into the next
/// lines by itself, and hardware stops at every page. Without it one row of fp8 took twice the time
/// (Zen 3, 2026-11).
constexpr int64_t kAheadBytes = 4096;
/// The same where lines are asked for into the second cache, farther from their use.
constexpr int64_t kFarAheadBytes = 8192;
/// The same for each of several panels side by side, into the first cache. Two panels: 14.2 GB/s of
/// mxfp4 where 1 KiB gave 12.6 and the second cache 13.9 (Xeon, 2026-12).
constexpr int64_t kBesideAheadBytes = 2048;
/// The same for scales and zero points, which lie by themselves behind the codes: without it mxfp8
/// read at 0.6 where fp8 without scales read at 1.0 of the probe (Zen 4, 2026-11).
constexpr int64_t kScalesAheadBytes = 512;

/// The same where codes are decoded that ask_for_share() brought into the second cache: farther
/// would take them from memory in one burst, which the decoder waits for.
constexpr int64_t kDecodeAheadBytes = 512;

/// Where a tile of `rows` rows wants lines: 3 is the first cache, 2 the second. A request into the
/// first holds one of its few miss buffers until memory answers. That pays for a few rows of codes
/// without segments, one unbroken stream (bf16 0.95 of the read probe; 0.89 from the second cache);
/// elsewhere the second was faster (one row of mxfp4 0.91 in place of 0.76; Zen 4, 2026-11).
constexpr int locality(bool segments, int rows, int panels) {
  return Isa::kAsksSecondCache && panels == 1 && (segments || rows > 3) ? 2 : 3;
}

/// Two lines for every unit of one block, for units [first, first + count), of each of kPanels
/// panels side by side.
template <int kLocality, int kPanels>
struct BlockAhead {
  const std::byte* lines = nullptr;
  int64_t stride = 0;
  uint32_t first = 0, count = 0;

  /// In the order of addresses. In the order in which they are read, the two halves by turns, bf16
  /// lost a fifth of the bandwidth.
  [[gnu::always_inline]] inline void unit(int64_t u) const {
    if (static_cast<uint32_t>(u) - first >= count) return;
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) {
      const std::byte* line = lines + panel * stride + 2 * u * kUnitBytes;
      __builtin_prefetch(line, 0, kLocality);
      __builtin_prefetch(line + kUnitBytes, 0, kLocality);
    }
  }
};

/// Which lines a tile asks for while it reads: those `bytes` ahead, of some units of every block.
/// Tiles that read the same chunk one after the other share the lines out.
struct Ahead {
  int64_t bytes = 0;
  uint32_t first = 0, count = 0;
  const std::byte* end = nullptr;   ///< of the panel's codes
  const std::byte* next = nullptr;  ///< what is read after them

  template <int kLocality, int kPanels>
  [[gnu::always_inline]] inline BlockAhead<kLocality, kPanels> of(const std::byte* block,
                                                                  int64_t stride) const {
    // Numbers, not pointers: what is asked for may lie behind all panels, and there may be no end.
    auto lines = reinterpret_cast<uintptr_t>(block) + static_cast<uintptr_t>(bytes);
    const auto last = reinterpret_cast<uintptr_t>(end);
    if (lines >= last) lines += reinterpret_cast<uintptr_t>(next) - last;
    return {reinterpret_cast<const std::byte*>(lines), stride, first, count};
  }
};

/// Asks for the first scales and zero points of the panel after this one, which has the same
/// layout, and for this one's column terms; of the panels that lie `beside` bytes from the two.
[[gnu::always_inline]] inline void ask_for_terms(const Panel& p, int64_t beside) {
  for (int64_t i = 0; i < kPanelCols * 8; i += kUnitBytes) __builtin_prefetch(p.terms + beside + i);
  if (p.segment == 0) return;
  const std::byte* scales = p.next + (p.scales - p.codes) + beside;
  for (int64_t i = 0; i < kScalesAheadBytes; i += kUnitBytes) __builtin_prefetch(scales + i);
}

/// Asks for a share of what is decoded next into the second cache, before tile `tile` of `all`:
/// memory answers while tiles multiply.
[[gnu::always_inline]] inline void ask_for_share(const Panel& p, int64_t tile, int64_t all) {
  const int64_t lines = p.soon_bytes / kUnitBytes;
  for (int64_t i = lines * tile / all; i < lines * (tile + 1) / all; ++i) {
    __builtin_prefetch(p.soon + i * kUnitBytes, 0, 2);
  }
}
