// Everything per element that is not a product: activation functions, epilogues, row conversions.
// Plain loops over 32 columns or whole rows, without branches, that the compiler turns into the
// vectors of the ISA whose file includes this (inside its namespace, after tile-inl.h).
//
// Accuracy of the functions: exp within 2 ulp, and so silu and gelu_tanh within 4 where they are
// normal; gelu is evaluated in double. NaN and infinities follow the formulas.

static inline uint32_t bits_of_float(float x) {
  uint32_t b;
  __builtin_memcpy(&b, &x, 4);
  return b;
}
static inline float float_of_bits(uint32_t b) {
  float x;
  __builtin_memcpy(&x, &b, 4);
  return x;
}

/// Round to nearest even; NaN stays NaN.
static inline uint32_t bf16_bits(float x) {
  const uint32_t b = bits_of_float(x);
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  const uint32_t quiet = (b >> 16) | 0x40u;
  return (b & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}

/// e^x: x = n ln 2 + r, Taylor to r^7 (next term below 6e-9), 2^n in two factors so that results
/// may be subnormal.
static inline float exp_of(float x) {
  // Beyond these the result is 0 or infinity in any case; the comparisons let NaN through.
  x = x < -105.0f ? -105.0f : x;
  x = x > 90.0f ? 90.0f : x;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float t = x * 1.44269504f + kMagic;
  const float n = t - kMagic;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const int32_t i = static_cast<int32_t>(bits_of_float(t) - bits_of_float(kMagic));
  const int32_t first = i >> 1;
  const float a = float_of_bits(static_cast<uint32_t>(first + 127) << 23);
  const float b = float_of_bits(static_cast<uint32_t>(i - first + 127) << 23);
  return p * a * b;
}

/// e^x in double for x in [-708, 0], relative error below 1e-9.
static inline double exp_of(double x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const double t = x * 1.4426950408889634 + kMagic;
  const double n = t - kMagic;
  const double r = x - n * 0.6931471805599453;
  double p = 2.48015873015873e-5;
  p = p * r + 1.98412698412698e-4;
  p = p * r + 1.38888888888889e-3;
  p = p * r + 8.33333333333333e-3;
  p = p * r + 4.16666666666667e-2;
  p = p * r + 1.66666666666667e-1;
  p = p * r + 0.5;
  p = p * r * r + r + 1.0;
  uint64_t b;
  __builtin_memcpy(&b, &t, 8);
  b = (b + 1023) << 52;
  double s;
  __builtin_memcpy(&s, &b, 8);
  return p * s;
}

/// x * Phi(x), by erfc(t) = e^(-t^2) w(q), q = 1 / (1 + 0.4 t): w is a least-squares polynomial
/// with relative error below 3.2e-8 on t in [0, 10.2], where erfc falls out of f32.
static inline float gelu_of(float x) {
  const double v = x;
  double t = (v < 0 ? -v : v) * 0.7071067811865476;
  t = t > 12.0 ? 12.0 : t;
  const double q = 1.0 / (1.0 + 0.4 * t);
  double w = 0.0293462040915;
  w = w * q + -0.0782129489924;
  w = w * q + -0.0557115278882;
  w = w * q + 0.265393025352;
  w = w * q + -0.0601297335803;
  w = w * q + 0.264225197509;
  w = w * q + 0.178900438992;
  w = w * q + 0.23104607956;
  w = w * q + 0.225118694746;
  w = w * q + 2.46016596054e-05;
  // At t = 12 the tail is below any f32; -infinity times 0 is then NaN, as the formula has it.
  const double tail = t < 12.0 ? 0.5 * exp_of(-t * t) * w : 0.0;
  return static_cast<float>(v * (v < 0 ? tail : 1.0 - tail));
}

static inline float silu_of(float x) { return x / (1.0f + exp_of(-x)); }

static inline float gelu_tanh_of(float x) {
  // 0.5 (1 + tanh(u)) is the sigmoid of 2u.
  const float u2 = 1.5957691216f * (x + 0.044715f * (x * x * x));
  return x / (1.0f + exp_of(-u2));
}

/// NaN passes both clamps.
static inline float clamp_above(float x, float limit) { return x > limit ? limit : x; }
static inline float clamp_both(float x, float limit) {
  return x > limit ? limit : x < -limit ? -limit : x;
}

template <ActivationKind kKind>
static inline float activate_one(float x, float alpha) {
  if constexpr (kKind == ActivationKind::silu) return silu_of(x);
  if constexpr (kKind == ActivationKind::gelu) return gelu_of(x);
  if constexpr (kKind == ActivationKind::gelu_tanh) return gelu_tanh_of(x);
  if constexpr (kKind == ActivationKind::swiglu_oai) return x / (1.0f + exp_of(-alpha * x));
  const float positive = x < 0.0f ? 0.0f : x;
  return positive * positive;
}

/// h[0, 32) = act(g, u), or act(u) without gate.
template <ActivationKind kKind>
static void activate(const ActivationSpec& spec, const float* g, const float* u, float* h) {
  const float limit = spec.limit;
  const float alpha = spec.alpha;
  // Only swiglu_oai shifts up; adding 0 elsewhere would turn -0 into +0.
  const float beta = spec.beta;
  if (g == nullptr) {
    for (int i = 0; i < kPanelCols; ++i) h[i] = activate_one<kKind>(u[i], alpha);
    return;
  }
  for (int i = 0; i < kPanelCols; ++i) {
    const float a = activate_one<kKind>(clamp_above(g[i], limit), alpha);
    float b = clamp_both(u[i], limit);
    if constexpr (kKind == ActivationKind::swiglu_oai) b += beta;
    h[i] = a * b;
  }
}

static void activate_any(const ActivationSpec& spec, const float* g, const float* u, float* h) {
  switch (spec.kind) {
    case ActivationKind::silu: activate<ActivationKind::silu>(spec, g, u, h); return;
    case ActivationKind::gelu: activate<ActivationKind::gelu>(spec, g, u, h); return;
    case ActivationKind::gelu_tanh: activate<ActivationKind::gelu_tanh>(spec, g, u, h); return;
    case ActivationKind::swiglu_oai: activate<ActivationKind::swiglu_oai>(spec, g, u, h); return;
    case ActivationKind::relu2: activate<ActivationKind::relu2>(spec, g, u, h); return;
  }
}

static void store_values(const float* x, int64_t n, StoreAs store, std::byte* out) {
  if (store == StoreAs::f32) {
    __builtin_memcpy(out, x, static_cast<size_t>(n) * 4);
  } else if (store == StoreAs::f32_of_bf16) {
    auto* y = reinterpret_cast<float*>(out);
    for (int64_t i = 0; i < n; ++i) y[i] = float_of_bits(bf16_bits(x[i]) << 16);
  } else {
    auto* y = reinterpret_cast<uint16_t*>(out);
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<uint16_t>(bf16_bits(x[i]));
  }
}

static void scale_columns(const float* c, const ColumnTerms& t, float row_scale, float* y) {
  const float factor = row_scale * t.factor;
  for (int i = 0; i < kPanelCols; ++i) y[i] = c[i] * factor * t.scale[i] + t.bias[i];
}

static void hidden(const ActivationSpec& spec, StoreAs store, const HiddenArgs& a) {
  alignas(64) float g[kPanelCols];
  alignas(64) float u[kPanelCols];
  alignas(64) float h[kPanelCols];
  const int64_t element = store == StoreAs::bf16 ? 2 : 4;
  for (int64_t r = 0; r < a.num_rows; ++r) {
    if (a.gate != nullptr) {
      scale_columns(a.gate + r * kPanelCols, a.gate_terms, a.gate_rows[r].scale, g);
    }
    scale_columns(a.up + r * kPanelCols, a.up_terms, a.up_rows[r].scale, u);
    activate_any(spec, a.gate != nullptr ? g : nullptr, u, h);
    std::byte* out = a.out + r * a.out_stride;
    store_values(h, kPanelCols, store, out);
    // The pad must be zero whatever the row holds: 0 * infinity in a padded column is NaN.
    if (a.columns < kPanelCols) {
      __builtin_memset(out + a.columns * element, 0,
                       static_cast<size_t>((kPanelCols - a.columns) * element));
    }
  }
}

static void finish(const float* c, const ColumnTerms& terms, const RowOperand* rows,
                   int64_t num_rows, int64_t columns, float* const* out) {
  alignas(64) float y[kPanelCols];
  for (int64_t r = 0; r < num_rows; ++r) {
    if (columns == kPanelCols) {
      scale_columns(c + r * kPanelCols, terms, rows[r].scale, out[r]);
    } else {
      scale_columns(c + r * kPanelCols, terms, rows[r].scale, y);
      __builtin_memcpy(out[r], y, static_cast<size_t>(columns) * 4);
    }
  }
}

static void accumulate(const float* row, float weight, bool first, int64_t n, float* out) {
  if (first) {
    for (int64_t i = 0; i < n; ++i) out[i] = weight * row[i];
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] + weight * row[i];
  }
}

static void load_f32(const float* in, float weight, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = in[i] * weight;
}

static void load_bf16(const uint16_t* in, float weight, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) {
    x[i] = float_of_bits(static_cast<uint32_t>(in[i]) << 16) * weight;
  }
}

static void permute(const float* x, const int32_t* order, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[order[i]];
}

static void store_operand(const float* x, int64_t n, int64_t n_padded, StoreAs store,
                          void* operand) {
  auto* out = static_cast<std::byte*>(operand);
  const int64_t element = store == StoreAs::bf16 ? 2 : 4;
  store_values(x, n, store, out);
  __builtin_memset(out + n * element, 0, static_cast<size_t>((n_padded - n) * element));
}

static float abs_max(const float* x, int64_t n) {
  int32_t largest = 0;  // magnitudes are positive: signed maxima are one instruction
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = static_cast<int32_t>(bits_of_float(x[i]) & 0x7fffffffu);
    largest = bits > largest ? bits : largest;
  }
  return float_of_bits(static_cast<uint32_t>(largest));
}

/// Nearest value with kMantissa mantissa bits, exponent kMinExponent or more, at most kMax: adding
/// 1.5 * 2^23 quanta leaves a whole number of quanta, rounded to even; taking them away is exact.
template <int kMantissa, int kMinExponent>
static inline float round_small(float v, float max) {
  v = v > max ? max : v;
  v = v < -max ? -max : v;
  const uint32_t bits = bits_of_float(v);
  const auto field = static_cast<int32_t>(bits >> 23 & 0xffu);
  const int32_t exponent = field > kMinExponent + 127 ? field : kMinExponent + 127;
  const float magic =
      float_of_bits(static_cast<uint32_t>(exponent + 23 - kMantissa) << 23 | 0x00400000u);
  const float rounded = (v + magic) - magic;
  return float_of_bits(bits_of_float(rounded) | (bits & 0x80000000u));
}

static void round_e4m3(float* x, int64_t n, float divisor) {
  for (int64_t i = 0; i < n; ++i) x[i] = round_small<3, -6>(x[i] / divisor, 448.0f);
}
static void round_e2m1(float* x, int64_t n, float divisor) {
  for (int64_t i = 0; i < n; ++i) x[i] = round_small<1, 0>(x[i] / divisor, 6.0f);
}
static void scale_values(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] * factor;
}

static void segment_sums(const void* operand, StoreAs store, int64_t n_padded, int64_t segment,
                         float* sums) {
  const auto* full = static_cast<const float*>(operand);
  const auto* half = static_cast<const uint16_t*>(operand);
  for (int64_t k = 0; k < n_padded; k += segment) {
    const int64_t end = k + segment < n_padded ? k + segment : n_padded;
    float sum = 0.0f;
    for (int64_t i = k; i < end; ++i) {
      sum += store == StoreAs::bf16 ? float_of_bits(static_cast<uint32_t>(half[i]) << 16) : full[i];
    }
    sums[k / segment] = sum;
  }
}

static void add_elementwise(Kernels& k) {
  k.hidden = hidden;
  k.finish = finish;
  k.accumulate = accumulate;
  k.load_f32 = load_f32;
  k.load_bf16 = load_bf16;
  k.permute = permute;
  k.store_operand = store_operand;
  k.segment_sums = segment_sums;
  k.abs_max = abs_max;
  k.round_e4m3 = round_e4m3;
  k.round_e2m1 = round_e2m1;
  k.scale_values = scale_values;
}
