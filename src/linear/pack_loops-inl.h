// The loops of PackLoops over vectors of Ops::kCols 32-bit words, one a column. Included inside an
// anonymous namespace of each ISA file, after its Ops.

using V = Ops::V;

/// Codes go to a stage first and leave it in order: panels are larger than caches and are not read
/// soon, so whole lines go past them without being fetched before.
struct Stage {
  alignas(64) std::byte bytes[kPanelCols * kRowChunkBytes];

  /// Bytes [first, last), multiples of 64, to the same place of `out`.
  void flush(int64_t first, int64_t last, std::byte* out) const {
    if (reinterpret_cast<uintptr_t>(out) % sizeof(V) != 0) {
      __builtin_memcpy(out + first, bytes + first, static_cast<size_t>(last - first));
      return;
    }
    for (int64_t i = first; i < last; i += 64) {
      for (int64_t j = 0; j < 64; j += static_cast<int64_t>(sizeof(V))) {
        Ops::stream(out + i + j, Ops::load(bytes + i + j));
      }
    }
  }
};

/// One vector of words on its way into a unit.
template <Shuffle kShuffle, bool kNans>
struct Finish {
  V centre;
  V nans = Ops::splat(0);

  explicit Finish(uint32_t flip) : centre(Ops::splat(flip)) {}
  V operator()(V x) {
    x = Ops::exclusive_or(x, centre);
    if constexpr (kNans) {
      const V mask = Ops::nan_bytes(x);
      nans = Ops::either(nans, mask);
      x = Ops::clear(x, mask);
    }
    if constexpr (kShuffle == Shuffle::words) return Ops::shuffle_words(x);
    if constexpr (kShuffle == Shuffle::nibbles) return Ops::shuffle_nibbles(x);
    return x;
  }
};

/// v[j] = word j of each column, from v[i] = words of column i (and 4 + i).
inline void transpose_words(V (&v)[4]) {
  const V a = Ops::lo32(v[0], v[1]);
  const V b = Ops::hi32(v[0], v[1]);
  const V c = Ops::lo32(v[2], v[3]);
  const V d = Ops::hi32(v[2], v[3]);
  v[0] = Ops::lo64(a, c);
  v[1] = Ops::hi64(a, c);
  v[2] = Ops::lo64(b, d);
  v[3] = Ops::hi64(b, d);
}

/// Two stages by turns: one fills while the other is stored and the next panel is asked for, a bit
/// of each at a time. Long bursts of either kind would stop the rest.
class Pipeline {
 public:
  static constexpr int64_t kSteps = kPanelCols / Ops::kCols;

  Pipeline(const PackHints& hints, int64_t chunks)
      : next_(hints.next),
        next_end_(hints.next + hints.next_bytes),
        next_step_((hints.next_bytes / (chunks * kSteps) + 63) / 64 * 64) {}

  std::byte* filling() { return stages_[turn_].bytes; }
  /// Step i of kSteps while a chunk of rows is transposed.
  void step(int64_t i) {
    store(i, i + 1);
    const std::byte* end = next_ + next_step_;
    for (; next_ < end && next_ < next_end_; next_ += 64) __builtin_prefetch(next_, 0, 2);
  }
  /// The stage that was filled goes to `out` from here on.
  void turn(int64_t bytes, std::byte* out) {
    turn_ ^= 1;
    full_bytes_ = bytes;
    out_ = out;
  }
  void finish() { store(0, kSteps); }

 private:
  void store(int64_t first, int64_t last) {
    const int64_t begin = full_bytes_ * first / kSteps / 64 * 64;
    const int64_t end = full_bytes_ * last / kSteps / 64 * 64;
    stages_[turn_ ^ 1].flush(begin, end, out_);
  }

  const std::byte* next_;
  const std::byte* next_end_;
  int64_t next_step_;
  int turn_ = 0;
  int64_t full_bytes_ = 0;
  std::byte* out_ = nullptr;
  Stage stages_[2];
};

/// `chunk` bytes of kCols rows to their places in a stage. Whole lines inside: rows a power of two
/// apart share a set of the first cache, which holds eight of them.
template <int kBits, typename Order>
[[gnu::always_inline]] inline void transpose_columns(const std::byte* const* rows, int64_t first,
                                                     int64_t chunk, Order& finish,
                                                     std::byte* half) {
  constexpr int64_t kBlockBytes = kBlockK * kBits / 8;
  constexpr int64_t kBlockOut = kBlockBytes * kPanelCols;
  const std::byte* mine[Ops::kCols];
  for (int i = 0; i < Ops::kCols; ++i) mine[i] = rows[i] + first;
  for (int64_t at = 0; at < chunk; at += kBlockBytes, half += kBlockOut) {
    for (int64_t in = 0; in < kBlockBytes; in += 16) {
      V v[4];
      for (int i = 0; i < 4; ++i) v[i] = Ops::load_rows(mine + i, at + in);
      transpose_words(v);
      for (int i = 0; i < 4; ++i) Ops::store(half + (in / 4 + i) * kUnitBytes, finish(v[i]));
    }
  }
}

/// 32 streams are more than hardware follows: either the panel came into the second cache in one
/// piece while the one before was packed, or each row's next lines are asked for here.
template <int kBits, Shuffle kShuffle, bool kNans>
bool transpose_rows(const CodeOrder& order, const std::byte* const* rows, int64_t count,
                    const PackHints& hints, std::byte* out) {
  constexpr int64_t kHalf = kBlockK * kBits / 32 * kUnitBytes;
  const int64_t bytes = count * kBits / 8;
  Finish<kShuffle, kNans> finish(order.flip);
  Pipeline pipeline(hints, (bytes + kRowChunkBytes - 1) / kRowChunkBytes);
  for (int64_t first = 0; first < bytes; first += kRowChunkBytes) {
    const int64_t chunk = bytes - first < kRowChunkBytes ? bytes - first : kRowChunkBytes;
    const int64_t next = first + kRowChunkBytes;
    const bool look_ahead = !hints.warm && next < bytes;
    for (int64_t c = 0; c < kPanelCols; c += Ops::kCols) {
      for (int i = 0; look_ahead && i < Ops::kCols; ++i) {
        __builtin_prefetch(rows[c + i] + next, 0, 2);
        __builtin_prefetch(rows[c + i] + next + 64, 0, 2);
      }
      transpose_columns<kBits>(rows + c, first, chunk, finish,
                               pipeline.filling() + c / 16 * kHalf + c % 16 * 4);
      pipeline.step(c / Ops::kCols);
    }
    pipeline.turn(chunk * kPanelCols, out + first * kPanelCols);
  }
  pipeline.finish();
  Ops::fence();
  return Ops::any(finish.nans);
}

/// Asks for the unit row that is 2 KiB of work away: each may lie in a page of its own, which no
/// hardware prefetcher follows.
template <int64_t kBytes>
[[gnu::always_inline]] inline void prefetch_outer(const std::byte* p, int64_t stride) {
  const std::byte* next = p + 2048 / kBytes * stride;
  for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(next + at, 0, 2);
  if (kBytes > 16) __builtin_prefetch(next + kBytes - 1, 0, 2);
}

/// Half a unit's columns (16), from unit rows p, p + stride, ...; w takes 16 / kCols vectors.
template <int kElement, bool kPaired>
[[gnu::always_inline]] inline void load_outer(const std::byte* p, int64_t stride, int32_t shift,
                                              V* w) {
  constexpr int64_t kVec = sizeof(V);
  if constexpr (kElement == 4) {
    for (int i = 0; i < 16 / Ops::kCols; ++i) w[i] = Ops::load(p + i * kVec);
  } else if constexpr (kPaired) {
    for (int i = 0; i < 16 / Ops::kCols; ++i) {
      w[i] = Ops::join_pairs(Ops::load(p + i * kVec), Ops::load(p + stride + i * kVec), shift);
    }
  } else if constexpr (kElement == 2) {
    for (int i = 0; i < 8 / Ops::kCols; ++i) {
      const V a = Ops::spread64(Ops::load(p + i * kVec));
      const V b = Ops::spread64(Ops::load(p + stride + i * kVec));
      w[2 * i] = Ops::lo16(a, b);
      w[2 * i + 1] = Ops::hi16(a, b);
    }
  }
}

/// 4 * kCols bytes, or every other one of twice as many.
template <bool kPaired>
[[gnu::always_inline]] inline V load_bytes(const std::byte* p, int32_t shift) {
  if constexpr (!kPaired) return Ops::spread32(Ops::load(p));
  return Ops::spread32(Ops::every_other_byte(Ops::load(p), Ops::load(p + sizeof(V)), shift));
}

/// All 32 columns of a unit from single bytes: w takes 32 / kCols vectors.
template <bool kPaired>
[[gnu::always_inline]] inline void load_outer_bytes(const std::byte* p, int64_t stride,
                                                    int32_t shift, V* w) {
  constexpr int64_t kVec = sizeof(V) * (kPaired ? 2 : 1);
  for (int i = 0; i < 8 / Ops::kCols; ++i) {
    const V a = load_bytes<kPaired>(p + i * kVec, shift);
    const V b = load_bytes<kPaired>(p + stride + i * kVec, shift);
    const V c = load_bytes<kPaired>(p + 2 * stride + i * kVec, shift);
    const V d = load_bytes<kPaired>(p + 3 * stride + i * kVec, shift);
    const V x = Ops::lo8(a, b);
    const V y = Ops::lo8(c, d);
    const V z = Ops::hi8(a, b);
    const V t = Ops::hi8(c, d);
    w[4 * i] = Ops::lo16(x, y);
    w[4 * i + 1] = Ops::hi16(x, y);
    w[4 * i + 2] = Ops::lo16(z, t);
    w[4 * i + 3] = Ops::hi16(z, t);
  }
}

template <int kBits, Shuffle kShuffle, bool kNans, int kElement, bool kPaired>
bool interleave(const CodeOrder& order, const OuterCodes& codes, int64_t count, std::byte* out) {
  constexpr int kVectors = 32 / Ops::kCols;
  constexpr int64_t kWidth = kPanelCols * kElement * (kPaired ? 2 : 1);
  constexpr int kUnitRows = 4 / kElement;
  Finish<kShuffle, kNans> finish(order.flip);
  Stage stage;
  constexpr int64_t kUnits = kBlockK * kBits / 32;
  constexpr int64_t kHalf = kUnits * kUnitBytes;
  const std::byte* p = codes.base;
  for (int64_t block = 0; block < count / kBlockK; ++block) {
    for (int64_t u = 0; u < kUnits; ++u, p += kUnitRows * codes.k_stride) {
      for (int i = 0; i < kUnitRows; ++i) {
        prefetch_outer<kWidth>(p + i * codes.k_stride, codes.k_stride);
      }
      V w[kVectors];
      if constexpr (kElement == 1) {
        load_outer_bytes<kPaired>(p, codes.k_stride, codes.pair_shift, w);
      } else {
        load_outer<kElement, kPaired>(p, codes.k_stride, codes.pair_shift, w);
        load_outer<kElement, kPaired>(p + kWidth / 2, codes.k_stride, codes.pair_shift,
                                      w + kVectors / 2);
      }
      for (int i = 0; i < kVectors; ++i) {
        const int64_t c = i * Ops::kCols;
        Ops::store(stage.bytes + c / 16 * kHalf + u * kUnitBytes + c % 16 * 4, finish(w[i]));
      }
    }
    stage.flush(0, 2 * kHalf, out + block * 2 * kHalf);
  }
  Ops::fence();
  return Ops::any(finish.nans);
}

/// f.template operator()<bits, shuffle, nans>() for the code's order.
template <typename F>
bool by_order(Code code, F&& f) {
  switch (code) {
    case Code::f32: return f.template operator()<32, Shuffle::none, false>();
    case Code::bf16:
    case Code::f16: return f.template operator()<16, Shuffle::none, false>();
    case Code::e4m3: return f.template operator()<8, Shuffle::words, true>();
    case Code::e5m2: return f.template operator()<8, Shuffle::words, false>();
    case Code::int8: return f.template operator()<8, Shuffle::none, false>();
    case Code::e2m1:
    case Code::int4: break;
  }
  return f.template operator()<4, Shuffle::nibbles, false>();
}

bool pack_rows(const CodeOrder& order, const std::byte* const* rows, int64_t count,
               const PackHints& hints, std::byte* out) {
  return by_order(order.code, [&]<int kBits, Shuffle kShuffle, bool kNans>() {
    return transpose_rows<kBits, kShuffle, kNans>(order, rows, count, hints, out);
  });
}

/// Units hold at least one code.
bool pack_outer(const CodeOrder& order, const OuterCodes& codes, int64_t count, std::byte* out) {
  return by_order(order.code, [&]<int kBits, Shuffle kShuffle, bool kNans>() {
    if constexpr (kBits <= 8) {
      if (codes.element_bytes == 1) {
        return codes.paired
                   ? interleave<kBits, kShuffle, kNans, 1, true>(order, codes, count, out)
                   : interleave<kBits, kShuffle, kNans, 1, false>(order, codes, count, out);
      }
    }
    if constexpr (kBits <= 16) {
      if (codes.element_bytes == 2) {
        return codes.paired
                   ? interleave<kBits, kShuffle, kNans, 2, true>(order, codes, count, out)
                   : interleave<kBits, kShuffle, kNans, 2, false>(order, codes, count, out);
      }
    }
    return interleave<kBits, kShuffle, kNans, 4, false>(order, codes, count, out);
  });
}

/// The place of code j of a unit in its word, in codes: where shuffle_nibbles puts one of 4 bits.
constexpr int place_in_word(int bits, int j) { return bits == 4 ? 4 * (j % 2) + j / 2 : j; }

inline V swap_nibbles(V x) {
  const V low = Ops::splat(0x0f0f0f0fu);
  return Ops::either(Ops::both(Ops::template right<4>(x), low),
                     Ops::template left<4>(Ops::both(x, low)));
}

void split_words(const std::byte* from, int64_t stride, int64_t half, uint32_t flip, int64_t first,
                 int64_t count, const WordHalves& to) {
  constexpr int64_t kVec = sizeof(V);
  const V centre = Ops::splat(flip);
  const int64_t copy = to.copy_bytes();
  for (int64_t w = 0; w < count; ++w, from += stride) {
    prefetch_outer<2 * kUnitBytes>(from, stride);
    for (int64_t h = 0; h < 2; ++h) {
      std::byte* out = to.data + h * to.copies * copy + (first + w) * kUnitBytes;
      for (int64_t i = 0; i < kUnitBytes; i += kVec) {
        const V x = Ops::exclusive_or(Ops::load(from + h * half + i), centre);
        Ops::store(out + i, x);
        if (to.copies == 2) Ops::store(out + copy + i, swap_nibbles(x));
      }
    }
  }
}

/// A code of 4 bits whose nibble is the other half of a byte than the one it takes comes from the
/// copy with nibbles swapped.
void locate_columns(Code code, const int32_t* columns, int64_t count, int64_t copy_bytes,
                    int32_t* offsets) {
  constexpr uint32_t kBytes = kUnitBytes;
  if (code == Code::int4) {
    for (int64_t i = 0; i < count; ++i) {
      const auto column = static_cast<uint32_t>(columns[i]);
      const auto j = static_cast<uint32_t>(i);
      const uint32_t from = column % 8, place = 4 * (j % 2) + j % 8 / 2;
      const uint32_t copy = ((from ^ place) & 1u) * static_cast<uint32_t>(copy_bytes);
      offsets[i] = static_cast<int32_t>(column / 8 * kBytes + copy + from / 2 - place / 2);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto column = static_cast<uint32_t>(columns[i]);
    offsets[i] =
        static_cast<int32_t>(column / 4 * kBytes + column % 4 - static_cast<uint32_t>(i) % 4);
  }
}

/// Code J of a unit and those after it.
template <int kBits, int J>
[[gnu::always_inline]] inline void gather_codes(const std::byte* words, const int32_t* offsets,
                                                V* w) {
  const std::byte* from = words + offsets[J];
  const V mask = Ops::splat((kBits == 4 ? 15u : 255u) << kBits * place_in_word(kBits, J));
  for (int i = 0; i < 16 / Ops::kCols; ++i) {
    const V code = Ops::both(Ops::load(from + i * static_cast<int64_t>(sizeof(V))), mask);
    w[i] = J == 0 ? code : Ops::either(w[i], code);
  }
  if constexpr ((J + 1) * kBits < 32) gather_codes<kBits, J + 1>(words, offsets, w);
}

/// Whole lines leave past the caches, one half after the other: its words stay in the first cache.
template <int kBits>
void gather_units(const WordHalves& words, const int32_t* offsets, int64_t count,
                  const WordsAhead& ahead, std::byte* out) {
  constexpr int64_t kVec = sizeof(V);
  constexpr int64_t kUnit = 32 / kBits;
  constexpr int64_t kHalf = kBlockK / kUnit * kUnitBytes;
  const bool aligned = reinterpret_cast<uintptr_t>(out) % sizeof(V) == 0;
  for (int64_t h = 0; h < 2; ++h) {
    const std::byte* half = words.data + h * words.copies * words.copy_bytes();
    const std::byte* next = ahead.next != nullptr ? ahead.next + h * kUnitBytes : nullptr;
    for (int64_t k = 0; k < count; k += kUnit) {
      V w[16 / Ops::kCols];
      gather_codes<kBits, 0>(half, offsets + k, w);
      if (next != nullptr) {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + kUnitBytes - 1, 0, 2);
        next += ahead.stride;
      }
      std::byte* to = out + k / kBlockK * 2 * kHalf + h * kHalf + k % kBlockK / kUnit * kUnitBytes;
      for (int i = 0; i < 16 / Ops::kCols; ++i) {
        if (aligned) {
          Ops::stream(to + i * kVec, w[i]);
        } else {
          Ops::store(to + i * kVec, w[i]);
        }
      }
    }
  }
  Ops::fence();
}

void pack_columns(Code code, const WordHalves& words, const int32_t* offsets, int64_t count,
                  const WordsAhead& ahead, std::byte* out) {
  if (code == Code::int4) {
    gather_units<4>(words, offsets, count, ahead, out);
  } else {
    gather_units<8>(words, offsets, count, ahead, out);
  }
}

/// Rows of words that are asked for ahead: each may lie in a page of its own.
constexpr int64_t kAwqAhead = 64;

/// Bytes of even and of odd nibbles: the low (high) nibbles of x, those of y above them.
inline void pair_nibbles(V x, V y, V& even, V& odd) {
  const V mask = Ops::splat(0x0f0f0f0fu);
  const V t = Ops::both(Ops::exclusive_or(Ops::template right<4>(x), y), mask);
  odd = Ops::exclusive_or(y, t);
  even = Ops::exclusive_or(x, Ops::template left<4>(t));
}

/// kLanes units of eight K, one in each 16-byte lane, to unit u of both halves in `stage`. K are
/// loaded in the order in which words keep them (even ones first), so that the transposed words
/// need no shuffle. A word holds outputs 0, 2, 4, 6, 1, 3, 5, 7: its bytes' low nibbles are 0, 4,
/// 1, 5, the high ones 2, 6, 3, 7.
inline void transpose_awq(const std::byte* p, int64_t k_stride, V centre, std::byte* stage) {
  constexpr int kOrderOfK[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  constexpr int64_t kHalf = 4 * kUnitBytes;
  V even[4], odd[4];  // byte j: nibbles of two K of one output of word j / 4
  for (int i = 0; i < 4; ++i) {
    const std::byte* x = p + kOrderOfK[2 * i] * k_stride;
    const std::byte* y = p + kOrderOfK[2 * i + 1] * k_stride;
    pair_nibbles(Ops::exclusive_or(Ops::load_lanes(x, x + 8 * k_stride), centre),
                 Ops::exclusive_or(Ops::load_lanes(y, y + 8 * k_stride), centre), even[i], odd[i]);
  }
  V words[2][4];  // [even, odd][word]: four outputs
  for (int i = 0; i < 2; ++i) {
    const V(&v)[4] = i == 0 ? even : odd;
    const V a = Ops::lo8(v[0], v[1]);
    const V b = Ops::hi8(v[0], v[1]);
    const V c = Ops::lo8(v[2], v[3]);
    const V d = Ops::hi8(v[2], v[3]);
    words[i][0] = Ops::lo16(a, c);
    words[i][1] = Ops::hi16(a, c);
    words[i][2] = Ops::lo16(b, d);
    words[i][3] = Ops::hi16(b, d);
  }
  for (int word = 0; word < 4; ++word) {
    const V low = Ops::swap_middle(words[0][word]);   // outputs 0, 1, 4, 5
    const V high = Ops::swap_middle(words[1][word]);  // outputs 2, 3, 6, 7
    std::byte* to = stage + word / 2 * kHalf + word % 2 * 32;
    Ops::store_lanes(to, to + kUnitBytes, Ops::lo64(low, high));
    Ops::store_lanes(to + 16, to + 16 + kUnitBytes, Ops::hi64(low, high));
  }
}

/// A line of words at a time for all panels that share it: rows a power of two apart are gone from
/// the first cache before a second pass could read them.
void pack_awq(const CodeOrder& order, const std::byte* base, int64_t k_stride, int64_t count,
              std::span<std::byte* const> outs) {
  constexpr int64_t kLanes = Ops::kCols / 4;
  constexpr int64_t kBlockBytes = 8 * kUnitBytes;
  const V centre = Ops::splat(order.flip);
  Stage stages[kLinePanels];
  const std::byte* p = base;
  for (int64_t block = 0; block < count / kBlockK; ++block) {
    for (int64_t u = 0; u < 4; u += kLanes, p += 8 * kLanes * k_stride) {
      for (int i = 0; i < 8 * kLanes; ++i) __builtin_prefetch(p + (kAwqAhead + i) * k_stride, 0, 2);
      for (size_t i = 0; i < outs.size(); ++i) {
        transpose_awq(p + 16 * i, k_stride, centre, stages[i].bytes + u * kUnitBytes);
      }
    }
    for (size_t i = 0; i < outs.size(); ++i) {
      stages[i].flush(0, kBlockBytes, outs[i] + block * kBlockBytes);
    }
  }
  Ops::fence();
}

void pack_shifted_zeros(std::byte* zeros, int64_t count, bool is_signed, int32_t offset) {
  auto* z = reinterpret_cast<uint8_t*>(zeros);
  // 16-bit sums: the offset is small, and any larger one saturates all the same.
  const auto bounded = static_cast<int16_t>(offset < -512 ? -512 : offset > 512 ? 512 : offset);
  const int16_t sign = is_signed ? 0x80 : 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto wide = static_cast<int16_t>((z[i] ^ sign) - sign);
    auto sum = static_cast<int16_t>(wide + bounded);
    sum = sum < -128 ? int16_t{-128} : sum;
    sum = sum > 127 ? int16_t{127} : sum;
    z[i] = static_cast<uint8_t>(sum);
  }
}
