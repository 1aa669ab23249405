// Reads the tensors of one MoE block as matrices. Every tensor is accounted for: what is missing
// and what nobody asked for are errors with samples of both.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/model_files.h"
#include "checkpoint/quant_config.h"
#include "quant/stored_matrix.h"

namespace moekit::checkpoint {

/// Where a matrix stands and which slice of its tensors it is.
struct MatrixPlace {
  std::string module;   ///< full name, without the tensor's own ending
  bool bare = false;    ///< ExpertLayout::bare
  int64_t experts = 0;  ///< leading expert axis, 0: none
  int64_t expert = 0;
  bool flat = false;
  bool input_first = false;
  bool along_outputs = false;  ///< codes are packed and scaled along the output axis
  int64_t rows = 0;            ///< N of the logical matrix
  int64_t cols = 0;            ///< K
  int64_t stored_rows = 0;     ///< outputs in the tensor: N, or 2N for gate and up together
  int64_t row_first = 0;
  int64_t row_step = 1;
};

/// A matrix and what its scheme says about its input.
struct ReadMatrix {
  StoredMatrix matrix;
  ActivationScheme input;
  std::string label;  ///< the scheme, for messages
};

/// Memory that views point into beside the mapped files.
struct OwnedData {
  std::vector<std::shared_ptr<const SafetensorsFile>> files;
  std::vector<std::unique_ptr<std::vector<int32_t>>> group_indices;
  std::vector<int64_t> hash_table;
};

class BlockReader {
 public:
  /// `tensors` are all tensors whose names begin with `prefix`. With `read_values` false no byte of
  /// tensor data is touched: scalars stay at their defaults.
  BlockReader(std::string prefix, const std::vector<Tensor>& tensors, const QuantConfig& quant,
              bool read_values, OwnedData& owned);

  const std::string& prefix() const { return prefix_; }
  /// True when a tensor of this module stands in the block; {e} in the name is any number.
  bool has_module(std::string_view pattern) const;
  int64_t bytes() const { return bytes_; }

  /// A quantized or plain matrix. Missing tensors are noted for finish(); the result is then empty.
  ReadMatrix matrix(const MatrixPlace& place);
  /// An unquantized matrix [rows, cols] by the tensor's name after the prefix.
  StoredMatrix plain(std::string_view name, int64_t rows, int64_t cols);
  /// A matrix [rows, cols] named "MODULE.weight" after the prefix that tools quantize or leave
  /// alone as they please (latent projections, shared gates): what stands there decides.
  StoredMatrix dense(std::string_view name, int64_t rows, int64_t cols);
  /// A vector of `size` elements by the tensor's name after the prefix.
  StoredVector vector(std::string_view name, int64_t size);
  /// The bias of `place`: [N], or [E, stored rows] in stacks.
  StoredVector bias(const MatrixPlace& place);
  /// An integer table [rows, cols] as int64 in owned memory, every value in [0, limit).
  const int64_t* table(std::string_view name, int64_t rows, int64_t cols, int64_t limit);

  /// Throws corrupt_file when tensors were missing or left over.
  void finish() const;
  /// Throws corrupt_file: WHAT, with samples of the block's tensors.
  [[noreturn]] void finish_unknown(std::string_view what) const;

 private:
  struct Slot {
    Tensor tensor;
    mutable bool used = false;
  };

  const Slot* find(const std::string& name) const;
  const Tensor* claim(const std::string& name);
  const Tensor* claim_optional(const std::string& name);
  std::string part(const MatrixPlace& place, std::string_view ending) const;
  void read_plain(const MatrixPlace& place, const Tensor& tensor, ReadMatrix& out) const;
  void read_quantized(const MatrixPlace& place, const Scheme& scheme, ReadMatrix& out);
  CodeGrid grid(const MatrixPlace& place, const Tensor& tensor, const CodeGrid& kind,
                unsigned dtypes, bool input_first, int64_t outputs, int64_t inputs,
                bool blocks_of_16) const;
  ScaleGrid scales(const MatrixPlace& place, const Scheme& scheme, const Tensor& tensor) const;
  float scalar(const Tensor& tensor, bool positive) const;
  void read_group_index(const MatrixPlace& place, const Tensor& tensor, int64_t groups,
                        int64_t group, StoredMatrix& out);
  void check_shape_tensor(const MatrixPlace& place, const Tensor& tensor) const;

  std::string prefix_;
  const QuantConfig& quant_;
  bool read_values_;
  OwnedData& owned_;
  int64_t bytes_ = 0;
  std::vector<Slot> slots_;  ///< sorted by name
  std::set<std::string> missing_;
  std::vector<std::string> missing_samples_;  ///< the first of them, in the order of reading
};

}  // namespace moekit::checkpoint
