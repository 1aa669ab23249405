#include "checkpoint/scheme_builders.h"

#include <cctype>
#include <optional>

#include "base/check.h"
#include "checkpoint/error_codes.h"

namespace moekit::checkpoint {
namespace {

constexpr unsigned kFloatScales = bit(DType::f32) | bit(DType::bf16) | bit(DType::f16);
constexpr unsigned kE8m0Scales = bit(DType::u8) | bit(DType::f8_e8m0);

}  // namespace

// ---- the schemes, by what their codes are; names and conventions are added by the method

Scheme fp8(WeightFormat format) {
  Scheme s;
  s.weights.format = format;
  s.code_dtypes = bit(DType::f8_e4m3);
  s.scales = "weight_scale";
  s.scale_dtypes = kFloatScales;
  switch (format) {
    case WeightFormat::fp8_tensor: s.scale_shapes = kScalar; break;
    case WeightFormat::fp8_channel:
      s.scale_shapes = kVector | kGrid;
      s.row_group = 1;
      break;
    case WeightFormat::fp8_block:
      s.scale_shapes = kGrid;
      s.row_group = s.col_group = 128;
      break;
    default:  // mxfp8
      s.scale_shapes = kGrid;
      s.scale_dtypes = kE8m0Scales;
      s.scale_is_e8m0 = true;
      s.row_group = 1;
      s.col_group = 32;
      break;
  }
  return s;
}

/// NVFP4 or MXFP4: two codes a byte along the inputs.
Scheme fp4(WeightFormat format) {
  Scheme s;
  s.weights.format = format;
  s.code_dtypes = bit(DType::u8);
  s.unit = DType::u8;
  s.pack_axis = PackAxis::cols;
  s.pack = 2;
  s.scales = "weight_scale";
  s.scale_shapes = kGrid;
  s.row_group = 1;
  if (format == WeightFormat::nvfp4) {
    s.scale_dtypes = bit(DType::f8_e4m3);
    s.col_group = 16;
  } else {
    s.scale_dtypes = kE8m0Scales;
    s.scale_is_e8m0 = true;
    s.col_group = 32;
  }
  return s;
}

/// 4- or 8-bit integers; group 0 means one scale a row.
Scheme integers(int64_t bits, int64_t group, bool zero_points) {
  Scheme s;
  s.weights.format = group > 0
                         ? (bits == 4 ? WeightFormat::int4_group : WeightFormat::int8_group)
                         : (bits == 4 ? WeightFormat::int4_channel : WeightFormat::int8_channel);
  s.weights.group = static_cast<int32_t>(group);
  s.weights.zero_points = zero_points;
  s.code_dtypes = bit(DType::i32);
  s.unit = DType::i32;
  s.pack = static_cast<int32_t>(32 / bits);
  s.scale_shapes = kGrid;
  s.scale_dtypes = kFloatScales;
  s.row_group = 1;
  s.col_group = group;
  return s;
}

int64_t group_size(const JsonPlace& place) {
  // -1 is how GPTQ and AWQ write "one group a row".
  const int64_t group = place.as_int(-1, 1 << 20);
  if (group == 0) place.expected("a group size or -1");
  return group < 0 ? 0 : group;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// ---- compressed-tensors

namespace {

/// dynamic is false, true, or "local" (block scales dynamic, global static).
bool is_static(const JsonPlace& arguments) {
  const JsonPlace dynamic = arguments.at("dynamic");
  if (dynamic.is(Json::Kind::string)) return dynamic.as_string() == "local";
  return !dynamic.bool_or(false);
}

ActivationScheme ct_input(const JsonPlace& arguments, const Scheme& weights) {
  ActivationScheme input;  // bf16
  if (!arguments.present()) return input;
  const int64_t bits = arguments.at("num_bits").as_int(1, 64);
  const std::string type = arguments.at("type").string_or("int");
  const std::string strategy = arguments.at("strategy").string_or("tensor");
  const bool fixed = is_static(arguments);
  const int64_t group = arguments.at("group_size").int_or(-1, 1 << 20, 0);
  if (type == "float" && bits == 8 && strategy == "tensor" && fixed) {
    input.format = ActivationFormat::fp8_tensor;
    input.static_scale = true;
    return input;
  }
  if (type == "float" && bits == 8 && strategy == "token" && !fixed) {
    input.format = ActivationFormat::fp8_token;
    return input;
  }
  if (type == "float" && bits == 8 && strategy == "group" && !fixed && group == 128) {
    input.format = ActivationFormat::fp8_block;
    return input;
  }
  if (type == "float" && strategy == "group" && !fixed && group == 32 && weights.scale_is_e8m0 &&
      (bits == 8 || bits == 4)) {
    input.format = bits == 8 ? ActivationFormat::mxfp8 : ActivationFormat::mxfp4;
    return input;
  }
  if (type == "float" && bits == 4 && strategy == "tensor_group" && group == 16) {
    input.format = ActivationFormat::nvfp4;
    input.static_scale = fixed;
    input.sense = ScaleSense::divisor;
    return input;
  }
  fail(kUnsupported, "{}: {}-bit {} activations with strategy {} ({}, group {}) are not covered",
       arguments.where(), bits, type, json_quote(strategy), fixed ? "static" : "dynamic", group);
}

Scheme ct_float(const JsonPlace& w, const std::string& format, const std::string& strategy,
                int64_t bits, int64_t group) {
  if (bits == 8 && (format == "float-quantized" || format == "naive-quantized")) {
    if (strategy == "tensor") return fp8(WeightFormat::fp8_tensor);
    if (strategy == "channel") return fp8(WeightFormat::fp8_channel);
    if (strategy == "block") {
      const std::vector<JsonPlace> block = w.at("block_structure").elements();
      const bool square = block.size() == 2 && block[0].as_int() == 128 && block[1].as_int() == 128;
      MOEKIT_CHECK_AS(kUnsupported, square, "{}: only blocks of 128x128 are covered",
                      w.at("block_structure").where());
      return fp8(WeightFormat::fp8_block);
    }
  }
  if (bits == 8 && format == "mxfp8-quantized" && strategy == "group" && group == 32) {
    return fp8(WeightFormat::mxfp8);
  }
  if (bits == 4 && format == "nvfp4-pack-quantized" && strategy == "tensor_group" && group == 16) {
    Scheme s = fp4(WeightFormat::nvfp4);
    s.codes = "weight_packed";
    s.global = "weight_global_scale";
    s.global_sense = ScaleSense::divisor;
    return s;
  }
  if (bits == 4 && format == "mxfp4-pack-quantized" && strategy == "group" && group == 32) {
    Scheme s = fp4(WeightFormat::mxfp4);
    s.codes = "weight_packed";
    return s;
  }
  fail(kUnsupported,
       "{}: format {} with {}-bit float weights, strategy {}, group {} is not covered", w.where(),
       json_quote(format), bits, json_quote(strategy), group);
}

/// "group" (or true, its older spelling) scales groups of permuted inputs; "weight" and "static" do
/// not.
bool groups_out_of_order(const JsonPlace& actorder) {
  if (!actorder.present()) return false;
  if (actorder.is(Json::Kind::boolean)) return actorder.bool_or(false);
  return actorder.as_string() == "group";
}

Scheme ct_integer(const JsonPlace& w, const std::string& format, const std::string& strategy,
                  int64_t bits, int64_t group) {
  const bool grouped = strategy == "group" && group > 0;
  const bool covered = (bits == 4 || bits == 8) &&
                       (grouped || strategy == "channel" || (strategy == "group" && group == -1));
  const bool asymmetric = !w.at("symmetric").bool_or(true);
  if (covered && format == "pack-quantized") {
    Scheme s = integers(bits, grouped ? group : 0, asymmetric);
    s.codes = "weight_packed";
    s.pack_axis = PackAxis::cols;
    s.code_offset = 1 << (bits - 1);
    s.scales = "weight_scale";
    s.shape = "weight_shape";
    s.group_index = "weight_g_idx";
    s.group_index_required = grouped && groups_out_of_order(w.at("actorder"));
    if (asymmetric) {
      // Zero points carry the codes' offset too, so it cancels.
      s.zeros = "weight_zero_point";
      s.zero_pack_axis = PackAxis::rows;
      s.zero_pack = s.pack;
      s.zero_offset = -s.code_offset;
    }
    return s;
  }
  if (covered && bits == 8 && (format == "int-quantized" || format == "naive-quantized")) {
    Scheme s = integers(8, grouped ? group : 0, asymmetric);
    s.code_dtypes = bit(DType::i8);
    s.unit = DType::i8;
    s.pack = 1;
    s.scales = "weight_scale";
    s.scale_shapes |= grouped ? 0u : kVector;
    if (asymmetric) {
      s.zeros = "weight_zero_point";
      s.zero_unit = DType::i8;
    }
    return s;
  }
  fail(kUnsupported,
       "{}: format {} with {}-bit integer weights, strategy {}, group {} is not covered", w.where(),
       json_quote(format), bits, json_quote(strategy), group);
}

}  // namespace

Scheme ct_scheme(const std::string& name, const JsonPlace& group, const std::string& format) {
  const JsonPlace w = group.at("weights");
  if (!w.present()) {
    fail(kUnsupported, "{}: quantized activations over unquantized weights are not covered",
         group.where());
  }
  const int64_t bits = w.at("num_bits").as_int(1, 64);
  const std::string type = w.at("type").string_or("int");
  const std::string strategy = w.at("strategy").string_or("tensor");
  const int64_t size = w.at("group_size").int_or(-1, 1 << 20, 0);
  Scheme s = type == "float" ? ct_float(w, format, strategy, bits, size)
                             : ct_integer(w, format, strategy, bits, size);
  s.label = fmt::format("{} ({})", format, name);
  s.input = ct_input(group.at("input_activations"), s);
  if (s.input.static_scale) {
    s.input_scale =
        s.input.format == ActivationFormat::nvfp4 ? "input_global_scale" : "input_scale";
  }
  return s;
}

/// Options that change what the stored numbers mean.
void refuse_transforms(const JsonPlace& config) {
  const JsonPlace transforms = config.at("transform_config");
  if (transforms.present() && !transforms.members().empty()) {
    const JsonPlace groups = transforms.at("config_groups");
    MOEKIT_CHECK_AS(kUnsupported, groups.present() && groups.members().empty(),
                    "{}: transformed weights (rotations) are not covered", transforms.where());
  }
  const JsonPlace sparsity = config.at("sparsity_config");
  if (sparsity.present() && !sparsity.members().empty()) {
    const std::string format = sparsity.at("format").string_or("dense");
    MOEKIT_CHECK_AS(kUnsupported, format == "dense", "{}: sparse format {} is not covered",
                    sparsity.where(), json_quote(format));
  }
}

// ---- ModelOpt

namespace {

std::optional<Scheme> scheme_of_algorithm(const std::string& algorithm) {
  const std::string name = lower(algorithm);
  Scheme s;
  if (name == "fp8") {
    s = fp8(WeightFormat::fp8_tensor);
    s.input = {.format = ActivationFormat::fp8_tensor, .static_scale = true};
    s.input_scale = "input_scale";
  } else if (name == "fp8_per_channel_per_token") {
    s = fp8(WeightFormat::fp8_channel);
    s.input.format = ActivationFormat::fp8_token;
  } else if (name == "fp8_pb_wo") {
    s = fp8(WeightFormat::fp8_block);
    s.scale_shapes = kGrid | kGrid4 | kIfSingle;
  } else if (name == "nvfp4" || name == "w4a16_nvfp4") {
    s = fp4(WeightFormat::nvfp4);
    s.global = "weight_scale_2";
    if (name == "nvfp4") {
      s.input = {.format = ActivationFormat::nvfp4, .static_scale = true};
      s.input_scale = "input_scale";
    }
  } else if (name == "mxfp4") {
    s = fp4(WeightFormat::mxfp4);
    s.input.format = ActivationFormat::mxfp4;
  } else if (name == "mxfp8") {
    s = fp8(WeightFormat::mxfp8);
    s.input.format = ActivationFormat::mxfp8;
  } else {
    return std::nullopt;
  }
  s.label = algorithm;
  return s;
}

}  // namespace

Scheme modelopt_scheme(const JsonPlace& place) {
  std::optional<Scheme> s = scheme_of_algorithm(place.as_string());
  if (!s) {
    fail(kUnsupported,
         "{}: ModelOpt algorithm {} is not covered (covered: FP8, FP8_PER_CHANNEL_PER_TOKEN, "
         "fp8_pb_wo, NVFP4, W4A16_NVFP4, mxfp4, MXFP8)",
         place.where(), json_quote(place.as_string()));
  }
  return *s;
}

}  // namespace moekit::checkpoint
