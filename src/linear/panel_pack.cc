#include "linear/panel_pack.h"

#include <algorithm>
#include <cstring>
#include <limits>
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
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

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
  /// For words of another matrix's codes, which are read next.
  void become_words_of(const PanelPacker& codes) {
    order_.flip = codes.order_.flip;
    order_.is_read_next = true;
  }
  const PanelTask& task() const { return task_; }

  /// Codes of every place, from the panel's words in their own order.
  void pack_columns(const std::byte* words, const int32_t* offsets) const {
    pack_loops().columns(spec_.code, words, offsets, spec_.k_padded(), task_.out);
  }
  /// Those words, whatever the storage.
  void gather_words(std::byte* words) const;

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

void PanelPacker::gather_words(std::byte* words) const {
  const int64_t step = kRowChunkBytes * 8 / bits_of(spec_.code);
  const CodeOrder order{.code = Code::f32, .flip = order_.flip, .is_read_next = true};
  alignas(64) std::byte buffer[kPanelCols][kRowChunkBytes];
  const std::byte* rows[kPanelCols];
  for (int64_t k = 0; k < spec_.cols; k += step) {
    gather_rows(source_, task_.panel, k, std::min(step, spec_.cols - k), step, buffer, rows);
    pack_loops().rows(order, rows, kRowChunkBytes / 4, {},
                      words + word_offset(k / unit_k(spec_.code)));
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

/// Words of so many panels stay in a second cache beside what they become.
constexpr int64_t kWordsBytes = 256 << 10;

/// The codes of a matrix as one of 32-bit words, in their own order; nothing where its storage
/// doesn't hold such words.
std::optional<StoredMatrix> words_of(const StoredMatrix& m, int bits) {
  const CodeGrid& g = m.codes;
  const bool are_words =
      g.pack_axis == PackAxis::cols && bits_of(g.unit) == 32 && quant::holds_runs(g, bits);
  if (!are_words && (!quant::is_dense(g, bits) || m.cols * bits % 32 != 0)) return std::nullopt;
  StoredMatrix words;
  words.rows = m.rows;
  words.cols = ceil_div(m.cols * bits, 32);
  words.scheme.format = WeightFormat::f32;
  words.row_first = m.row_first;
  words.row_step = m.row_step;
  words.codes = {.data = g.data,
                 .unit = DType::f32,
                 .row_stride = g.row_stride,
                 .col_stride = are_words ? g.col_stride : 4};
  return words;
}

/// Where sorted panels of one spec are packed from: the offsets of all places, then panels of
/// words.
struct WordScratch {
  int64_t offsets_bytes = 0;
  int64_t words_bytes = 0;  ///< a panel's words, and one more for places without a column
  int64_t swapped = 0;      ///< from them to the same with nibbles swapped; 0: not needed
  int64_t panel_bytes = 0;  ///< from one panel to the next
  int64_t panels = 1;       ///< at a time

  explicit WordScratch(const PanelSpec& spec)
      : offsets_bytes(round_up(spec.k_padded() * 4, 64) + kWordMargin),
        words_bytes(word_offset(round_up(spec.cols / unit_k(spec.code) + 1, kBlockK))),
        swapped(spec.code == Code::int4 ? words_bytes : 0),
        panel_bytes(words_bytes + swapped),
        panels(std::max<int64_t>(1, kWordsBytes / panel_bytes)) {}

  int64_t total() const { return offsets_bytes + panels * panel_bytes + kWordMargin; }
};

/// The words of sorted panels of one matrix, in order.
void fill_words(Panels panels, const WordScratch& scratch, std::byte* words) {
  const PanelTask& first = panels[0]->task();
  const StoredVector no_bias;
  const std::optional<StoredMatrix> matrix = words_of(*first.m, bits_of(first.spec->code));
  PanelSpec spec;
  if (matrix) spec = plan_panels(*matrix);
  std::optional<PanelPacker> packers[PanelRun::kMaxPanels];
  for (size_t i = 0; i < panels.size(); ++i) {
    std::byte* out = words + static_cast<int64_t>(i) * scratch.panel_bytes;
    if (matrix) {
      packers[i].emplace(PanelTask{&*matrix, &no_bias, &spec, panels[i]->task().panel, out});
      packers[i]->become_words_of(*panels[i]);
    } else {
      panels[i]->gather_words(out);
    }
  }
  if (matrix) {
    pack_outer_panels({packers, panels.size()});
    pack_other_panels({packers, panels.size()});
  }
  const int64_t unit = unit_k(first.spec->code);
  for (size_t i = 0; i < panels.size(); ++i) {
    std::byte* mine = words + static_cast<int64_t>(i) * scratch.panel_bytes;
    std::byte* behind = mine + word_offset(first.spec->cols / unit);
    if (first.spec->cols % unit == 0) {
      std::memset(behind, 0, kUnitBytes);
      std::memset(behind + kWordHalf, 0, kUnitBytes);
    }
    if (scratch.swapped > 0) {
      pack_loops().swap_nibbles(mine, scratch.words_bytes, mine + scratch.swapped);
    }
  }
}

/// Sorted panels, of which those of one matrix come together: their words in order, then each
/// column from its place.
void pack_sorted_panels(Panels panels, std::byte* scratch_data) {
  const StoredMatrix* located = nullptr;
  for (size_t i = 0, n = 1; i < panels.size(); i += n, n = 1) {
    const PanelTask& task = panels[i]->task();
    if (!task.spec->is_sorted()) continue;
    const WordScratch scratch(*task.spec);
    auto* offsets = reinterpret_cast<int32_t*>(scratch_data);
    std::byte* words = scratch_data + scratch.offsets_bytes;
    if (located != task.m) {
      pack_loops().locate(task.spec->code, task.order, task.spec->k_padded(), scratch.swapped,
                          offsets);
      located = task.m;
    }
    while (i + n < panels.size() && panels[i + n]->task().m == task.m &&
           static_cast<int64_t>(n) < scratch.panels) {
      ++n;
    }
    fill_words(panels.subspan(i, n), scratch, words);
    for (size_t j = i; j < i + n; ++j) {
      panels[j]->prefetch();
      panels[j]->pack_columns(words + static_cast<int64_t>(j - i) * scratch.panel_bytes, offsets);
    }
  }
}

}  // namespace

void PanelRun::add(const PanelTask& task) {
  MOEKIT_DCHECK(count_ < kMaxPanels, "a run holds {} panels", kMaxPanels);
  tasks_[count_++] = task;
}

int64_t pack_scratch_bytes(const PanelSpec& spec) {
  return spec.is_sorted() ? WordScratch(spec).total() : 0;
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
