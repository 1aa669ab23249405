#include "engine/synthetic_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "tensor/float_formats.h"
#include "tensor/rng.h"

namespace moekit::engine {
namespace {

constexpr uint64_t kScaleStream = uint64_t{1} << 62;
constexpr uint64_t kZeroStream = uint64_t{1} << 61;

/// Middles of `n` equal shares of a bell-shaped distribution, ascending and symmetric. From sorted
/// samples, so no libm is involved.
std::vector<float> make_quantiles(size_t n) {
  constexpr size_t kSamples = 1 << 15;
  std::vector<float> samples(kSamples);
  const Rng rng(0x6d6f656b, 0);
  for (size_t i = 0; i < kSamples; ++i) samples[i] = std::fabs(rng.normal(i));
  std::sort(samples.begin(), samples.end());
  std::vector<float> q(n);
  for (size_t i = 0; i < n / 2; ++i) {
    const float z = samples[(2 * i + 1) * kSamples / n];
    q[n / 2 + i] = z;
    q[n / 2 - 1 - i] = -z;
  }
  return q;
}
const std::vector<float>& quantiles256() {
  static const std::vector<float> q = make_quantiles(256);
  return q;
}
const std::vector<float>& quantiles16() {
  static const std::vector<float> q = make_quantiles(16);
  return q;
}

/// The bits of one row: a cheap sequential generator (SplitMix64: Steele, Lea, Flood, OOPSLA 2014),
/// started from the counter-based one, since layers may have 10^10 codes.
class RowBits {
 public:
  explicit RowBits(uint64_t start) : state_(start) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  uint64_t state_;
};

double rms(const std::vector<double>& values) {
  double sum = 0;
  for (double v : values) sum += v * v;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

/// Code of value z and the code's value, in one format.
struct CodeRule {
  bool pairs;     // two 4-bit codes a byte
  double spread;  // codes hold z * spread
  uint8_t (*encode)(float);
  float (*decode)(uint8_t);
};

uint8_t encode_int4(float x) {
  return static_cast<uint8_t>(std::clamp(std::nearbyint(x), -8.0f, 7.0f) + 8);
}
float decode_int4(uint8_t code) { return static_cast<float>(code) - 8; }
uint8_t encode_int8(float x) {
  return static_cast<uint8_t>(std::clamp(std::nearbyint(x), -128.0f, 127.0f) + 128);
}
float decode_int8(uint8_t code) { return static_cast<float>(code) - 128; }

CodeRule rule_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::mxfp4:
    case WeightFormat::nvfp4: return {true, 3.0, f32_to_e2m1, e2m1_to_f32};
    case WeightFormat::int4_group:
    case WeightFormat::int4_channel: return {true, 3.5, encode_int4, decode_int4};
    case WeightFormat::int8_group:
    case WeightFormat::int8_channel: return {false, 40.0, encode_int8, decode_int8};
    case WeightFormat::mxfp8_e5m2: return {false, 8192.0, f32_to_e5m2, e5m2_to_f32};
    default: return {false, 128.0, f32_to_e4m3, e4m3_to_f32};
  }
}

/// Sixteen relative scales between 0.5 and 2, or powers of two where the format has no others.
double relative_scale(DType unit, int i) {
  if (unit == DType::f8_e8m0) return i < 4 ? 0.5 : i < 12 ? 1.0 : 2.0;
  return 0.5 + 0.1 * i;
}

uint32_t encode_scale(DType unit, float value) {
  switch (unit) {
    case DType::f32: return f32_bits(value);
    case DType::bf16: return f32_to_bf16(value);
    case DType::f16: return f32_to_f16(value);
    case DType::f8_e8m0: return f32_bits(value) >> 23;
    default: return f32_to_e4m3(value);
  }
}

float decode_scale(DType unit, uint32_t bits) {
  switch (unit) {
    case DType::f32: return f32_from_bits(bits);
    case DType::bf16: return bf16_to_f32(static_cast<uint16_t>(bits));
    case DType::f16: return f16_to_f32(static_cast<uint16_t>(bits));
    case DType::f8_e8m0: return e8m0_to_f32(static_cast<uint8_t>(bits));
    default: return e4m3_to_f32(static_cast<uint8_t>(bits));
  }
}

}  // namespace

SyntheticMatrix::SyntheticMatrix(const quant::EncodedLayout& layout, double sigma, uint64_t seed,
                                 uint64_t stream)
    : layout_(layout), seed_(seed), stream_(stream), sigma_(static_cast<float>(sigma)) {
  if (layout.scale_rows == 0) return;
  const CodeRule rule = rule_of(layout.scheme.format);
  const std::vector<float>& q = rule.pairs ? quantiles16() : quantiles256();
  // Scales of a block format that are powers of two leave up to a factor of two to the codes.
  double spread = rule.spread;
  std::vector<double> relative;
  for (int i = 0; i < 16; ++i) relative.push_back(relative_scale(layout.scale_unit, i));
  double middle = sigma / spread / rms(relative);
  if (layout.scale_unit == DType::f8_e8m0) {
    int exponent;
    const double fraction = std::frexp(middle, &exponent);
    const double power = std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
    spread *= middle / power;
    middle = power;
  } else if (layout.scheme.format == WeightFormat::nvfp4) {
    // Block scales around 64; the global takes the rest.
    global_ = static_cast<float>(middle / 64);
    middle = 64;
  }
  for (size_t i = 0; i < 16; ++i) {
    scale_bits_[i] = encode_scale(layout.scale_unit, static_cast<float>(middle * relative[i]));
    MOEKIT_CHECK(decode_scale(layout.scale_unit, scale_bits_[i]) > 0,
                 "weights of standard deviation {} are too small for scales of type {}", sigma,
                 to_string(layout.scale_unit));
  }
  std::vector<uint8_t> code(q.size());
  for (size_t i = 0; i < q.size(); ++i) {
    code[i] = rule.encode(q[i] * static_cast<float>(spread));
  }
  for (size_t i = 0; i < 256; ++i) {
    codes_[i] = rule.pairs ? static_cast<uint8_t>(code[i & 15] | code[i >> 4] << 4) : code[i];
  }
  if (layout.scheme.zero_points) middle_zero_ = rule.pairs ? 8 : 128;
}

void SyntheticMatrix::write_codes(int64_t row, uint8_t* out) const {
  const int bits = rule_of(layout_.scheme.format).pairs ? 4 : 8;
  const int64_t code_bytes = ceil_div(layout_.cols * bits, 8);
  RowBits random(Rng(seed_, stream_).bits(static_cast<uint64_t>(row)));
  int64_t at = 0;
  for (; at + 8 <= code_bytes; at += 8) {
    const uint64_t word = random.next();
    for (int i = 0; i < 8; ++i) out[at + i] = codes_[(word >> (i * 8)) & 255];
  }
  for (uint64_t word = random.next(); at < code_bytes; ++at, word >>= 8)
    out[at] = codes_[word & 255];
  if (bits == 4 && layout_.cols % 2 != 0) out[code_bytes - 1] &= 15;
  std::memset(out + code_bytes, 0, static_cast<size_t>(layout_.code_row_bytes - code_bytes));
}

void SyntheticMatrix::write_floats(int64_t row, std::byte* out) const {
  const float* q = quantiles256().data();
  RowBits random(Rng(seed_, stream_).bits(static_cast<uint64_t>(row)));
  const auto choice = Rng(seed_, stream_ | kScaleStream).below(static_cast<uint64_t>(row), 16);
  // rms of 0.5 ... 2.0 in steps of 0.1 is 1.33.
  const auto factor =
      static_cast<float>(sigma_ * relative_scale(DType::f32, static_cast<int>(choice)) / 1.3314);
  for (int64_t c = 0; c < layout_.cols; c += 4) {
    uint64_t word = random.next();
    const int64_t end = std::min(c + 4, layout_.cols);
    for (int64_t i = c; i < end; ++i, word >>= 16) {
      // The second byte fills the gaps between the quantiles.
      const float value = (q[word & 255] + q[(word >> 8) & 255] * 0.01f) * factor;
      switch (layout_.scheme.format) {
        case WeightFormat::f32: reinterpret_cast<float*>(out)[i] = value; break;
        case WeightFormat::bf16: reinterpret_cast<uint16_t*>(out)[i] = f32_to_bf16(value); break;
        default: reinterpret_cast<uint16_t*>(out)[i] = f32_to_f16(value); break;
      }
    }
  }
}

void SyntheticMatrix::write_scales(int64_t scale_row, std::byte* storage) const {
  const Rng rng(seed_, stream_ | kScaleStream);
  const Rng zero_rng(seed_, stream_ | kZeroStream);
  const int64_t bytes = bytes_of(layout_.scale_unit);
  for (int64_t g = 0; g < layout_.scale_cols; ++g) {
    const int64_t at = scale_row * layout_.scale_cols + g;
    const uint32_t bits = scale_bits_[rng.below(static_cast<uint64_t>(at), 16)];
    std::memcpy(storage + layout_.scales_offset + at * bytes, &bits, static_cast<size_t>(bytes));
    if (layout_.scheme.zero_points) {
      const auto shift = static_cast<int32_t>(zero_rng.below(static_cast<uint64_t>(at), 3)) - 1;
      storage[layout_.zeros_offset + at] = std::byte(middle_zero_ + shift);
    }
  }
}

void SyntheticMatrix::write_rows(int64_t first, int64_t last, std::byte* storage) const {
  for (int64_t r = first; r < last; ++r) {
    std::byte* out = storage + r * layout_.code_row_bytes;
    if (layout_.scale_rows == 0) {
      write_floats(r, out);
      continue;
    }
    write_codes(r, reinterpret_cast<uint8_t*>(out));
    const int64_t group = layout_.row_group == 0 ? layout_.rows : layout_.row_group;
    if (r % group == 0) write_scales(r / group, storage);
  }
}

StoredMatrix SyntheticMatrix::view(const std::byte* storage) const {
  StoredMatrix m = layout_.view(storage);
  m.global = layout_.options.global_sense == ScaleSense::multiplier ? global_ : 1.0f / global_;
  return m;
}

}  // namespace moekit::engine
