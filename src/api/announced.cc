#include "api/announced.h"

#include <string>

#include "base/check.h"
#include "tensor/view_check.h"

namespace moekit::api {
namespace {

void check_memory(const TensorView& view, const std::string& name) {
  check_view(view, name.c_str());
  MOEKIT_CHECK(view.device.type == DeviceType::cpu,
               "{}: weights are read from host memory, the tensor lies on another device", name);
}

void check_memory(const MatrixTensors& matrix, const std::string& name) {
  check_memory(matrix.codes, name + ".codes");
  check_memory(matrix.scales, name + ".scales");
  check_memory(matrix.zeros, name + ".zeros");
  check_memory(matrix.global, name + ".global");
  check_memory(matrix.input_scale, name + ".input_scale");
  check_memory(matrix.bias, name + ".bias");
}

void check_pair(bool announced, const TensorView& view, const std::string& tensor,
                const char* field) {
  MOEKIT_CHECK(
      !announced || !view.empty(),
      "{} is missing, but the config announces it ({}): pass the tensor, or mend the config",
      tensor, field);
  MOEKIT_CHECK(
      announced || view.empty(),
      "{} is given, but the config does not announce it ({}): leave the tensor out, or mend "
      "the config",
      tensor, field);
}

/// What the config says of a matrix beside its format.
struct Announced {
  const ActivationScheme* input;
  const char* input_field;
  bool bias;
  const char* bias_field;  ///< null: the config has no word for a bias, one is taken as it comes
};

void check_matrix(const MatrixTensors& matrix, const std::string& name, const Announced& says) {
  check_memory(matrix, name);
  const std::string static_scale = std::string(says.input_field) + ".static_scale";
  check_pair(says.input->static_scale, matrix.input_scale, name + ".input_scale",
             static_scale.c_str());
  if (says.bias_field != nullptr)
    check_pair(says.bias, matrix.bias, name + ".bias", says.bias_field);
}

void check_input(const ActivationScheme& input, const char* field) {
  const bool nvfp4 = input.format == ActivationFormat::nvfp4;
  const bool fp8_tensor = input.format == ActivationFormat::fp8_tensor;
  MOEKIT_CHECK_AS(ErrorCode::unsupported, !fp8_tensor || input.static_scale,
                  "{} is fp8_tensor, which needs a static input scale, but {}.static_scale is off; "
                  "set it and pass input_scale, or use fp8_token",
                  field, field);
  MOEKIT_CHECK(!input.static_scale || fp8_tensor || nvfp4,
               "{}.static_scale belongs to fp8_tensor and nvfp4, the format is {}", field,
               to_string(input.format));
}

void check_routed(const MoeConfig& c, const LayerTensors& t) {
  const Announced in{&c.gate_up_input, "gate_up_input", c.has_gate_up_bias, "has_gate_up_bias"};
  const Announced out{&c.down_input, "down_input", c.has_down_bias, "has_down_bias"};
  check_input(c.gate_up_input, in.input_field);
  check_input(c.down_input, out.input_field);
  if (!t.gate_up_stacked.codes.empty()) {
    check_matrix(t.gate_up_stacked, "gate_up_stacked", in);
    check_matrix(t.down_stacked, "down_stacked", out);
    return;
  }
  const auto each = [](const std::vector<MatrixTensors>& matrices, const char* name,
                       const Announced& says) {
    for (size_t e = 0; e < matrices.size(); ++e)
      check_matrix(matrices[e], fmt::format("{}[{}]", name, e), says);
  };
  each(t.gate, "gate", in);
  each(t.up, "up", in);
  each(t.down, "down", out);
}

void check_router(const RouterSpec& router, const LayerTensors& t) {
  check_memory(t.router_weight, "router_weight");
  check_memory(t.router_bias, "router_bias");
  check_memory(t.selection_bias, "selection_bias");
  check_pair(router.has_logit_bias, t.router_bias, "router_bias", "has_logit_bias");
  check_pair(router.has_selection_bias, t.selection_bias, "selection_bias", "has_selection_bias");
  MOEKIT_CHECK(!t.router_weight.empty() || (t.router_bias.empty() && t.selection_bias.empty()),
               "router_bias and selection_bias belong to a router, but router_weight is missing");
  MOEKIT_CHECK(
      !router.hash_routing,
      "the table of token ids is missing, but the config announces it (hash_routing): only "
      "a checkpoint brings one; route yourself (moekit_route), pass topk_ids and turn "
      "hash_routing off");
}

void check_shared(const MoeConfig& c, const LayerTensors& t) {
  const bool any = c.shared.inter > 0;
  const Announced in{&c.shared.gate_up_input, "shared_gate_up_input", false, nullptr};
  const Announced out{&c.shared.down_input, "shared_down_input", false, nullptr};
  const bool gate = any && c.activation.gated;
  check_pair(gate, t.shared_gate_proj.codes, "shared_gate_proj",
             any && !gate ? "gated" : "shared_inter");
  check_pair(any, t.shared_up_proj.codes, "shared_up_proj", "shared_inter");
  check_pair(any, t.shared_down_proj.codes, "shared_down_proj", "shared_inter");
  check_memory(t.shared_gate, "shared_gate");
  check_pair(c.shared.sigmoid_gate, t.shared_gate, "shared_gate", "shared_sigmoid_gate");
  MOEKIT_CHECK(any || !c.shared.sigmoid_gate,
               "shared_sigmoid_gate belongs to shared experts, but shared_inter is 0");
  if (!any) return;
  check_input(c.shared.gate_up_input, in.input_field);
  check_input(c.shared.down_input, out.input_field);
  if (gate) check_matrix(t.shared_gate_proj, "shared_gate_proj", in);
  check_matrix(t.shared_up_proj, "shared_up_proj", in);
  check_matrix(t.shared_down_proj, "shared_down_proj", out);
}

}  // namespace

void check_announced(const MoeConfig& config, const LayerTensors& tensors) {
  check_routed(config, tensors);
  check_router(config.router, tensors);
  check_shared(config, tensors);
  check_memory(tensors.latent_in, "latent_in");
  check_memory(tensors.latent_out, "latent_out");
  check_pair(config.latent > 0, tensors.latent_in, "latent_in", "latent");
  check_pair(config.latent > 0, tensors.latent_out, "latent_out", "latent");
}

}  // namespace moekit::api
