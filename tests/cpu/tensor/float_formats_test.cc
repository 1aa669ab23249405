// The small floats against a second implementation written from the formats' definitions: decode by
// ldexp, encode by searching all values for the nearest. Exhaustive over all codes, all bf16 and
// f16 inputs, and all rounding borders with their neighbours.
#include "tensor/float_formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace moekit {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool ieee_specials;  // exponent all ones: infinity and NaN
  bool has_nan;        // e4m3: only the code of all ones
  bool saturating;
  std::function<float(uint32_t)> decode;
  std::function<uint32_t(float)> encode;

  uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
  /// Magnitude by definition: NaN and infinity included.
  double magnitude(uint32_t code) const {
    const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
    const int exponent = static_cast<int>((code & (sign_bit() - 1)) >> mantissa_bits);
    const int top = (1 << exponent_bits) - 1;
    if (ieee_specials && exponent == top) return mantissa == 0 ? kInf : std::nan("");
    if (has_nan && (code & (sign_bit() - 1)) == sign_bit() - 1) return std::nan("");
    const double fraction = std::ldexp(mantissa, -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias)
                         : std::ldexp(1 + fraction, exponent - bias);
  }
};

std::vector<Format> formats() {
  return {
      {"e4m3", 4, 3, 7, false, true, true, [](uint32_t c) { return e4m3_to_f32(uint8_t(c)); },
       [](float x) { return uint32_t{f32_to_e4m3(x)}; }},
      {"e5m2", 5, 2, 15, true, false, true, [](uint32_t c) { return e5m2_to_f32(uint8_t(c)); },
       [](float x) { return uint32_t{f32_to_e5m2(x)}; }},
      {"e2m1", 2, 1, 1, false, false, true, [](uint32_t c) { return e2m1_to_f32(uint8_t(c)); },
       [](float x) { return uint32_t{f32_to_e2m1(x)}; }},
      {"f16", 5, 10, 15, true, false, false, [](uint32_t c) { return f16_to_f32(uint16_t(c)); },
       [](float x) { return uint32_t{f32_to_f16(x)}; }},
      {"bf16", 8, 7, 127, true, false, false, [](uint32_t c) { return bf16_to_f32(uint16_t(c)); },
       [](float x) { return uint32_t{f32_to_bf16(x)}; }},
  };
}

/// All finite magnitudes in code order, which is ascending order.
std::vector<double> finite_magnitudes(const Format& f) {
  std::vector<double> values;
  for (uint32_t code = 0; code < f.sign_bit(); ++code) {
    const double v = f.magnitude(code);
    if (std::isfinite(v)) values.push_back(v);
  }
  return values;
}

/// Code of the nearest value, ties to the even code; by bisection over the ordered values.
uint32_t nearest(const Format& f, const std::vector<double>& values, double x) {
  const uint32_t sign = std::signbit(x) ? f.sign_bit() : 0;
  const double a = std::fabs(x);
  const auto last = static_cast<uint32_t>(values.size() - 1);
  if (a > values[last]) {
    // The value that would follow the largest decides where rounding to infinity begins.
    const double step = values[last] - values[last - 1];
    const bool overflows = a >= values[last] + step / 2;
    return sign | (overflows && !f.saturating ? last + 1 : last);
  }
  uint32_t lo = 0;
  uint32_t hi = last;
  while (hi - lo > 1) {
    const uint32_t mid = (lo + hi) / 2;
    (values[mid] <= a ? lo : hi) = mid;
  }
  const double below = a - values[lo];
  const double above = values[hi] - a;
  const bool up = above < below || (above == below && hi % 2 == 0);
  return sign | (up ? hi : lo);
}

void expect_encodes(const Format& f, const std::vector<double>& values, float x) {
  if (std::isnan(x)) return;
  const uint32_t got = f.encode(x);
  const uint32_t want = nearest(f, values, x);
  if (got != want) {
    ADD_FAILURE() << f.name << ": " << std::hexfloat << x << " gives code " << got
                  << ", nearest is " << want;
  }
}

TEST(FloatFormats, DecodeEveryCode) {
  for (const Format& f : formats()) {
    for (uint32_t code = 0; code < 2 * f.sign_bit(); ++code) {
      const double want = f.magnitude(code) * (code & f.sign_bit() ? -1 : 1);
      const float got = f.decode(code);
      if (std::isnan(want)) {
        EXPECT_TRUE(std::isnan(got)) << f.name << " " << code;
      } else {
        EXPECT_EQ(static_cast<double>(got), want) << f.name << " " << code;
      }
      EXPECT_EQ(std::signbit(got), (code & f.sign_bit()) != 0) << f.name << " " << code;
    }
  }
}

TEST(FloatFormats, EncodeEveryBf16AndF16Input) {
  for (const Format& f : formats()) {
    const std::vector<double> values = finite_magnitudes(f);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      expect_encodes(f, values, f32_from_bits(bits << 16));
      const uint32_t exponent = (bits >> 10) & 31;
      if (exponent == 31) continue;
      const double fraction = (bits & 1023) / 1024.0;
      const double magnitude = exponent == 0
                                   ? std::ldexp(fraction, -14)
                                   : std::ldexp(1 + fraction, static_cast<int>(exponent) - 15);
      expect_encodes(f, values, static_cast<float>(bits & 0x8000 ? -magnitude : magnitude));
    }
  }
}

TEST(FloatFormats, EncodeTiesAndTheirNeighbours) {
  for (const Format& f : formats()) {
    std::vector<double> values = finite_magnitudes(f);
    const double largest = values.back();
    const double step = largest - values[values.size() - 2];
    std::vector<double> borders = values;
    for (size_t i = 0; i + 1 < values.size(); ++i)
      borders.push_back((values[i] + values[i + 1]) / 2);
    borders.push_back(largest + step / 2);
    borders.push_back(largest + step);
    for (double border : borders) {
      const auto x = static_cast<float>(border);
      for (float y : {x, std::nextafterf(x, 0.0f), std::nextafterf(x, INFINITY)}) {
        expect_encodes(f, values, y);
        expect_encodes(f, values, -y);
      }
    }
  }
}

TEST(FloatFormats, EncodeInvertsDecode) {
  for (const Format& f : formats()) {
    for (uint32_t code = 0; code < 2 * f.sign_bit(); ++code) {
      if (!std::isfinite(f.magnitude(code))) continue;
      EXPECT_EQ(f.encode(f.decode(code)), code) << f.name;
    }
  }
}

TEST(FloatFormats, Saturation) {
  const float inf = std::numeric_limits<float>::infinity();
  const float max = std::numeric_limits<float>::max();
  EXPECT_EQ(f32_to_e4m3(inf), 0x7e);
  EXPECT_EQ(f32_to_e4m3(-inf), 0xfe);
  EXPECT_EQ(f32_to_e4m3(max), 0x7e);
  EXPECT_EQ(f32_to_e4m3(464.0f), 0x7e);
  EXPECT_EQ(f32_to_e5m2(inf), 0x7b);
  EXPECT_EQ(f32_to_e5m2(-max), 0xfb);
  EXPECT_EQ(f32_to_e2m1(inf), 7);
  EXPECT_EQ(f32_to_e2m1(-inf), 15);
  EXPECT_EQ(f32_to_bf16(inf), 0x7f80);
  EXPECT_EQ(f32_to_bf16(max), 0x7f80);
  EXPECT_EQ(f32_to_f16(65519.996f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-inf), 0xfc00);
}

TEST(FloatFormats, NanStaysNanAndKeepsItsSign) {
  const float nans[] = {kNan, f32_from_bits(0x7f800001), f32_from_bits(0x7fffffff)};
  for (float nan : nans) {
    const float negative = f32_from_bits(f32_bits(nan) | 0x80000000u);
    EXPECT_EQ(f32_to_e4m3(nan), 0x7f);
    EXPECT_EQ(f32_to_e4m3(negative), 0xff);
    EXPECT_TRUE(std::isnan(e5m2_to_f32(f32_to_e5m2(nan))));
    EXPECT_EQ(f32_to_e5m2(negative) & 0x80, 0x80);
    EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(nan))));
    EXPECT_EQ(f32_to_f16(negative) & 0x8200, 0x8200);
    EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(nan))));
    EXPECT_EQ(f32_to_bf16(negative) & 0x8040, 0x8040);
    EXPECT_EQ(f32_to_e2m1(nan), 7);
    EXPECT_EQ(f32_to_e2m1(negative), 15);
  }
  EXPECT_EQ(f32_to_bf16(f32_from_bits(0x7fa10000)), 0x7fe1);  // upper payload kept, made quiet
}

TEST(FloatFormats, E8m0EveryByte) {
  for (int byte = 0; byte < 255; ++byte) {
    EXPECT_EQ(static_cast<double>(e8m0_to_f32(static_cast<uint8_t>(byte))),
              std::ldexp(1.0, byte - 127));
  }
  EXPECT_TRUE(std::isnan(e8m0_to_f32(255)));
}

}  // namespace
}  // namespace moekit
