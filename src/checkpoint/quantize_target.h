// The schemes that quantize_checkpoint writes: how compressed-tensors names, lays out and describes
// them. Owns the text of quantization_config.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "quant/weight_codec.h"

namespace moekit::checkpoint {

/// One set of quantization arguments, as config_groups holds them.
struct TargetArguments {
  int bits = 8;
  bool is_float = true;
  std::string_view strategy{};
  int group = 0;        ///< 0: null
  bool blocks = false;  ///< block_structure [128, 128]
  bool dynamic = false;
  std::string_view scale_dtype{};  ///< empty: null
};

struct Target {
  std::string_view name{};    ///< on the command line
  std::string_view format{};  ///< compressed-tensors' own
  WeightScheme weights{};
  std::string_view codes = "weight";  ///< name of the tensor of codes
  int64_t group = 1;                  ///< inputs a scale: must divide K
  TargetArguments weight_arguments{};
  bool quantizes_inputs = false;
  TargetArguments input_arguments{};
};

/// Throws invalid_argument naming the schemes there are.
const Target& find_target(std::string_view name);

/// The value of "quantization_config", indented as a member of the root object.
std::string quantization_config(const Target& target, const std::vector<std::string>& ignored);

/// A quantized matrix and the tensors that a file holds of it.
class QuantizedMatrix {
 public:
  /// `w` is [rows, cols]; `scale_dtype` that of fp8 and integer scales; `amax` as in EncodeOptions.
  /// Throws unsupported when the target's groups do not divide cols.
  QuantizedMatrix(const Target& target, std::string module, const float* w, int64_t rows,
                  int64_t cols, DType scale_dtype, float amax, ThreadPool& threads);
  /// Sources point into this object.
  void append_to(std::vector<TensorSource>& sources) const;

 private:
  const Target& target_;
  std::string module_;
  quant::EncodedLayout layout_;
  Buffer storage_;
  float global_ = 1.0f;
  int64_t shape_[2];
};

}  // namespace moekit::checkpoint
