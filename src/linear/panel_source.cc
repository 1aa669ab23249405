#include "linear/panel_source.h"

#include <algorithm>
#include <cstring>

#include "quant/stored_codec.h"
#include "tensor/float_formats.h"

namespace moekit::linear {
namespace {

/// Storages in odd orders, code by code; and widened ones, value by value.
void gather_slowly(const RowSource& s, int64_t row, int64_t first_k, int64_t count,
                   std::byte* out) {
  const StoredMatrix& m = *s.m;
  if (s.spec->widened) {
    // The global stays apart, in the column scale.
    StoredMatrix local = m;
    local.global = 1.0f;
    float values[kRowChunkBytes];
    quant::decode_weights(local, row, first_k, count, values);
    for (int64_t i = 0; i < count; ++i) {
      if (s.spec->code == Code::f32) {
        std::memcpy(out + i * 4, &values[i], 4);
      } else {
        const uint16_t b = f32_to_bf16(values[i]);
        std::memcpy(out + i * 2, &b, 2);
      }
    }
    return;
  }
  quant::copy_codes(m, row, first_k, count, bits_of(s.spec->code), out);
}

/// AWQ: a word holds eight outputs of one input. Eight rows of the panel at once.
bool is_awq(const StoredMatrix& m, const PanelSpec& spec) {
  const CodeGrid& g = m.codes;
  return !spec.widened && spec.code == Code::int4 && g.pack_axis == PackAxis::rows &&
         g.order == PackOrder::awq && g.pack == 8 && bits_of(g.unit) == 32 && m.row_step == 1 &&
         m.row_first % 8 == 0;
}

void gather_awq(const StoredMatrix& m, int64_t first_row, int64_t first_k, int64_t count,
                std::byte (*rows)[kRowChunkBytes]) {
  constexpr int kPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // nibble of output i
  const std::byte* base = m.codes.data + (m.row_first + first_row) / 8 * m.codes.row_stride;
  for (int64_t k = 0; k < count; ++k) {
    uint32_t word;
    std::memcpy(&word, base + (first_k + k) * m.codes.col_stride, 4);
    for (int i = 0; i < 8; ++i) {
      auto* b = reinterpret_cast<uint8_t*>(rows[i]) + k / 2;
      const uint32_t code = word >> (4 * kPlace[i]) & 15u;
      *b = static_cast<uint8_t>(k % 2 == 0 ? code : *b | code << 4);
    }
  }
}

/// K outside: where outputs are contiguous this reads whole lines.
template <int kBytes>
void gather_strided(const StoredMatrix& m, int64_t first_row, int64_t valid, int64_t first_unit,
                    int64_t units, std::byte (*rows)[kRowChunkBytes]) {
  const int64_t step = m.row_step * m.codes.row_stride;
  const std::byte* base = row_start(m, first_row) + first_unit * m.codes.col_stride;
  for (int64_t at = 0; at < units; ++at, base += m.codes.col_stride) {
    for (int64_t i = 0; i < valid; ++i) {
      std::memcpy(rows[i] + at * kBytes, base + i * step, kBytes);
    }
  }
}

}  // namespace

const std::byte* row_start(const StoredMatrix& m, int64_t row) {
  return m.codes.data + (m.row_first + m.row_step * row) * m.codes.row_stride;
}

std::optional<OuterCodes> outer_codes(const RowSource& s, int64_t panel) {
  const StoredMatrix& m = *s.m;
  const int64_t first_row = panel * kPanelCols;
  if (!s.strided || first_row + kPanelCols > m.rows) return std::nullopt;
  OuterCodes codes;
  codes.base = row_start(m, first_row);
  codes.k_stride = m.codes.col_stride;
  codes.element_bytes = static_cast<int32_t>(s.element_bytes);
  if (m.codes.row_stride != s.element_bytes) return std::nullopt;
  if (m.row_step == 1) return codes;
  // Two matrices interleaved output by output.
  if (m.row_step != 2 || s.element_bytes > 2 || m.row_first > 1) return std::nullopt;
  codes.paired = true;
  codes.pair_shift = static_cast<int32_t>(8 * s.element_bytes * m.row_first);
  codes.base -= s.element_bytes * m.row_first;
  return codes;
}

const std::byte* awq_words(const RowSource& s, int64_t panel) {
  const StoredMatrix& m = *s.m;
  const int64_t first_row = panel * kPanelCols;
  const bool full = first_row + kPanelCols <= m.rows;
  if (!full || !is_awq(m, *s.spec) || m.codes.row_stride != 4) return nullptr;
  return m.codes.data + (m.row_first + first_row) / 8 * 4;
}

RowSource source_of(const StoredMatrix& m, const PanelSpec& spec) {
  RowSource s{&m, &spec};
  const CodeGrid& g = m.codes;
  const int bits = bits_of(spec.code);
  s.row_bytes = ceil_div(spec.cols * bits, 8);
  if (spec.widened) return s;
  if (!quant::holds_runs(g, bits)) return s;
  s.element_bytes = std::max(8, bits_of(g.unit)) / 8;
  s.dense = quant::is_dense(g, bits);
  s.strided = !s.dense;
  return s;
}

void gather_rows(const RowSource& s, int64_t panel, int64_t first_k, int64_t count, int64_t padded,
                 std::byte (*buffer)[kRowChunkBytes], const std::byte** rows) {
  const StoredMatrix& m = *s.m;
  const int bits = bits_of(s.spec->code);
  const int64_t bytes = ceil_div(count * bits, 8);
  const int64_t padded_bytes = padded * bits / 8;
  const int64_t first_row = panel * kPanelCols;
  const int64_t valid = std::min(kPanelCols, m.rows - first_row);
  if (s.dense && count == padded) {
    for (int64_t i = 0; i < valid; ++i) rows[i] = row_start(m, first_row + i) + first_k * bits / 8;
  } else {
    if (s.dense) {
      for (int64_t i = 0; i < valid; ++i) {
        std::memcpy(buffer[i], row_start(m, first_row + i) + first_k * bits / 8,
                    static_cast<size_t>(bytes));
      }
    } else if (s.strided) {
      const int64_t units = ceil_div(bytes, s.element_bytes);
      const int64_t first = first_k * bits / 8 / s.element_bytes;
      switch (s.element_bytes) {
        case 1: gather_strided<1>(m, first_row, valid, first, units, buffer); break;
        case 2: gather_strided<2>(m, first_row, valid, first, units, buffer); break;
        default: gather_strided<4>(m, first_row, valid, first, units, buffer); break;
      }
    } else if (is_awq(m, *s.spec) && valid % 8 == 0) {
      for (int64_t i = 0; i < valid; i += 8) {
        gather_awq(m, first_row + i, first_k, count, buffer + i);
      }
    } else {
      for (int64_t i = 0; i < valid; ++i)
        gather_slowly(s, first_row + i, first_k, count, buffer[i]);
    }
    // Whole units bring codes of the neighbours along, an odd count a high nibble; the pad must
    // hold zeros.
    for (int64_t i = 0; i < valid; ++i) {
      std::memset(buffer[i] + bytes, 0, static_cast<size_t>(padded_bytes - bytes));
      if (bits == 4 && count % 2 != 0) buffer[i][count / 2] &= std::byte{0x0f};
      rows[i] = buffer[i];
    }
  }
  for (int64_t i = valid; i < kPanelCols; ++i) {
    std::memset(buffer[i], 0, static_cast<size_t>(padded_bytes));
    rows[i] = buffer[i];
  }
}

}  // namespace moekit::linear
