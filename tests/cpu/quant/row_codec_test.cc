// The activation chains against their definitions, written here by value in fp32 steps.
#include "quant/row_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "moekit/error.h"
#include "support/reference_floats.h"
#include "tensor/float_formats.h"
#include "tensor/rng.h"

namespace moekit::quant {
namespace {

using test::nearest_e2m1;
using test::nearest_e4m3;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  const char* name;
  ActivationScheme scheme;
  float static_scale = 1.0f;
};

std::vector<Case> cases() {
  using A = ActivationFormat;
  using S = ScaleSense;
  return {{"f32", {A::f32}},
          {"bf16", {A::bf16}},
          {"fp8_tensor", {A::fp8_tensor, true, S::multiplier, false}, 0.0123f},
          {"fp8_token", {A::fp8_token}},
          {"fp8_token_ue8m0", {A::fp8_token, false, S::multiplier, true}},
          {"fp8_block", {A::fp8_block}},
          {"fp8_block_ue8m0", {A::fp8_block, false, S::multiplier, true}},
          {"mxfp8", {A::mxfp8}},
          {"mxfp4", {A::mxfp4}},
          {"nvfp4_dynamic", {A::nvfp4}},
          {"nvfp4_multiplier", {A::nvfp4, true, S::multiplier, false}, 0.0017f},
          {"nvfp4_divisor", {A::nvfp4, true, S::divisor, false}, 660.0f}};
}

/// Elements under one scale; 1 where elements do not share one, 0 for the whole row.
int64_t scale_block(const ActivationScheme& s, int64_t width) {
  switch (s.format) {
    case ActivationFormat::fp8_token: return width;
    case ActivationFormat::fp8_block: return 128;
    case ActivationFormat::mxfp8:
    case ActivationFormat::mxfp4: return 32;
    case ActivationFormat::nvfp4: return s.static_scale ? 16 : width;
    default: return 1;
  }
}

std::vector<float> random_row(int64_t width, uint64_t seed) {
  std::vector<float> x(static_cast<size_t>(width));
  const Rng rng(seed, 0);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = rng.normal(i) * std::ldexp(1.0f, static_cast<int>((i / 16) % 7) - 3);
  }
  return x;
}

float largest(const float* x, int64_t n) {
  float amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, std::fabs(x[i]));
  return amax;
}

/// fp32 divisions and products rounded one by one, elements rounded by value.
void define_fp8(float* x, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(nearest_e4m3(x[i] / scale)) * scale;
}

float dynamic_fp8_scale(const float* x, int64_t n, bool power_of_two) {
  const float scale = largest(x, n) / 448.0f;
  if (!power_of_two) return scale;
  int exponent;
  const float fraction = std::frexp(scale, &exponent);
  return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

void define_mx(float* x, int64_t n, bool fp4) {
  const double amax = largest(x, n);
  const int floor_log2 = std::ilogb(amax);
  const int exponent = floor_log2 + (amax >= std::ldexp(1.75, floor_log2) ? 1 : 0) - (fp4 ? 2 : 8);
  for (int64_t i = 0; i < n; ++i) {
    const double scaled = std::ldexp(double{x[i]}, -exponent);
    x[i] =
        static_cast<float>(std::ldexp(fp4 ? nearest_e2m1(scaled) : nearest_e4m3(scaled), exponent));
  }
}

void define_nvfp4(float* x, int64_t n, ScaleSense sense, float global) {
  const float amax = largest(x, n);
  if (sense == ScaleSense::divisor) {
    auto s = static_cast<float>(nearest_e4m3(amax / 6.0f * global));
    if (s == 0) s = 0.125f;
    for (int64_t i = 0; i < n; ++i) {
      const auto code = static_cast<float>(nearest_e2m1(x[i] * (global / s)));
      x[i] = code * s * (1.0f / global);
    }
    return;
  }
  const auto s = static_cast<float>(nearest_e4m3(amax / 6.0f / global));
  for (int64_t i = 0; i < n; ++i) {
    x[i] = s == 0 ? 0 : static_cast<float>(nearest_e2m1(x[i] / (s * global))) * s * global;
  }
}

void define(const Case& c, std::vector<float>& x) {
  const auto width = static_cast<int64_t>(x.size());
  const ActivationScheme& s = c.scheme;
  const bool row_scale = s.format == ActivationFormat::fp8_token;
  const int64_t block = s.format == ActivationFormat::nvfp4 ? 16 : scale_block(s, width);
  const float row_global = largest(x.data(), width) / 2688.0f;
  const float token = dynamic_fp8_scale(x.data(), width, s.ue8m0_scale);
  for (int64_t first = 0; first < width; first += block) {
    const int64_t n = std::min(block, width - first);
    float* at = x.data() + first;
    switch (s.format) {
      case ActivationFormat::f32: break;
      case ActivationFormat::bf16: *at = bf16_to_f32(f32_to_bf16(*at)); break;
      case ActivationFormat::fp8_tensor: define_fp8(at, n, c.static_scale); break;
      case ActivationFormat::fp8_token:
      case ActivationFormat::fp8_block:
        define_fp8(at, n, row_scale ? token : dynamic_fp8_scale(at, n, s.ue8m0_scale));
        break;
      case ActivationFormat::mxfp8: define_mx(at, n, false); break;
      case ActivationFormat::mxfp4: define_mx(at, n, true); break;
      case ActivationFormat::nvfp4:
        define_nvfp4(at, n, s.static_scale ? s.sense : ScaleSense::multiplier,
                     s.static_scale ? c.static_scale : row_global);
        break;
    }
  }
}

std::vector<float> through_record(const Case& c, const std::vector<float>& x) {
  const auto width = static_cast<int64_t>(x.size());
  const RowFormat format = RowFormat::of(c.scheme.format, width);
  std::vector<std::byte> record(static_cast<size_t>(format.record_bytes), std::byte{0xee});
  encode_row(c.scheme, c.static_scale, x.data(), width, record.data());
  std::vector<float> y(x.size());
  decode_row(format, record.data(), y.data());
  return y;
}

std::vector<float> round_tripped(const Case& c, std::vector<float> x) {
  round_trip_row(c.scheme, c.static_scale, x.data(), static_cast<int64_t>(x.size()));
  return x;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(RowCodec, EveryChainEqualsItsDefinition) {
  for (const Case& c : cases()) {
    for (int64_t width : {1, 15, 16, 17, 31, 32, 33, 96, 127, 128, 129, 160, 300}) {
      const std::vector<float> x = random_row(width, static_cast<uint64_t>(width));
      std::vector<float> want = x;
      define(c, want);
      const std::vector<float> got = through_record(c, x);
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(got[i], want[i]) << c.name << " width " << width << " element " << i;
      }
    }
  }
}

TEST(RowCodec, RoundTripHasTheBitsOfTheRecord) {
  for (const Case& c : cases()) {
    for (int64_t width : {1, 17, 128, 300}) {
      for (float special : {0.0f, -0.0f, 1e30f, kInf, kNan}) {
        std::vector<float> x = random_row(width, 99);
        x[static_cast<size_t>(width / 2)] = special;
        EXPECT_TRUE(same_bits(through_record(c, x), round_tripped(c, x)))
            << c.name << " width " << width << " with " << special;
      }
    }
  }
}

TEST(RowCodec, RecordsAreFullyWritten) {
  for (const Case& c : cases()) {
    const int64_t width = 45;  // odd: half a byte of padding as well
    const RowFormat format = RowFormat::of(c.scheme.format, width);
    const std::vector<float> x = random_row(width, 1);
    std::vector<std::byte> a(static_cast<size_t>(format.record_bytes), std::byte{0x00});
    std::vector<std::byte> b(static_cast<size_t>(format.record_bytes), std::byte{0xff});
    encode_row(c.scheme, c.static_scale, x.data(), width, a.data());
    encode_row(c.scheme, c.static_scale, x.data(), width, b.data());
    EXPECT_EQ(a, b) << c.name;
  }
}

TEST(RowCodec, ZeroRowsAndZeroBlocksGiveExactZeros) {
  for (const Case& c : cases()) {
    for (float y : through_record(c, std::vector<float>(150, 0.0f))) EXPECT_EQ(y, 0.0f) << c.name;
    std::vector<float> x = random_row(256, 3);
    std::fill(x.begin() + 128, x.end(), 0.0f);
    const std::vector<float> y = through_record(c, x);
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_TRUE(std::isfinite(y[i])) << c.name;
      if (i >= 128) {
        ASSERT_EQ(y[i], 0.0f) << c.name;
      }
    }
    EXPECT_GT(largest(y.data(), 128), 0.0f) << c.name;
  }
}

TEST(RowCodec, SubnormalAndHugeRowsStayFinite) {
  for (const Case& c : cases()) {
    for (float magnitude : {1e-45f, 1e-40f, 1e-36f, 1e-30f, 1e36f, 1e38f}) {
      std::vector<float> x = random_row(64, 5);
      const float amax = largest(x.data(), 64);
      for (float& v : x) v = v / amax * magnitude;
      for (float y : through_record(c, x)) ASSERT_TRUE(std::isfinite(y)) << c.name << magnitude;
    }
  }
}

// A NaN poisons the elements under its scale (only itself under a static fp8 scale) and nothing
// else; where the elements have no NaN, the scale carries it.
TEST(RowCodec, NanPoisonsItsScaleGroupOnly) {
  for (const Case& c : cases()) {
    const std::vector<float> clean = random_row(300, 8);
    std::vector<float> x = clean;
    x[200] = kNan;
    const std::vector<float> y = through_record(c, x);
    const std::vector<float> reference = through_record(c, clean);
    const int64_t block = scale_block(c.scheme, 300);
    for (int64_t i = 0; i < 300; ++i) {
      if (i / block == 200 / block) {
        EXPECT_TRUE(std::isnan(y[static_cast<size_t>(i)])) << c.name << " " << i;
      } else {
        EXPECT_EQ(y[static_cast<size_t>(i)], reference[static_cast<size_t>(i)]) << c.name;
      }
    }
  }
}

// Under a static scale an infinity is the limit of large values; a dynamic scale cannot reach it.
TEST(RowCodec, InfinitySaturatesStaticScalesAndPoisonsDynamicOnes) {
  for (const Case& c : cases()) {
    if (c.scheme.format == ActivationFormat::f32 || c.scheme.format == ActivationFormat::bf16) {
      continue;
    }
    for (float inf : {kInf, -kInf}) {
      std::vector<float> x = random_row(300, 8);
      x[200] = inf;
      const std::vector<float> y = through_record(c, x);
      const int64_t block = scale_block(c.scheme, 300);
      if (c.scheme.static_scale) {
        x[200] = std::copysign(1e30f, inf);
        EXPECT_TRUE(same_bits(y, through_record(c, x))) << c.name;
        EXPECT_TRUE(std::isfinite(y[200])) << c.name;
        continue;
      }
      for (int64_t i = 0; i < 300; ++i) {
        EXPECT_EQ(std::isnan(y[static_cast<size_t>(i)]), i / block == 200 / block) << c.name;
      }
    }
  }
}

TEST(RowCodec, StaticFp8Saturates) {
  const Case c{"fp8_tensor", {ActivationFormat::fp8_tensor, true}, 0.5f};
  const std::vector<float> y = through_record(c, {1000.0f, -1000.0f, 224.0f, 231.9f, 1.0f});
  EXPECT_EQ(y, (std::vector<float>{224.0f, -224.0f, 224.0f, 224.0f, 1.0f}));
}

// One rule for the e8m0 byte, at every amax where published rules disagree (field bug F27).
TEST(RowCodec, MxScaleRule) {
  struct Expected {
    float amax;
    int exponent;  // of 2^n = 1
  };
  const Expected table[] = {{1.0f, 0},  {1.49f, 0}, {1.5f, 0}, {1.51f, 0}, {1.74999f, 0},
                            {1.75f, 1}, {1.76f, 1}, {6.0f, 2}, {6.01f, 2}, {7.0f, 3}};
  for (bool fp4 : {true, false}) {
    const ActivationFormat a = fp4 ? ActivationFormat::mxfp4 : ActivationFormat::mxfp8;
    const RowFormat format = RowFormat::of(a, 32);
    for (int n : {-20, 0, 20}) {
      for (const Expected& e : table) {
        std::vector<float> x(32, 0.0f);
        x[5] = std::ldexp(-e.amax, n);
        x[6] = std::ldexp(e.amax, n) / 3;
        std::vector<std::byte> record(static_cast<size_t>(format.record_bytes));
        encode_row({a}, 1.0f, x.data(), 32, record.data());
        const int byte = std::to_integer<int>(record[static_cast<size_t>(format.scale_offset)]);
        EXPECT_EQ(byte - 127, e.exponent + n - (fp4 ? 2 : 8)) << e.amax << " * 2^" << n;
        std::vector<float> y(32);
        decode_row(format, record.data(), y.data());
        EXPECT_LT(y[5], 0);  // saturates, never wraps
        EXPECT_LE(std::fabs(y[5]), std::ldexp(fp4 ? 6.0f : 448.0f, byte - 127));
      }
    }
  }
}

// Every scale byte on every element code, decoded as 2^(byte - 127) or NaN (field bug F26).
TEST(RowCodec, MxDecodeEveryScaleByte) {
  for (bool fp4 : {true, false}) {
    const RowFormat format =
        RowFormat::of(fp4 ? ActivationFormat::mxfp4 : ActivationFormat::mxfp8, 32);
    for (int byte = 0; byte < 256; ++byte) {
      std::vector<std::byte> record(static_cast<size_t>(format.record_bytes));
      for (int64_t i = 0; i < 32; ++i) {
        if (fp4) {
          record[static_cast<size_t>(i / 2)] |= std::byte(static_cast<int>(i % 16) << (i % 2 * 4));
        } else {
          record[static_cast<size_t>(i)] = std::byte(i * 3);
        }
      }
      record[static_cast<size_t>(format.scale_offset)] = std::byte(byte);
      std::vector<float> y(32);
      decode_row(format, record.data(), y.data());
      for (int i = 0; i < 32; ++i) {
        const double code = fp4 ? e2m1_to_f32(static_cast<uint8_t>(i % 16))
                                : e4m3_to_f32(static_cast<uint8_t>(i * 3));
        const size_t at = static_cast<size_t>(i);
        if (byte == 255) {
          EXPECT_TRUE(std::isnan(y[at]));
        } else {
          EXPECT_EQ(y[at], static_cast<float>(std::ldexp(code, byte - 127))) << byte;
        }
      }
    }
  }
}

// A global read in the wrong sense is off by its square; in the right sense both give the same row
// (field bugs F28, F29).
TEST(RowCodec, Nvfp4SensesAgreeAndScaleDoesNotMatter) {
  const std::vector<float> x = random_row(256, 21);
  const float amax = largest(x.data(), 256);
  const auto rel_rms = [&](const std::vector<float>& y) {
    double error = 0;
    double norm = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      error += (double{y[i]} - x[i]) * (double{y[i]} - x[i]);
      norm += double{x[i]} * x[i];
    }
    return std::sqrt(error / norm);
  };
  const ActivationScheme multiplier{ActivationFormat::nvfp4, true, ScaleSense::multiplier, false};
  const ActivationScheme divisor{ActivationFormat::nvfp4, true, ScaleSense::divisor, false};
  EXPECT_TRUE(same_bits(through_record({"", multiplier, 0x1p-8f}, x),
                        through_record({"", divisor, 0x1p8f}, x)));
  for (float global : {amax / 2688, amax / 1500, amax / 448}) {
    EXPECT_LT(rel_rms(through_record({"", multiplier, global}, x)), 0.11);
    EXPECT_LT(rel_rms(through_record({"", divisor, 1 / global}, x)), 0.11);
  }
}

TEST(RowCodec, Nvfp4RecordHoldsAMultiplier) {
  const ActivationScheme divisor{ActivationFormat::nvfp4, true, ScaleSense::divisor, false};
  const RowFormat format = RowFormat::of(ActivationFormat::nvfp4, 40);
  std::vector<std::byte> record(static_cast<size_t>(format.record_bytes));
  const std::vector<float> x = random_row(40, 2);
  encode_row(divisor, 660.0f, x.data(), 40, record.data());
  float global;
  std::memcpy(&global, record.data() + format.scale_offset + 4, 4);  // three scales, 4-aligned
  EXPECT_EQ(global, 1.0f / 660.0f);
  // code * s * (1 / g) against code * s / g: within 1 ulp.
  std::vector<float> y(40);
  decode_row(format, record.data(), y.data());
  for (float v : y) {
    const double exact = std::nearbyint(v * 660.0 * 1024) / 1024 / 660.0;  // code * s is dyadic
    EXPECT_LE(std::fabs(v - exact), std::ldexp(1.0, std::ilogb(exact == 0 ? 1 : exact) - 23));
  }
}

TEST(RowCodec, StaticScalesAreChecked) {
  const ActivationScheme fp8{ActivationFormat::fp8_tensor, true};
  check_static_scale(fp8, 0.01f);
  for (float bad : {0.0f, -1.0f, kNan, kInf, 1e-38f, 1e38f}) {
    EXPECT_THROW(check_static_scale(fp8, bad), Error) << bad;
    check_static_scale({ActivationFormat::bf16}, bad);  // not used there
    check_static_scale({ActivationFormat::nvfp4}, bad);
  }
}

}  // namespace
}  // namespace moekit::quant
