// Column order: how matrices whose inputs name their scale group one by one (GPTQ act order) come
// into panels. Their columns are sorted by group, so that each group is one run of K; input rows
// are permuted alike before a product.
#pragma once

#include <cstdint>
#include <span>

#include "base/math.h"
#include "linear/codes.h"
#include "quant/stored_matrix.h"

namespace moekit::linear {

/// A sorted K axis. Groups come in ascending order, the columns of each in their own. A group takes
/// whole runs of `group` places, the last one only as many as it has columns; places that are left
/// over hold no column. One value for all matrices that share input rows or a PanelSpec.
struct SortedColumns {
  int32_t group = 0;   ///< places under one scale, a multiple of 16
  int64_t places = 0;  ///< that hold all columns of each of the matrices
};

/// How `matrices` of one shape and scheme are sorted; those without group_index count as if each
/// column named its group. With groups as the format has them (each full but the last one, as tools
/// write them) there is no place without a column. Else groups get runs of 32 places (16 where the
/// format's groups are as short). Reads group indices only.
SortedColumns sort_columns(std::span<const StoredMatrix* const> matrices);

/// Entries of an order: places up to the next whole block.
inline int64_t order_entries(int64_t places) { return round_up(places, kBlockK); }
/// Bytes that it takes in a blob.
inline int64_t order_bytes(int64_t places) { return round_up(order_entries(places) * 4, 64); }

/// Groups that a matrix's columns may name: the largest, plus one.
int64_t count_groups(const StoredMatrix& m);

/// order[place] = the column of `m` that lies there, or m.cols where none does. `counters` is
/// scratch of count_groups(m) entries. Never throws.
void fill_order(const StoredMatrix& m, const SortedColumns& sorted, int32_t* order,
                int32_t* counters);

}  // namespace moekit::linear
