#include "checkpoint/quant_config.h"

#include <algorithm>

#include "base/check.h"
#include "checkpoint/error_codes.h"
#include "checkpoint/scheme_builders.h"

namespace moekit::checkpoint {
namespace {

constexpr size_t kMaxPatterns = 100000;

}  // namespace

void QuantConfig::read_ignored(const JsonPlace& list, NamePattern::Syntax syntax) {
  if (!list.present()) return;
  const std::vector<JsonPlace> names = list.elements();
  if (names.size() > kMaxPatterns) list.expected("a shorter list");
  for (const JsonPlace& place : names) {
    ignored_.push_back(place.as_string());
    exceptions_.emplace_back(place.as_string(), syntax);
  }
}

void QuantConfig::read_compressed_tensors(const JsonPlace& config) {
  constexpr auto kSyntax = NamePattern::Syntax::compressed_tensors;
  method_ = kCompressedTensors;
  const std::string status = config.at("quantization_status").string_or("compressed");
  MOEKIT_CHECK_AS(kUnsupported, status == "compressed",
                  "{}: expected compressed weights, came status {}", config.where(),
                  json_quote(status));
  refuse_transforms(config);
  format_ = config.at("format").string_or("");
  for (const auto& [name, group] : config.at("config_groups").members()) {
    const std::string format = group.at("format").string_or(format_);
    schemes_.push_back(ct_scheme(name, group, format));
    for (const JsonPlace& target : group.at("targets").elements()) {
      if (targets_.size() >= kMaxPatterns) target.expected("fewer targets");
      targets_.push_back({NamePattern(target.as_string(), kSyntax), schemes_.size() - 1});
    }
    if (format_.empty() || format_ == "mixed-precision") format_ = format;
  }
  std::ranges::stable_sort(targets_, {}, [](const Target& t) { return t.pattern.precedence(); });
  read_ignored(config.at("ignore"), kSyntax);
}

void QuantConfig::read_modelopt(const JsonPlace& config, std::string_view ignore_key) {
  constexpr auto kSyntax = NamePattern::Syntax::glob;
  method_ = kModelOpt;
  presence_decides_ = true;
  const JsonPlace algorithm = config.at("quant_algo");
  format_ = algorithm.as_string();
  if (lower(format_) == "mixed_precision") {
    for (const auto& [name, layer] : config.at("quantized_layers").members()) {
      const Scheme scheme = modelopt_scheme(layer.at("quant_algo"));
      auto it = std::ranges::find(schemes_, scheme.label, &Scheme::label);
      if (it == schemes_.end()) it = schemes_.insert(schemes_.end(), scheme);
      targets_.push_back({NamePattern(name, kSyntax), static_cast<size_t>(it - schemes_.begin())});
    }
  } else {
    schemes_.push_back(modelopt_scheme(algorithm));
    targets_.push_back({NamePattern("*", kSyntax), 0});
  }
  std::ranges::stable_sort(targets_, {}, [](const Target& t) { return t.pattern.precedence(); });
  read_ignored(config.at(ignore_key), kSyntax);
}

void QuantConfig::read_fp8(const JsonPlace& config) {
  method_ = kFp8;
  presence_decides_ = true;
  const JsonPlace block = config.at("weight_block_size");
  MOEKIT_CHECK_AS(kUnsupported, block.present(), "{}: fp8 without blocks is not covered",
                  block.where());
  const std::vector<JsonPlace> sides = block.elements();
  MOEKIT_CHECK_AS(kUnsupported,
                  sides.size() == 2 && sides[0].as_int() == 128 && sides[1].as_int() == 128,
                  "{}: only blocks of 128x128 are covered", block.where());
  const JsonPlace activations = config.at("activation_scheme");
  MOEKIT_CHECK_AS(kUnsupported, activations.string_or("dynamic") == "dynamic",
                  "{}: only dynamic activations are covered, came {}", activations.where(),
                  json_quote(activations.string_or("")));
  const std::string scale_format = config.at("scale_fmt").string_or("float");
  MOEKIT_CHECK_AS(kUnsupported, scale_format == "float" || scale_format == "ue8m0",
                  "{}: scale format {} is not covered (covered: float, ue8m0)",
                  config.at("scale_fmt").where(), json_quote(scale_format));
  Scheme s = fp8(WeightFormat::fp8_block);
  s.label = "fp8 128x128, scale " + scale_format;
  s.scales = "weight_scale_inv";
  s.scale_dtypes |= bit(DType::f8_e8m0);
  s.input.format = ActivationFormat::fp8_block;
  s.input.ue8m0_scale = scale_format == "ue8m0";
  format_ = "fp8_block";
  schemes_.push_back(s);
  targets_.push_back({NamePattern("*", NamePattern::Syntax::glob), 0});
  const JsonPlace plain = config.at("modules_to_not_convert");
  if (!plain.present()) return;
  // For the reader's information: the list's matching rules differ between versions of the writer,
  // and the presence of weight_scale_inv tells what was converted.
  for (const JsonPlace& place : plain.elements()) ignored_.push_back(place.as_string());
}

void QuantConfig::read_awq(const JsonPlace& config) {
  method_ = kAwq;
  presence_decides_ = true;
  const int64_t bits = config.at("bits").as_int(1, 64);
  const std::string version = lower(config.at("version").string_or("gemm"));
  MOEKIT_CHECK_AS(kUnsupported,
                  bits == 4 && version == "gemm" && config.at("zero_point").bool_or(true),
                  "{}: AWQ is covered with 4 bits, version gemm and zero points; came {} bits, {}",
                  config.where(), bits, json_quote(version));
  Scheme s = integers(bits, group_size(config.at("group_size")), true);
  s.label = format_ = "awq gemm";
  s.codes = "qweight";
  s.input_first = true;
  s.pack_axis = PackAxis::rows;
  s.pack_order = PackOrder::awq;
  s.scales = "scales";
  s.zeros = "qzeros";
  s.zero_pack_axis = PackAxis::rows;
  s.zero_pack = s.pack;
  schemes_.push_back(s);
  targets_.push_back({NamePattern("*", NamePattern::Syntax::glob), 0});
  read_ignored(config.at("modules_to_not_convert"), NamePattern::Syntax::glob);
  exceptions_.clear();  // written as fragments of names; the presence of qweight tells
}

void QuantConfig::read_gptq(const JsonPlace& config) {
  method_ = kGptq;
  presence_decides_ = true;
  const int64_t bits = config.at("bits").as_int(1, 64);
  const std::string format = config.at("checkpoint_format").string_or("gptq");
  MOEKIT_CHECK_AS(kUnsupported,
                  (bits == 4 || bits == 8) && (format == "gptq" || format == "gptq_v2"),
                  "{}: GPTQ is covered with 4 or 8 bits, format gptq or gptq_v2; came {} bits, {}",
                  config.where(), bits, json_quote(format));
  const JsonPlace rules = config.at("dynamic");
  if (rules.present()) {
    for (const auto& [pattern, rule] : rules.members()) {
      MOEKIT_CHECK_AS(kUnsupported, pattern.starts_with("-:"),
                      "{}: settings that differ between modules are not covered, came {}",
                      rule.where(), json_quote(pattern));
      ignored_.push_back(pattern);
    }
  }
  Scheme s = integers(bits, group_size(config.at("group_size")), true);
  s.label = format_ = format;
  s.codes = "qweight";
  s.input_first = true;
  s.pack_axis = PackAxis::cols;
  s.scales = "scales";
  s.zeros = "qzeros";
  s.zero_pack_axis = PackAxis::rows;
  s.zero_pack = s.pack;
  s.zero_offset = format == "gptq" ? 1 : 0;
  s.group_index = "g_idx";
  s.group_index_required = config.at("desc_act").bool_or(false) && s.col_group > 0;
  schemes_.push_back(s);
  targets_.push_back({NamePattern("*", NamePattern::Syntax::glob), 0});
}

Scheme QuantConfig::along_outputs(Scheme s) {
  s.pack_axis = PackAxis::rows;
  std::swap(s.row_group, s.col_group);
  return s;
}

QuantConfig QuantConfig::read(const JsonPlace& root, const JsonPlace& text, const JsonPlace& file) {
  QuantConfig quant;
  JsonPlace config = root.at("quantization_config");
  if (!config.present()) config = text.at("quantization_config");
  if (!config.present()) config = root.at("compression_config");
  if (!config.present()) {
    const JsonPlace section = file.at("quantization");
    if (!section.present() || !section.at("quant_algo").present()) return quant;
    quant.method_name_ = "modelopt";
    quant.read_modelopt(section, "exclude_modules");
    return quant;
  }
  quant.method_name_ = config.at("quant_method").as_string();
  const std::string& name = quant.method_name_;
  if (name == "compressed-tensors") {
    quant.read_compressed_tensors(config);
  } else if (name == "modelopt" || name == "modelopt_fp4" || name == "modelopt_mixed") {
    // Older exports nest the section as hf_quant_config.json does.
    const JsonPlace section = config.at("quantization");
    quant.read_modelopt(section.present() ? section : config,
                        section.present() ? "exclude_modules" : "ignore");
  } else if (name == "fp8") {
    quant.read_fp8(config);
  } else if (name == "mxfp4") {
    quant.method_ = kMxfp4;
    Scheme s = fp4(WeightFormat::mxfp4);
    s.label = quant.format_ = "mxfp4";
    s.codes = "blocks";
    s.scales = "scales";
    s.blocks_of_16 = true;
    quant.schemes_.push_back(s);
    quant.targets_.push_back({NamePattern("*", NamePattern::Syntax::glob), 0});
    quant.read_ignored(config.at("modules_to_not_convert"), NamePattern::Syntax::glob);
  } else if (name == "awq") {
    quant.read_awq(config);
  } else if (name == "gptq") {
    quant.read_gptq(config);
  } else {
    fail(kUnsupported,
         "{}: quantization method {} is not covered (covered: compressed-tensors, modelopt, fp8, "
         "mxfp4, awq, gptq)",
         config.at("quant_method").where(), json_quote(name));
  }
  return quant;
}

const Scheme* QuantConfig::scheme_of(std::string_view module) const {
  for (const NamePattern& exception : exceptions_) {
    if (exception.matches(module)) return nullptr;
  }
  for (const Target& target : targets_) {
    if (target.pattern.matches(module)) return &schemes_[target.scheme];
  }
  return nullptr;
}

}  // namespace moekit::checkpoint
