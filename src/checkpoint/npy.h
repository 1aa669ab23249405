// The .npy format: header parsing and writing, Fortran order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/file.h"
#include "moekit/dtype.h"

namespace moekit::checkpoint {

struct NpyHeader {
  DType dtype = DType::f32;
  bool fortran_order = false;
  std::vector<int64_t> shape;
  int64_t num_elements = 0;
  int64_t data_offset = 0;
};

/// Versions 1 to 3. Throws corrupt_file for every malformed header and for data of another length
/// than the header says, unsupported for element types other than little-endian f2 f4 f8 i4 i8.
NpyHeader parse_npy(const MappedFile& file);

/// Fortran-order elements at `data` (any alignment) to C order at `out`.
void copy_fortran_order(const NpyHeader& header, const std::byte* data, std::byte* out);

/// Magic, version 1 header and padding of a C-order float32 array.
std::string npy_header_f32(const std::vector<int64_t>& shape);

}  // namespace moekit::checkpoint
