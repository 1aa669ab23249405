// Stored codec: exact fp32 values of a StoredMatrix, whatever its storage. Slow and general;
// packers have fast paths of their own.
#pragma once

#include "quant/stored_matrix.h"

namespace moekit::quant {

/// w[i] = fp32 value of element (row, first_col + i), i in [0, count): code times block scale times
/// or divided by global, each product rounded to fp32 in this order: (code * scale) then global.
void decode_weights(const StoredMatrix& m, int64_t row, int64_t first_col, int64_t count, float* w);

/// Raw code of element (row, col): the stored bits of a float format, or the integer before
/// offsets.
uint32_t code_at(const StoredMatrix& m, int64_t row, int64_t col);

/// Whether a unit holds codes of `bits` bits that follow each other along a row, lowest bits first:
/// one, or as many as fill it.
bool holds_runs(const CodeGrid& grid, int bits);
/// The same, and units of a row follow each other too: code q of a row lies at bits [q * bits, (q +
/// 1) * bits) of the row's bytes, as units are little-endian.
bool is_dense(const CodeGrid& grid, int bits);

/// Codes (row, first_col) to (row, first_col + count - 1) of `bits` (4, 8, 16 or 32) bits as dense
/// bytes, whatever their storage.
void copy_codes(const StoredMatrix& m, int64_t row, int64_t first_col, int64_t count, int bits,
                std::byte* out);

/// Block scale of element (row, col) as fp32, without the global; 1 where the format has none.
float scale_at(const StoredMatrix& m, int64_t row, int64_t col);

/// Zero point of element (row, col), offsets applied; 0 for symmetric formats.
int32_t zero_at(const StoredMatrix& m, int64_t row, int64_t col);

/// Element i of a vector as fp32.
float element(const StoredVector& v, int64_t i);

}  // namespace moekit::quant
