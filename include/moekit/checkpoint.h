// What a checkpoint holds, without loading it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moekit/config.h"
#include "moekit/export.h"

namespace moekit {

struct CanonicalLayer;

struct LayerInfo {
  int index = 0;
  bool moe = false;
  MoeConfig config;   ///< meaningful when moe
  int64_t bytes = 0;  ///< stored bytes of the MoE block
  std::string kind;   ///< "moe" or "dense"
};

struct TensorInfo {
  std::string name;
  std::string dtype;  ///< as safetensors spells it
  std::vector<int64_t> shape;
  std::string file;
  int64_t bytes = 0;
};

struct CheckpointInfo {
  std::string family;  ///< model_type
  std::string
      quant_method;  ///< "", "compressed-tensors", "modelopt", "fp8", "mxfp4", "awq", "gptq"
  std::string quant_format;       ///< what the method calls its scheme
  std::vector<LayerInfo> layers;  ///< every decoder layer
  std::vector<std::pair<std::string, std::string>>
      conventions;                   ///< e.g. {"global_scale", "divisor"}
  std::vector<std::string> ignored;  ///< the quantization's ignore list
  std::vector<TensorInfo> tensors;   ///< filled when asked for
};

/// Reads config and headers only. Throws invalid_argument (no such directory), corrupt_file or
/// unsupported.
MOEKIT_API CheckpointInfo inspect_checkpoint(const std::string& model_dir,
                                             bool with_tensors = false);

/// Maps the files and builds views of one layer; -1 = the first MoE layer; a dense or missing layer
/// is invalid_argument.
MOEKIT_API std::shared_ptr<const CanonicalLayer> load_canonical(const std::string& model_dir,
                                                                int layer);

struct QuantizeOptions {
  std::string scheme;   ///< fp8_channel, fp8_block, nvfp4, mxfp4, mxfp8 or int4_g128
  int num_threads = 0;  ///< 0: the CPUs that this process may use
  std::function<void(const std::string&)> progress{};  ///< called now and then with what is done
};

struct QuantizeReport {
  int64_t matrices = 0;        ///< quantized ones
  int64_t tensors_copied = 0;  ///< written as they were
  int64_t bytes_before = 0;    ///< of all tensors
  int64_t bytes_after = 0;
  std::vector<std::string> ignored;  ///< modules that the new config leaves unquantized
};

/// Writes `out_dir`: the model with the experts (routed and shared) in a compressed-tensors scheme,
/// everything else as it is. The directory appears whole or not at all; the same input gives the
/// same bytes. Throws invalid_argument (scheme, directories), unsupported (quantized already, sizes
/// that the scheme's groups do not divide, a family whose experts have no such form), corrupt_file.
MOEKIT_API QuantizeReport quantize_checkpoint(const std::string& model_dir,
                                              const std::string& out_dir,
                                              const QuantizeOptions& options);

}  // namespace moekit
