// Tensor files: .npy and .safetensors, as `FILE[:NAME]` names them on the command line.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moekit/export.h"
#include "moekit/tensor.h"

namespace moekit {

/// A tensor read from a file: row-major, aligned for its dtype, alive as long as `keep_alive`.
struct FileTensor {
  std::string name;  ///< empty for .npy
  TensorView view;
  std::shared_ptr<const void> keep_alive;
};

/// Reads `FILE[:NAME]`: split at the last ':' unless the whole string is a file. NAME chooses a
/// tensor of a .safetensors file and may be left out when there is only one. .npy holds f16, f32,
/// f64, i32 or i64 in C or Fortran order. Throws invalid_argument (no such file, no such or no
/// chosen tensor, unknown ending), unsupported (other element types) or corrupt_file (malformed).
MOEKIT_API FileTensor read_tensor(const std::string& file_and_name);

/// All tensors of a file, sorted by name.
MOEKIT_API std::vector<FileTensor> read_tensors(const std::string& path);

struct NamedTensor {
  std::string name;
  TensorView view;  ///< any strides; on the CPU
};

/// Writes a text file (a report, a trace) beside `path` and renames it. Throws invalid_argument
/// naming path and reason.
MOEKIT_API void write_text(const std::string& path, std::string_view text);

/// Writes one f32 tensor as .npy. The file appears whole or not at all.
MOEKIT_API void write_npy(const std::string& path, const TensorView& tensor);

/// Writes tensors as .safetensors in the order given. The file appears whole or not at all.
MOEKIT_API void write_safetensors(
    const std::string& path, std::span<const NamedTensor> tensors,
    std::span<const std::pair<std::string, std::string>> metadata = {});

}  // namespace moekit
