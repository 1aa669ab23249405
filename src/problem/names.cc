// Names of the vocabulary's closed sets, as messages, explain and JSON output spell them.
#include "moekit/quant.h"
#include "problem/support.h"

namespace moekit {

const char* to_string(ReasonCode code) {
  switch (code) {
    case ReasonCode::not_in_build: return "not_in_build";
    case ReasonCode::device: return "device";
    case ReasonCode::arch: return "arch";
    case ReasonCode::isa: return "isa";
    case ReasonCode::weight_format: return "weight_format";
    case ReasonCode::activation_format: return "activation_format";
    case ReasonCode::activation_function: return "activation_function";
    case ReasonCode::shape: return "shape";
    case ReasonCode::bias: return "bias";
    case ReasonCode::router: return "router";
    case ReasonCode::parallel: return "parallel";
    case ReasonCode::rows_format: return "rows_format";
    case ReasonCode::reduce_duty: return "reduce_duty";
    case ReasonCode::quant_duty: return "quant_duty";
    case ReasonCode::combine: return "combine";
    case ReasonCode::capacity: return "capacity";
    case ReasonCode::layout: return "layout";
    case ReasonCode::not_requested: return "not_requested";
    case ReasonCode::self_test: return "self_test";
  }
  return "?";
}

const char* to_string(WeightFormat format) {
  switch (format) {
    case WeightFormat::bf16: return "bf16";
    case WeightFormat::f16: return "f16";
    case WeightFormat::f32: return "f32";
    case WeightFormat::fp8_tensor: return "fp8_tensor";
    case WeightFormat::fp8_channel: return "fp8_channel";
    case WeightFormat::fp8_block: return "fp8_block";
    case WeightFormat::mxfp8: return "mxfp8";
    case WeightFormat::mxfp8_e5m2: return "mxfp8_e5m2";
    case WeightFormat::mxfp4: return "mxfp4";
    case WeightFormat::nvfp4: return "nvfp4";
    case WeightFormat::int4_group: return "int4_group";
    case WeightFormat::int8_group: return "int8_group";
    case WeightFormat::int4_channel: return "int4_channel";
    case WeightFormat::int8_channel: return "int8_channel";
  }
  return "?";
}

const char* to_string(ActivationFormat format) {
  switch (format) {
    case ActivationFormat::f32: return "f32";
    case ActivationFormat::bf16: return "bf16";
    case ActivationFormat::fp8_tensor: return "fp8_tensor";
    case ActivationFormat::fp8_token: return "fp8_token";
    case ActivationFormat::fp8_block: return "fp8_block";
    case ActivationFormat::mxfp8: return "mxfp8";
    case ActivationFormat::mxfp4: return "mxfp4";
    case ActivationFormat::nvfp4: return "nvfp4";
  }
  return "?";
}

}  // namespace moekit
