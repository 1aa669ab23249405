// Names of schemes and functions as flags, SPECs and JSON spell them.
#include "base/check.h"
#include "moekit/tools.h"
#include "problem/spec.h"

namespace moekit {

std::string scheme_name(const WeightScheme& scheme) { return spell(scheme); }

std::string weights_name(const MoeConfig& config) {
  const std::string gate_up = scheme_name(config.gate_up_weights);
  const std::string down = scheme_name(config.down_weights);
  return gate_up == down ? gate_up : gate_up + "/" + down;
}

std::string activations_name(const MoeConfig& config) {
  const std::string gate_up = to_string(config.gate_up_input.format);
  const std::string down = to_string(config.down_input.format);
  return gate_up == down ? gate_up : gate_up + "/" + down;
}

std::string activation_name(const ActivationSpec& spec) {
  switch (spec.kind) {
    case ActivationKind::silu: return "silu";
    case ActivationKind::gelu: return "gelu";
    case ActivationKind::gelu_tanh: return "gelu_tanh";
    case ActivationKind::swiglu_oai: return "swiglu_oai";
    case ActivationKind::relu2: return "relu2";
  }
  return "?";
}

}  // namespace moekit
