// What a checkpoint says about its quantization: method, schemes, targets and exceptions.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "checkpoint/families.h"
#include "checkpoint/name_pattern.h"
#include "checkpoint/scheme.h"

namespace moekit::checkpoint {

class QuantConfig {
 public:
  /// Reads quantization_config of the root or of the text model's config, else
  /// hf_quant_config.json. Throws unsupported for a method, scheme or option that is not covered,
  /// corrupt_file for malformed content.
  static QuantConfig read(const JsonPlace& root, const JsonPlace& text, const JsonPlace& file);

  Method method() const { return method_; }
  const std::string& method_name() const { return method_name_; }
  const std::string& format() const { return format_; }
  const std::vector<std::string>& ignored() const { return ignored_; }

  /// The scheme of a module ("model.layers.0.mlp.experts.3.up_proj"), null when it is unquantized.
  const Scheme* scheme_of(std::string_view module) const;
  /// True where the files, not the config, tell which matrices are quantized: a plain
  /// floating-point tensor without scales is then unquantized.
  bool presence_decides() const { return presence_decides_; }
  /// The first scheme, for summaries; null when nothing is quantized.
  const Scheme* main_scheme() const { return schemes_.empty() ? nullptr : &schemes_.front(); }
  /// For the GPT-OSS packing of ModelOpt's mxfp4: codes and scales run along the output axis.
  static Scheme along_outputs(Scheme scheme);

 private:
  struct Target {
    NamePattern pattern;
    size_t scheme = 0;
  };

  void read_compressed_tensors(const JsonPlace& config);
  void read_modelopt(const JsonPlace& config, std::string_view ignore_key);
  void read_fp8(const JsonPlace& config);
  void read_awq(const JsonPlace& config);
  void read_gptq(const JsonPlace& config);
  void read_ignored(const JsonPlace& list, NamePattern::Syntax syntax);

  Method method_ = kPlain;
  std::string method_name_;
  std::string format_;
  bool presence_decides_ = false;
  std::vector<Scheme> schemes_;
  std::vector<Target> targets_;  ///< in order of precedence
  std::vector<NamePattern> exceptions_;
  std::vector<std::string> ignored_;
};

}  // namespace moekit::checkpoint
