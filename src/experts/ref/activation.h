// Activation functions by definition (ActivationSpec in moekit/config.h), in float or double.
#pragma once

#include <cmath>

#include "moekit/config.h"

namespace moekit::experts::ref {

/// min and max that let a NaN operand through, as the formulas' frameworks do.
template <typename T>
T clamp_above(T x, T limit) {
  return x > limit ? limit : x;
}
template <typename T>
T clamp_both(T x, T limit) {
  return x > limit ? limit : x < -limit ? -limit : x;
}

template <typename T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

template <typename T>
T unary_activation(const ActivationSpec& spec, T x) {
  switch (spec.kind) {
    case ActivationKind::silu: return x * sigmoid(x);
    case ActivationKind::gelu: return T(0.5) * x * (T(1) + std::erf(x * T(0.70710678118654752440)));
    case ActivationKind::gelu_tanh:
      return T(0.5) * x *
             (T(1) + std::tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x)));
    case ActivationKind::swiglu_oai: return x * sigmoid(T(spec.alpha) * x);
    case ActivationKind::relu2: {
      const T r = x < T(0) ? T(0) : x;
      return r * r;
    }
  }
  return x;
}

/// act(min(gate, limit)) * (clamp(up, +-limit) [+ beta]); without a gate act(up).
template <typename T>
T activate(const ActivationSpec& spec, T gate, T up) {
  if (!spec.gated) return unary_activation(spec, up);
  const T g = clamp_above(gate, T(spec.limit));
  const T u = clamp_both(up, T(spec.limit));
  const T shift = spec.kind == ActivationKind::swiglu_oai ? T(spec.beta) : T(0);
  return unary_activation(spec, g) * (u + shift);
}

}  // namespace moekit::experts::ref
