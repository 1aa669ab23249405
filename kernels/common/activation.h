// Activation functions as epilogues evaluate them: run-time coefficients, one formula for the three
// sigmoid-shaped ones, so that the code of a tile stays short. Host and device.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "moekit/config.h"
#include "tensor/host_device.h"

namespace moekit::kernels {

/// h = f(min(g, limit)) * (clamp(u, +-limit) + shift) with a gate, f(u) without.
struct EpilogueActivation {
  enum class Form : int32_t {
    none,     ///< f(x) = x
    silu,     ///< f(x) = x * sigmoid(x), neither limit nor shift: what most layers have
    sigmoid,  ///< f(x) = x * sigmoid(x * (linear + cubic * x^2)): silu with a limit, swiglu_oai,
              ///< gelu_tanh
    erf,      ///< f(x) = x/2 * (1 + erf(x / sqrt(2)))
    relu2,    ///< f(x) = max(0, x)^2
  };
  Form form = Form::none;
  float linear = 1.0f;
  float cubic = 0.0f;
  float limit = std::numeric_limits<float>::infinity();
  float shift = 0.0f;
};

/// The definitions of ActivationSpec in this form. 0.5 * (1 + tanh(z)) is sigmoid(2 z), hence
/// gelu_tanh's coefficients: 2 sqrt(2 / pi), and that times 0.044715.
inline EpilogueActivation epilogue_activation(const ActivationSpec& spec) {
  EpilogueActivation a;
  a.limit = spec.limit;
  switch (spec.kind) {
    case ActivationKind::silu:
      a.form = std::isinf(spec.limit) ? EpilogueActivation::Form::silu
                                      : EpilogueActivation::Form::sigmoid;
      break;
    case ActivationKind::swiglu_oai:
      a.form = EpilogueActivation::Form::sigmoid;
      a.linear = spec.alpha;
      a.shift = spec.beta;
      break;
    case ActivationKind::gelu_tanh:
      a.form = EpilogueActivation::Form::sigmoid;
      a.linear = 1.59576912f;
      a.cubic = 0.0713548163f;
      break;
    case ActivationKind::gelu: a.form = EpilogueActivation::Form::erf; break;
    case ActivationKind::relu2: a.form = EpilogueActivation::Form::relu2; break;
  }
  return a;
}

/// 1 / (1 + exp(-z)), on a device through the fast units: exp2 is good to 2 ulp, the reciprocal to
/// 1, far below the rounding of results to their storage format; where exp2 overflows it is 0.
MOEKIT_HOST_DEVICE inline float fast_sigmoid(float z) {
#if defined(__CUDA_ARCH__)
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
#else
  return 1.0f / (1.0f + std::exp(-z));
#endif
}

MOEKIT_HOST_DEVICE inline float apply_unary(const EpilogueActivation& a, float x) {
  switch (a.form) {
    case EpilogueActivation::Form::none: return x;
    case EpilogueActivation::Form::silu:
    case EpilogueActivation::Form::sigmoid:
      return x * fast_sigmoid(x * (a.linear + a.cubic * (x * x)));
    case EpilogueActivation::Form::erf: return 0.5f * x * (1.0f + erff(x * 0.707106781f));
    case EpilogueActivation::Form::relu2: {
      const float r = x < 0.0f ? 0.0f : x;
      return r * r;
    }
  }
  return x;
}

/// Comparisons that let NaN through, as the reference does.
MOEKIT_HOST_DEVICE inline float clamp_gate(const EpilogueActivation& a, float gate) {
  return gate > a.limit ? a.limit : gate;
}
MOEKIT_HOST_DEVICE inline float shifted_up(const EpilogueActivation& a, float up) {
  return (up > a.limit ? a.limit : up < -a.limit ? -a.limit : up) + a.shift;
}

MOEKIT_HOST_DEVICE inline float apply_gated(const EpilogueActivation& a, float gate, float up) {
  return apply_unary(a, clamp_gate(a, gate)) * shifted_up(a, up);
}
/// apply_gated() where form is known to be silu.
MOEKIT_HOST_DEVICE inline float apply_gated_silu(float gate, float up) {
  return gate * fast_sigmoid(gate) * up;
}
/// The same for sigmoid, which does for silu too.
MOEKIT_HOST_DEVICE inline float apply_gated_sigmoid(const EpilogueActivation& a, float gate,
                                                    float up) {
  const float g = clamp_gate(a, gate);
  return g * fast_sigmoid(g * (a.linear + a.cubic * (g * g))) * shifted_up(a, up);
}

}  // namespace moekit::kernels
