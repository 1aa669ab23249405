#include "checkpoint/quantize_target.h"

#include <array>
#include <span>

#include "base/check.h"
#include "base/json.h"
#include "base/math.h"

namespace moekit::checkpoint {
namespace {

/// The compressed-tensors release whose files these follow.
constexpr std::string_view kFormatVersion = "0.19.0";

constexpr TargetArguments kPerToken = {.strategy = "token", .dynamic = true};
constexpr TargetArguments kPer128 = {.strategy = "group", .group = 128, .dynamic = true};

/// nvfp4 and int4 quantize weights alone: nvfp4's static input scale would need calibration data.
constexpr std::array<Target, 6> kTargets = {{
    {.name = "fp8_channel",
     .format = "float-quantized",
     .weights = {WeightFormat::fp8_channel},
     .weight_arguments = {.strategy = "channel"},
     .quantizes_inputs = true,
     .input_arguments = kPerToken},
    {.name = "fp8_block",
     .format = "float-quantized",
     .weights = {WeightFormat::fp8_block},
     .weight_arguments = {.strategy = "block", .blocks = true},
     .quantizes_inputs = true,
     .input_arguments = kPer128},
    {.name = "nvfp4",
     .format = "nvfp4-pack-quantized",
     .weights = {WeightFormat::nvfp4},
     .codes = "weight_packed",
     .group = 16,
     .weight_arguments = {.bits = 4,
                          .strategy = "tensor_group",
                          .group = 16,
                          .scale_dtype = "torch.float8_e4m3fn"}},
    {.name = "mxfp4",
     .format = "mxfp4-pack-quantized",
     .weights = {WeightFormat::mxfp4},
     .codes = "weight_packed",
     .group = 32,
     .weight_arguments =
         {.bits = 4, .strategy = "group", .group = 32, .scale_dtype = "torch.uint8"},
     .quantizes_inputs = true,
     .input_arguments = {.bits = 4,
                         .strategy = "group",
                         .group = 32,
                         .dynamic = true,
                         .scale_dtype = "torch.uint8"}},
    {.name = "mxfp8",
     .format = "mxfp8-quantized",
     .weights = {WeightFormat::mxfp8},
     .group = 32,
     .weight_arguments = {.strategy = "group", .group = 32, .scale_dtype = "torch.uint8"},
     .quantizes_inputs = true,
     .input_arguments =
         {.strategy = "group", .group = 32, .dynamic = true, .scale_dtype = "torch.uint8"}},
    {.name = "int4_g128",
     .format = "pack-quantized",
     .weights = {WeightFormat::int4_group, 128},
     .codes = "weight_packed",
     .group = 128,
     .weight_arguments = {.bits = 4, .is_float = false, .strategy = "group", .group = 128}},
}};

std::string arguments_json(const TargetArguments& a) {
  const std::string in(10, ' ');
  return fmt::format(
      "{{\n{0}\"actorder\": null,\n{0}\"block_structure\": {1},\n{0}\"dynamic\": {2},\n"
      "{0}\"group_size\": {3},\n{0}\"num_bits\": {4},\n{0}\"observer\": null,\n"
      "{0}\"observer_kwargs\": {{}},\n{0}\"scale_dtype\": {5},\n{0}\"strategy\": \"{6}\",\n"
      "{0}\"symmetric\": true,\n{0}\"type\": \"{7}\",\n{0}\"zp_dtype\": null\n        }}",
      in, a.blocks ? "[128, 128]" : "null", a.dynamic,
      a.group > 0 ? std::to_string(a.group) : "null", a.bits,
      a.scale_dtype.empty() ? "null" : json_quote(a.scale_dtype), a.strategy,
      a.is_float ? "float" : "int");
}

std::string_view as_bytes(const void* data, int64_t bytes) {
  return {static_cast<const char*>(data), static_cast<size_t>(bytes)};
}

}  // namespace

const Target& find_target(std::string_view name) {
  std::string names;
  for (const Target& target : kTargets) {
    if (target.name == name) return target;
    names += names.empty() ? "" : ", ";
    names += target.name;
  }
  fail(ErrorCode::invalid_argument, "expected a scheme of {}, came {}", names, json_quote(name));
}

std::string quantization_config(const Target& target, const std::vector<std::string>& ignored) {
  std::string ignore;
  for (const std::string& module : ignored) {
    ignore += fmt::format("{}\n      {}", ignore.empty() ? "" : ",", json_quote(module));
  }
  const std::string inputs =
      target.quantizes_inputs ? arguments_json(target.input_arguments) : "null";
  return fmt::format(
      "{{\n    \"config_groups\": {{\n      \"group_0\": {{\n        \"format\": \"{0}\",\n"
      "        \"input_activations\": {1},\n        \"output_activations\": null,\n"
      "        \"targets\": [\n          \"Linear\"\n        ],\n        \"weights\": {2}\n"
      "      }}\n    }},\n    \"format\": \"{0}\",\n    \"global_compression_ratio\": null,\n"
      "    \"ignore\": [{3}\n    ],\n    \"kv_cache_scheme\": null,\n"
      "    \"quant_method\": \"compressed-tensors\",\n"
      "    \"quantization_status\": \"compressed\",\n    \"sparsity_config\": {{}},\n"
      "    \"transform_config\": {{}},\n    \"version\": \"{4}\"\n  }}",
      target.format, inputs, arguments_json(target.weight_arguments), ignore, kFormatVersion);
}

QuantizedMatrix::QuantizedMatrix(const Target& target, std::string module, const float* w,
                                 int64_t rows, int64_t cols, DType scale_dtype, float amax,
                                 ThreadPool& threads)
    : target_(target), module_(std::move(module)), shape_{rows, cols} {
  MOEKIT_CHECK_AS(ErrorCode::unsupported, cols % target.group == 0,
                  "{}: {} needs inputs in whole groups of {}, but the matrix has {} (readers of "
                  "compressed-tensors take no partial group)",
                  module_, target.name, target.group, cols);
  layout_ = quant::EncodedLayout::of(
      target.weights, rows, cols,
      {.scale_dtype = scale_dtype, .global_sense = ScaleSense::divisor, .amax = amax});
  storage_ = Buffer::zeroed(layout_.total_bytes);
  try {
    global_ = quant::encode_weights(layout_, w, storage_.data(), &threads).global;
  } catch (const Error& error) {
    fail(error.code() == ErrorCode::invalid_argument ? ErrorCode::corrupt_file : error.code(),
         "{}: {}", module_, error.what());
  }
}

void QuantizedMatrix::append_to(std::vector<TensorSource>& sources) const {
  const StoredMatrix m = layout_.view(storage_.data());
  const bool is_mx = m.scales.values.unit == DType::f8_e8m0;
  auto add = [&](std::string_view ending, DType dtype, std::vector<int64_t> shape, const void* data,
                 int64_t bytes) {
    sources.push_back({fmt::format("{}.{}", module_, ending), dtype, std::move(shape),
                       std::as_bytes(std::span(as_bytes(data, bytes)))});
  };
  const int64_t units = layout_.code_row_bytes / bytes_of(m.codes.unit);
  add(target_.codes, m.codes.unit, {layout_.rows, units}, storage_.data(),
      layout_.rows * layout_.code_row_bytes);
  const int64_t num_scales = layout_.scale_rows * layout_.scale_cols;
  add("weight_scale", is_mx ? DType::u8 : layout_.scale_unit,
      {layout_.scale_rows, layout_.scale_cols}, storage_.data() + layout_.scales_offset,
      num_scales * bytes_of(layout_.scale_unit));
  if (target_.weights.format == WeightFormat::nvfp4) {
    add("weight_global_scale", DType::f32, {1}, &global_, sizeof(global_));
  }
  if (target_.weights.format == WeightFormat::int4_group) {
    add("weight_shape", DType::i64, {2}, shape_, sizeof(shape_));
  }
}

}  // namespace moekit::checkpoint
