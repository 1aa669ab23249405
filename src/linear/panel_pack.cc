#include "linear/panel_pack.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

#include "base/check.h"
#include "linear/pack_loops.h"
#include "linear/panel_scales.h"
#include "linear/panel_source.h"
#include "quant/stored_codec.h"

namespace moekit::linear {
namespace {

/// K of one turn over panels that share lines: so many unit rows stay in the caches, even where
/// they lie a power of two apart.
constexpr int64_t kOuterStep = 256;

/// What turns a stored integer into a centred one, for every nibble or byte of a word.
uint32_t centring(const StoredMatrix& m, const PanelSpec& spec) {
  if (m.codes.pack_axis == PackAxis::none && m.codes.unit == DType::i8) return 0;
  if (spec.code == Code::int4) return 0x88888888u;
  return spec.code == Code::int8 ? 0x80808080u : 0;
}

/// The same for one code.
int32_t centre_of(const StoredMatrix& m, const PanelSpec& spec) {
  return static_cast<int32_t>(centring(m, spec) & (spec.code == Code::int4 ? 15u : 255u));
}

/// Padded integer codes must be zero: what `flip` would make of a zero byte is taken back here.
void clear_integer_pad(const PanelTask& task, uint32_t flip, std::byte* codes) {
  if (flip == 0) return;
  const PanelSpec& spec = *task.spec;
  const int64_t valid = std::min(kPanelCols, spec.rows - task.panel * kPanelCols);
  const int bits = bits_of(spec.code);
  const int64_t unit = unit_k(spec.code);
  // Without unlike groups a sorted axis ends in its pad, as any other does.
  const bool ends_in_pad = spec.packed_cols() == spec.cols;
  for (int64_t k = ends_in_pad && valid == kPanelCols ? spec.cols : 0; k < spec.k_padded(); ++k) {
    const bool is_pad = ends_in_pad ? k >= spec.cols : task.order[k] == spec.cols;
    if (!is_pad && valid == kPanelCols) continue;
    const int64_t first = is_pad ? 0 : valid;
    std::byte* at = codes + k / kBlockK * 2 * spec.half_bytes() + k % kBlockK / unit * kUnitBytes;
    // The place of code j in the shuffled word.
    const int64_t j = k % unit;
    const int64_t place = bits == 4 ? 4 * (j % 2) + j / 2 : j;
    for (int64_t c = first; c < kPanelCols; ++c) {
      std::byte* word = at + c / 16 * spec.half_bytes() + c % 16 * 4;
      word[place * bits / 8] &= bits == 8        ? std::byte{0}
                                : place % 2 == 0 ? std::byte{0xf0}
                                                 : std::byte{0x0f};
    }
  }
}

/// Finds which columns hold NaN codes; only asked when a panel has some.
void poison_columns(const StoredMatrix& m, int64_t panel, float* column_scale) {
  const int64_t valid = std::min(kPanelCols, m.rows - panel * kPanelCols);
  for (int64_t c = 0; c < valid; ++c) {
    for (int64_t k = 0; k < m.cols; ++k) {
      if ((quant::code_at(m, panel * kPanelCols + c, k) & 0x7f) == 0x7f) {
        column_scale[c] = kNan;
        break;
      }
    }
  }
}

/// One panel on its way from storage to `task.out`.
class PanelPacker {
 public:
  explicit PanelPacker(const PanelTask& task)
      : task_(task),
        m_(*task.m),
        spec_(*task.spec),
        source_(source_of(m_, spec_)),
        order_{spec_.code, spec_.widened ? 0 : centring(m_, spec_)},
        first_row_(task.panel * kPanelCols),
        full_(first_row_ + kPanelCols <= m_.rows) {
    if (!full_ || spec_.is_sorted()) return;
    outer_ = outer_codes(source_, task.panel);
    awq_ = awq_words(source_, task.panel);
  }

  /// Whether K lies outside: panels side by side share lines.
  bool is_outer() const { return outer_.has_value(); }

  /// Whether both panels' AWQ words share lines.
  bool continues(const PanelPacker& before) const {
    return awq_ != nullptr && before.awq_ != nullptr && &m_ == &before.m_ &&
           task_.panel == before.task_.panel + 1;
  }
  /// Codes of every K, of panels that continue each other.
  static void pack_awq(std::span<std::optional<PanelPacker>> panels) {
    const PanelPacker& first = *panels[0];
    const int64_t whole = first.m_.cols / kBlockK * kBlockK;
    std::byte* outs[kLinePanels];
    for (size_t i = 0; i < panels.size(); ++i) outs[i] = panels[i]->task_.out;
    pack_loops().awq(first.order_, first.awq_, first.m_.codes.col_stride, whole,
                     {outs, panels.size()});
    for (auto& panel : panels) panel->gather_codes(whole, panel->end());
  }

  bool is_awq() const { return awq_ != nullptr; }
  bool is_sorted() const { return spec_.is_sorted(); }
  const PanelTask& task() const { return task_; }

  /// Codes of every place, from the panel's words in their own order.
  void pack_columns(const WordHalves& words, const int32_t* offsets,
                    const WordsAhead& ahead) const {
    pack_loops().columns(spec_.code, words, offsets, spec_.k_padded(), ahead, task_.out);
  }
  /// Those words, whatever the storage.
  void split_words(const WordHalves& words) const;
  /// Where they come from, if that can be told in so few words.
  WordsAhead words_ahead() const;

  /// Codes of [first, last); `first` is a multiple of 32, `last` too or the end. Not of AWQ.
  void pack_codes(int64_t first, int64_t last, const PackHints& hints) {
    const int64_t whole = std::max(first, std::min(last, m_.cols / kBlockK * kBlockK));
    const bool in_place = full_ && (source_.dense || outer_);
    if (in_place && whole > first) pack_in_place(first, whole - first, hints);
    gather_codes(in_place ? whole : first, last);
  }

  /// All that is not codes.
  void finish();

  /// Storage bytes of the panel's rows where they are one piece that suits a second cache of 512
  /// KiB beside the panel at work; returns whether they are.
  bool hint(PackHints& hints) const {
    const int64_t bytes = kPanelCols * m_.row_step * m_.codes.row_stride;
    if (!full_ || !source_.dense || bytes > (256 << 10)) return false;
    hints.next = row_start(m_, first_row_);
    hints.next_bytes = bytes;
    return true;
  }

  int64_t end() const { return spec_.k_padded(); }
  void prefetch() const { prefetch_scales(m_, spec_, task_.panel, task_.out); }

 private:
  std::byte* codes_at(int64_t k) const { return task_.out + k / kBlockK * 2 * spec_.half_bytes(); }

  void pack_in_place(int64_t first, int64_t count, const PackHints& hints) {
    const PackLoops& loops = pack_loops();
    const int64_t first_bit = first * bits_of(spec_.code);
    if (source_.dense) {
      const std::byte* rows[kPanelCols];
      for (int64_t i = 0; i < kPanelCols; ++i) {
        rows[i] = row_start(m_, first_row_ + i) + first_bit / 8;
      }
      nans_ |= loops.rows(order_, rows, count, hints, codes_at(first));
    } else {
      OuterCodes codes = *outer_;
      codes.base += first_bit / 8 / codes.element_bytes * codes.k_stride;
      nans_ |= loops.outer(order_, codes, count, codes_at(first));
    }
  }

  void gather_codes(int64_t first, int64_t last) {
    const int64_t step = kRowChunkBytes * 8 / bits_of(spec_.code);
    alignas(64) std::byte buffer[kPanelCols][kRowChunkBytes];
    const std::byte* rows[kPanelCols];
    for (int64_t k = first; k < last; k += step) {
      const int64_t padded = std::min(step, last - k);
      const int64_t count = std::min(padded, spec_.cols - k);
      gather_rows(source_, task_.panel, k, count, padded, buffer, rows);
      nans_ |= pack_loops().rows(order_, rows, padded, {}, codes_at(k));
    }
  }

  const PanelTask task_;
  const StoredMatrix& m_;
  const PanelSpec& spec_;
  RowSource source_;
  CodeOrder order_;
  int64_t first_row_;
  bool full_;
  std::optional<OuterCodes> outer_;
  const std::byte* awq_ = nullptr;
  bool nans_ = false;
};

void PanelPacker::finish() {
  float column_scale[kPanelCols];
  float column_bias[kPanelCols];
  const float global = m_.global_sense == ScaleSense::multiplier ? m_.global : 1.0f / m_.global;
  const bool column_scaled = !spec_.widened && spec_.scale == Scale::none && !m_.scales.empty();
  for (int64_t c = 0; c < kPanelCols; ++c) {
    const int64_t row = first_row_ + c;
    column_scale[c] = row >= m_.rows  ? 0.0f
                      : column_scaled ? quant::scale_at(m_, row, 0) * global
                                      : global;
    column_bias[c] =
        row < m_.rows && !task_.bias->empty() ? quant::element(*task_.bias, row) : 0.0f;
  }
  clear_integer_pad(task_, order_.flip, task_.out);
  if (nans_) poison_columns(m_, task_.panel, column_scale);
  const PanelGroups groups = PanelGroups::of(m_, spec_, task_.order);
  pack_scales(m_, spec_, groups, task_.panel, task_.out + spec_.scale_offset(), column_scale);
  if (spec_.zeros) {
    pack_zeros(m_, spec_, groups, task_.panel, centre_of(m_, spec_),
               task_.out + spec_.zero_offset());
  }
  const int64_t used = spec_.zero_offset() + spec_.zero_bytes();
  std::memset(task_.out + used, 0, static_cast<size_t>(spec_.column_scale_offset() - used));
  std::memcpy(task_.out + spec_.column_scale_offset(), column_scale, sizeof(column_scale));
  std::memcpy(task_.out + spec_.bias_offset(), column_bias, sizeof(column_bias));
}

/// Whether 32-bit words of a panel's codes lie beside each other, those of the next K a stride
/// away.
bool are_outer_words(const StoredMatrix& m, int bits) {
  const CodeGrid& g = m.codes;
  return g.pack_axis == PackAxis::cols && bits_of(g.unit) == 32 && quant::holds_runs(g, bits) &&
         g.row_stride == 4 && m.row_step == 1;
}

WordsAhead PanelPacker::words_ahead() const {
  if (!full_) return {};
  const std::byte* first = row_start(m_, first_row_);
  if (are_outer_words(m_, bits_of(spec_.code))) return {first, m_.codes.col_stride};
  // Rows in one piece: the same number of lines.
  const bool in_one_piece =
      source_.dense && m_.row_step == 1 && m_.codes.row_stride == source_.row_bytes;
  return in_one_piece ? WordsAhead{first, 2 * kUnitBytes} : WordsAhead{};
}

void PanelPacker::split_words(const WordHalves& words) const {
  const PackLoops& loops = pack_loops();
  const int bits = bits_of(spec_.code);
  const int64_t count = ceil_div(spec_.cols * bits, 32);
  if (full_ && are_outer_words(m_, bits)) {
    loops.split(row_start(m_, first_row_), m_.codes.col_stride, kUnitBytes, order_.flip, 0, count,
                words);
    return;
  }
  // First as a panel of f32 codes would have them, a few blocks at a time.
  constexpr int64_t kHalf = kBlockK * kUnitBytes;
  constexpr int64_t kBlocks = 4;
  const CodeOrder order{.code = Code::f32};
  alignas(64) std::byte panel[kBlocks * 2 * kHalf];
  alignas(64) std::byte buffer[kPanelCols][kRowChunkBytes];
  const std::byte* rows[kPanelCols];
  for (int64_t w = 0; w < count;) {
    const bool whole = full_ && source_.dense && (w + kBlocks * kBlockK) * 32 <= spec_.cols * bits;
    const int64_t n = whole ? kBlocks * kBlockK : kBlockK;
    const int64_t k = w * 32 / bits, codes = n * 32 / bits;
    gather_rows(source_, task_.panel, k, std::min(codes, spec_.cols - k), codes, buffer, rows);
    loops.rows(order, rows, n, {}, panel);
    for (int64_t b = 0; b < n; b += kBlockK) {
      loops.split(panel + b / kBlockK * 2 * kHalf, kUnitBytes, kHalf, order_.flip, w + b,
                  std::min(kBlockK, words.rows - w - b), words);
    }
    w += n;
  }
}

using Panels = std::span<std::optional<PanelPacker>>;

void pack_awq_panels(Panels panels) {
  for (size_t i = 0, n = 1; i < panels.size(); i += n, n = 1) {
    if (!panels[i]->is_awq()) continue;
    while (n < kLinePanels && i + n < panels.size() && panels[i + n]->continues(*panels[i + n - 1]))
      ++n;
    for (auto& panel : panels.subspan(i, n)) panel->prefetch();
    PanelPacker::pack_awq(panels.subspan(i, n));
  }
}

/// Side by side, so that a line of the storage is used up before it leaves the caches.
void pack_outer_panels(Panels panels) {
  int64_t end = 0;
  for (auto& panel : panels) {
    if (!panel->is_outer()) continue;
    panel->prefetch();
    end = std::max(end, panel->end());
  }
  for (int64_t k = 0; k < end; k += kOuterStep) {
    for (auto& panel : panels) {
      const int64_t last = std::min(k + kOuterStep, panel->end());
      if (panel->is_outer() && k < last) panel->pack_codes(k, last, {});
    }
  }
}

/// One after the other, the next one on its way into the caches meanwhile.
void pack_other_panels(Panels panels) {
  const auto is_other = [&](size_t i) {
    return i < panels.size() && !panels[i]->is_awq() && !panels[i]->is_outer() &&
           !panels[i]->is_sorted();
  };
  bool warm = false;
  for (size_t i = 0; i < panels.size(); ++i) {
    if (!is_other(i)) continue;
    PackHints hints{.warm = warm};
    warm = is_other(i + 1) && panels[i + 1]->hint(hints);
    panels[i]->prefetch();
    panels[i]->pack_codes(0, panels[i]->end(), hints);
  }
}

/// Scratch of sorted panels of one spec: the offsets of all places, then a panel's words and one
/// more for places without a column.
struct SortScratch {
  int64_t words_offset = 0;
  WordHalves words;

  explicit SortScratch(const PanelSpec& spec)
      : words_offset(round_up(spec.k_padded() * 4, 64) + WordHalves::kMargin),
        words{nullptr, spec.cols / unit_k(spec.code) + 1, spec.code == Code::int4 ? 2 : 1} {}

  int64_t total() const { return words_offset + words.total_bytes() + WordHalves::kMargin; }
};

/// Zeros in the word behind the last column, which stand for places without one.
void clear_last_word(const WordHalves& words) {
  for (int64_t i = 1; i <= 2 * words.copies; ++i) {
    std::memset(words.data + i * words.copy_bytes() - kUnitBytes, 0, kUnitBytes);
  }
}

/// Each panel's words in order, then each column from its place; the next panel is on its way into
/// the caches meanwhile.
void pack_sorted_panels(Panels panels, std::byte* scratch_data) {
  const StoredMatrix* located = nullptr;
  for (size_t i = 0; i < panels.size(); ++i) {
    const PanelTask& task = panels[i]->task();
    if (!task.spec->is_sorted()) continue;
    SortScratch scratch(*task.spec);
    scratch.words.data = scratch_data + scratch.words_offset;
    auto* offsets = reinterpret_cast<int32_t*>(scratch_data);
    if (located != task.m) {
      pack_loops().locate(task.spec->code, task.order, task.spec->k_padded(),
                          scratch.words.copy_bytes(), offsets);
      located = task.m;
    }
    panels[i]->split_words(scratch.words);
    if (task.spec->cols % unit_k(task.spec->code) == 0) clear_last_word(scratch.words);
    panels[i]->prefetch();
    const bool more = i + 1 < panels.size() && panels[i + 1]->is_sorted();
    panels[i]->pack_columns(scratch.words, offsets,
                            more ? panels[i + 1]->words_ahead() : WordsAhead{});
  }
}

}  // namespace

void PanelRun::add(const PanelTask& task) {
  MOEKIT_DCHECK(count_ < kMaxPanels, "a run holds {} panels", kMaxPanels);
  tasks_[count_++] = task;
}

int64_t pack_scratch_bytes(const PanelSpec& spec) {
  return spec.is_sorted() ? SortScratch(spec).total() : 0;
}

void PanelRun::pack(std::byte* scratch) const {
  std::optional<PanelPacker> panels[kMaxPanels];
  for (int i = 0; i < count_; ++i) panels[i].emplace(tasks_[i]);
  const Panels all(panels, static_cast<size_t>(count_));
  pack_awq_panels(all);
  pack_outer_panels(all);
  pack_other_panels(all);
  pack_sorted_panels(all, scratch);
  for (auto& panel : all) panel->finish();
}

void pack_panel(const PanelTask& task, std::byte* scratch) {
  PanelRun run;
  run.add(task);
  run.pack(scratch);
}

}  // namespace moekit::linear
