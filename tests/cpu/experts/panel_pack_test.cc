// Stored matrices in weight panels: every code under every scale has the codec's value to the bit,
// in every storage; what cannot is refused with its place.
#include "experts/gpu/panel_pack.h"

#include <gtest/gtest.h>

#include "cpu/experts/stored_panels.h"
#include "support/error_code.h"

namespace moekit::experts::cuda {
namespace {

/// Empty, or what the error says.
std::string refusal(const StoredMatrix& m) {
  std::string text;
  const auto code = test::code_of([&] { pack(m); }, &text);
  EXPECT_TRUE(text.empty() || code == ErrorCode::unsupported) << text;
  return text;
}

TEST(PanelPack, EveryFp4CodeUnderEveryScaleInEveryPlace) {
  for (const WeightFormat format : {WeightFormat::mxfp4, WeightFormat::nvfp4}) {
    for (uint32_t scale = 0; scale < 256; ++scale) {
      for (uint32_t c = 0; c < 16; ++c) {
        // 16 rows of 64 columns are all the places of a lane's words.
        const Stored s(
            format, 16, 64,
            [&](int64_t n, int64_t k) { return static_cast<uint32_t>(n + k + c) % 16; },
            [&](int64_t, int64_t) { return scale; });
        expect_codecs_values(s.m, pack(s.m));
        ASSERT_FALSE(HasFailure()) << to_string(format) << ", scale byte " << scale;
      }
    }
  }
}

TEST(PanelPack, EveryFp8CodeUnderEveryScale) {
  const auto code_of = [](int64_t n, int64_t k) {
    const auto code = static_cast<uint32_t>(n * 64 + k + n / 4) % 256;
    return (code & 0x7f) == 0x7f ? code - 1 : code;
  };
  for (uint32_t scale = 0; scale < 256; ++scale) {
    // The smallest codes under the three smallest scales are below bf16's range.
    const bool small = scale < 3;
    const Stored s(
        WeightFormat::mxfp8, 32, 64,
        [&](int64_t n, int64_t k) {
          const uint32_t code = code_of(n, k);
          return small && (code & 0x7f) < 0x20 ? code | 0x20 : code;
        },
        [&](int64_t, int64_t) { return scale; });
    expect_codecs_values(s.m, pack(s.m));
    ASSERT_FALSE(HasFailure()) << "scale byte " << scale;
  }
}

TEST(PanelPack, ANanCodeMakesItsGroupNan) {
  for (const uint32_t nan : {0x7fu, 0xffu}) {
    const Stored s(
        WeightFormat::mxfp8, 32, 64,
        [&](int64_t n, int64_t k) { return n == 17 && k == 45 ? nan : 0x38u; },
        // A scale that only NaN has does not shift the others.
        [](int64_t n, int64_t g) { return n == 17 && g == 1 ? 250u : 120u; });
    const Panels panels = pack(s.m);
    EXPECT_EQ(panels.multiplier, 1.0f);
    for (int64_t n = 0; n < 32; ++n) {
      for (int64_t k = 0; k < 64; ++k) {
        const float v =
            test::panel_value(OperandFormat::mxfp8, panels.bytes.data(), 64, n, k).as_bf16();
        const bool in_group = n == 17 && k >= 32;
        ASSERT_EQ(std::isnan(v), in_group) << n << ", " << k;
        if (!in_group) {
          ASSERT_EQ(v, 0x1p-7f);
        }
      }
    }
  }
}

TEST(PanelPack, LargeScalesShareAPowerOfTwo) {
  const auto multiplier = [](WeightFormat format, uint32_t large, uint32_t others, uint32_t code) {
    const Stored s(
        format, 32, 64,
        [&](int64_t n, int64_t k) { return n == 3 && k >= 32 ? code : 2u | code >> 1; },
        [&](int64_t n, int64_t g) { return n == 3 && g == 1 ? large : others; });
    const Panels panels = pack(s.m);
    expect_codecs_values(s.m, panels);
    return panels.multiplier;
  };
  EXPECT_EQ(multiplier(WeightFormat::mxfp4, 128, 100, 5), 1.0f);
  EXPECT_EQ(multiplier(WeightFormat::mxfp4, 129, 100, 5), 2.0f);
  EXPECT_EQ(multiplier(WeightFormat::mxfp4, 254, 254, 5), 0x1p126f);
  EXPECT_EQ(multiplier(WeightFormat::mxfp8, 134, 100, 0x38), 1.0f);
  EXPECT_EQ(multiplier(WeightFormat::mxfp8, 200, 100, 0x38), 0x1p66f);
  // Nothing has the large scale: no shift.
  EXPECT_EQ(multiplier(WeightFormat::mxfp4, 254, 3, 0), 1.0f);
  EXPECT_EQ(multiplier(WeightFormat::mxfp4, 255, 3, 5), 1.0f);
}

/// One code of a group under the scale `small`, beside weights under the largest scale there is.
std::string spread(WeightFormat format, uint32_t small, uint32_t code) {
  const Stored s(
      format, 32, 64,
      [&](int64_t n, int64_t k) {
        if (n == 0) return k == 40 ? code : 0u;
        return n == 1 ? 1u : 0u;
      },
      [&](int64_t n, int64_t g) { return n == 0 && g == 1 ? small : 254u; });
  const std::string text = refusal(s.m);
  if (text.empty()) expect_codecs_values(s.m, pack(s.m));
  return text;
}

TEST(PanelPack, WeightsBelowBf16sRangeAreRefused) {
  // The shift is 126: 0.5 under 2^(121 - 127) becomes 2^-133, bf16's smallest.
  EXPECT_EQ(spread(WeightFormat::mxfp4, 121, 1), "");
  EXPECT_EQ(spread(WeightFormat::mxfp4, 120, 1),
            "gate of expert 5: row 0, column 40 is too small for bf16 beside the largest scale of "
            "its matrix: 0.5 * 2^-7 with a shift of 126; back-end cuda_ref takes it");
  EXPECT_EQ(spread(WeightFormat::mxfp4, 120, 2), "") << "1 has room where 0.5 has none";
  EXPECT_EQ(spread(WeightFormat::mxfp4, 0, 0), "") << "zero is exact under any scale";
  EXPECT_NE(spread(WeightFormat::mxfp4, 0, 7), "");
  // mxfp8: a shift of 120, the smallest code 2^-9.
  EXPECT_EQ(spread(WeightFormat::mxfp8, 123, 1), "");
  EXPECT_NE(spread(WeightFormat::mxfp8, 122, 1), "");
  EXPECT_EQ(spread(WeightFormat::mxfp8, 122, 2), "");
  EXPECT_NE(spread(WeightFormat::mxfp8, 0, 0x7e), "");
}

TEST(PanelPack, GlobalsBecomeMultipliers) {
  const auto code = [](int64_t n, int64_t k) { return static_cast<uint32_t>(n * 5 + k * 3) % 16; };
  const auto scale = [](int64_t n, int64_t g) { return static_cast<uint32_t>(n * 4 + g) % 127; };
  Stored s(WeightFormat::nvfp4, 48, 96, code, scale);
  for (const float global : {1.0f, 0.37f, 1e-5f, 3.1e20f}) {
    s.m.global = global;
    const Panels panels = pack(s.m);
    EXPECT_EQ(panels.multiplier, global * 0x1p19f);
    expect_codecs_values(s.m, panels);
  }
  s.m.global_sense = ScaleSense::divisor;
  for (const float global : {0x1p-7f, 0x1p30f}) {
    s.m.global = global;
    expect_codecs_values(s.m, pack(s.m));
  }
  s.m.global = 2688.0f / 0.83f;
  EXPECT_EQ(pack(s.m).multiplier, 0x1p19f / s.m.global);
  s.m.global = 1e-35f;
  EXPECT_NE(refusal(s.m).find("leaves the range of f32"), std::string::npos);
}

TEST(PanelPack, PaddingIsZero) {
  for (const WeightFormat format : kFormats) {
    for (const auto& [rows, cols] : {std::pair{96, 160}, {32, 32}, {160, 96}}) {
      const Stored s(
          format, rows, cols, [](int64_t, int64_t) { return 5u; },
          [](int64_t, int64_t) { return 0x70u; });
      const Panels panels = pack(s.m);
      expect_codecs_values(s.m, panels);
      for (int64_t n = 0; n < round_up(rows, 64); ++n) {
        for (int64_t k = 0; k < round_up(cols, 64); ++k) {
          if (n < rows && k < cols) continue;
          ASSERT_EQ(test::panel_value(operand(format), panels.bytes.data(), cols, n, k).as_bf16(),
                    0.0f)
              << n << ", " << k;
        }
      }
    }
  }
}

TEST(PanelPack, EveryStorageGivesTheSameBytes) {
  for (const WeightFormat format : kFormats) {
    const bool fp4 = format != WeightFormat::mxfp8;
    const auto code = [&](int64_t n, int64_t k) {
      const auto c = static_cast<uint32_t>(n * 37 + k * 11 + k / 16 + n * k) % (fp4 ? 16 : 256);
      return c == 0x7f || c == 0xff ? 1u : c;
    };
    // nvfp4: zero, negative and NaN scales among them.
    const auto scale = [&](int64_t n, int64_t g) {
      return format == WeightFormat::nvfp4 ? static_cast<uint32_t>(n * 5 + g) % 256
                                           : static_cast<uint32_t>(110 + (n * 7 + g * 3) % 31);
    };
    const Stored canonical(format, 96, 96, code, scale);
    const Panels want = pack(canonical.m);
    expect_codecs_values(canonical.m, want);

    std::vector<Storage> storages;
    const Storage plain = Stored::plain(format);
    for (const auto& [first, step] : {std::pair{0, 2}, {1, 2}, {96, 1}, {33, 1}}) {
      Storage s = plain;
      s.first = first;
      s.step = step;
      storages.push_back(s);
      s.transposed = s.scales_transposed = true;
      storages.push_back(s);
    }
    for (const DType unit : {DType::f32, DType::bf16}) {
      storages.push_back(plain);
      storages.back().scale_unit = unit;
    }
    storages.push_back(plain);
    storages.back().unit = DType::i32;
    storages.back().axis = PackAxis::cols;
    storages.back().pack = fp4 ? 8 : 4;
    if (fp4) {
      storages.push_back(plain);
      storages.back().unit = DType::f4_e2m1;
      storages.push_back(plain);
      storages.back().axis = PackAxis::rows;
      storages.back().transposed = true;
      storages.push_back(plain);  // a code a byte
      storages.back().axis = PackAxis::none;
      storages.back().pack = 1;
    } else {
      storages.push_back(plain);
      storages.back().unit = DType::f8_e4m3;
    }
    for (size_t i = 0; i < storages.size(); ++i) {
      const Stored other(format, 96, 96, code, scale, storages[i]);
      const Panels got = pack(other.m);
      EXPECT_EQ(got.bytes, want.bytes) << to_string(format) << ", storage " << i;
      EXPECT_EQ(got.multiplier, want.multiplier);
    }
    // One scale for all columns, and none at all.
    Stored wide(format, 32, 96, code,
                [](int64_t n, int64_t) { return static_cast<uint32_t>(100 + n % 9); });
    wide.m.scales.col_group = 0;
    expect_codecs_values(wide.m, pack(wide.m));
    wide.m.scales = {};
    expect_codecs_values(wide.m, pack(wide.m));
  }
}

TEST(PanelPack, ScalesThatTheFormatDoesNotHaveAreRefused) {
  const auto with = [](WeightFormat format, float scale) {
    Storage storage = Stored::plain(format);
    storage.scale_unit = DType::f32;
    Stored s(
        format, 32, 64, [](int64_t, int64_t) { return 1u; }, [](int64_t, int64_t) { return 120u; },
        storage);
    std::memcpy(s.scales.data() + 5 * s.m.scales.values.row_stride, &scale, sizeof(scale));
    const std::string text = refusal(s.m);
    if (text.empty()) expect_codecs_values(s.m, pack(s.m));
    return text;
  };
  EXPECT_EQ(with(WeightFormat::mxfp4, 0.75f),
            "gate of expert 5: the scale 0.75 of row 5, columns 0 to 31, is no power of two from "
            "2^-127 to 2^127");
  EXPECT_NE(with(WeightFormat::mxfp8, -2.0f), "");
  EXPECT_NE(with(WeightFormat::mxfp8, 0.0f), "");
  EXPECT_NE(with(WeightFormat::mxfp4, INFINITY), "");
  EXPECT_NE(with(WeightFormat::mxfp4, 0x1p-128f), "");
  EXPECT_EQ(with(WeightFormat::mxfp4, 0x1p-127f), "");
  EXPECT_EQ(with(WeightFormat::mxfp4, NAN), "");
  EXPECT_EQ(with(WeightFormat::nvfp4, 0.1f),
            "gate of expert 5: the scale 0.1 of row 5, columns 0 to 15, is no e4m3 number");
  EXPECT_NE(with(WeightFormat::nvfp4, 480.0f), "");
  EXPECT_EQ(with(WeightFormat::nvfp4, -0.5f), "");
  EXPECT_EQ(with(WeightFormat::nvfp4, 0x1p-9f), "");
  EXPECT_EQ(with(WeightFormat::nvfp4, NAN), "");
}

}  // namespace
}  // namespace moekit::experts::cuda
