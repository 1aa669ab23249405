// PanelSource: the codes of a panel's 32 rows as plain runs of bytes in K order, whatever the
// storage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "linear/pack_loops.h"
#include "linear/panel_spec.h"
#include "quant/stored_matrix.h"

namespace moekit::linear {

/// Where the bytes of a panel's rows come from.
struct RowSource {
  const StoredMatrix* m = nullptr;
  const PanelSpec* spec = nullptr;
  bool dense = false;    ///< rows are plain runs of bytes in K order
  bool strided = false;  ///< elements (or whole 32-bit words of codes along K) lie col_stride apart
  int64_t element_bytes = 0;  ///< strided: bytes copied per step
  int64_t row_bytes = 0;      ///< bytes of cols codes
};

RowSource source_of(const StoredMatrix& m, const PanelSpec& spec);

/// First byte of a row of a dense storage.
const std::byte* row_start(const StoredMatrix& m, int64_t row);

/// A full panel's codes where they lie with K outside and its outputs beside each other, so that
/// they are interleaved in place; nothing where they do not.
std::optional<OuterCodes> outer_codes(const RowSource& s, int64_t panel);

/// A full panel's AWQ words at K 0, or null where the storage is another.
const std::byte* awq_words(const RowSource& s, int64_t panel);

/// Brings `count` codes of the panel's rows from K `first_k` on into dense rows, zero padded to
/// `padded` codes, and points rows[] at them; dense storages are pointed at in place.
void gather_rows(const RowSource& s, int64_t panel, int64_t first_k, int64_t count, int64_t padded,
                 std::byte (*buffer)[kRowChunkBytes], const std::byte** rows);

}  // namespace moekit::linear
