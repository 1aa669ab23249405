// Stored matrices in weight panels: every code under every scale has the codec's value to the bit,
// in every storage; what cannot is refused with its place.
#include "experts/gpu/panel_pack.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "cpu/experts/layers.h"
#include "experts/gpu/expert_image.h"
#include "experts/gpu/members.h"
#include "support/error_code.h"
#include "support/panel_values.h"
#include "tensor/float_tables.h"

namespace moekit::experts::cuda {
namespace {

using kernels::OperandFormat;
using kernels::PanelFormat;
using Grid = std::function<uint32_t(int64_t, int64_t)>;

constexpr WeightFormat kFormats[] = {WeightFormat::mxfp4, WeightFormat::nvfp4, WeightFormat::mxfp8};

/// How a matrix lies in memory. Logical rows are storage rows first, first + step, ...
struct Storage {
  DType unit = DType::u8;
  int pack = 2;
  PackAxis axis = PackAxis::cols;
  bool transposed = false;  ///< inputs first
  int64_t first = 0;
  int64_t step = 1;
  DType scale_unit = DType::u8;
  bool scales_transposed = false;
};

/// A matrix with codes and scale bytes of any bits. Storage rows of other matrices have codes and
/// scales that would show.
struct Stored {
  std::vector<std::byte> codes, scales;
  StoredMatrix m;

  Stored(WeightFormat format, int64_t rows, int64_t cols, const Grid& code, const Grid& scale,
         const Storage& s) {
    m.rows = rows;
    m.cols = cols;
    m.scheme.format = format;
    m.row_first = s.first;
    m.row_step = s.step;
    const int64_t stored_rows = s.first + rows * s.step;
    const int64_t group = format == WeightFormat::nvfp4 ? 16 : 32;
    // Codes: blank ones are 6 and 448.
    const int64_t bytes = std::max(8, bits_of(s.unit)) / 8;
    const int64_t us = s.axis == PackAxis::rows ? ceil_div(stored_rows, s.pack) : stored_rows;
    const int64_t vs = s.axis == PackAxis::cols ? ceil_div(cols, s.pack) : cols;
    m.codes = {nullptr, s.unit, s.axis, PackOrder::sequential, s.pack, 0, 0};
    m.codes.row_stride = s.transposed ? bytes : vs * bytes;
    m.codes.col_stride = s.transposed ? us * bytes : bytes;
    // One byte off, as in a mapped file.
    codes.assign(static_cast<size_t>(us * vs * bytes + 1), std::byte{0x77});
    m.codes.data = codes.data() + 1;
    const int bits = static_cast<int>(bytes * 8 / s.pack);
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t k = 0; k < cols; ++k) {
        const int64_t p = s.first + s.step * n;
        const int64_t u = s.axis == PackAxis::rows ? p / s.pack : p;
        const int64_t v = s.axis == PackAxis::cols ? k / s.pack : k;
        const int64_t inside = s.axis == PackAxis::rows   ? p % s.pack
                               : s.axis == PackAxis::cols ? k % s.pack
                                                          : 0;
        std::byte* at = codes.data() + 1 + u * m.codes.row_stride + v * m.codes.col_stride;
        uint64_t word = 0;
        std::memcpy(&word, at, static_cast<size_t>(bytes));
        const uint64_t mask = ((uint64_t{1} << bits) - 1) << (inside * bits);
        word = (word & ~mask) | uint64_t{code(n, k)} << (inside * bits);
        std::memcpy(at, &word, static_cast<size_t>(bytes));
      }
    }
    const int64_t groups = ceil_div(cols, group), scale_bytes = bytes_of(s.scale_unit);
    scales.assign(static_cast<size_t>(stored_rows * groups * scale_bytes), std::byte{0x7f});
    m.scales = {{scales.data(), s.scale_unit}, 1, group};
    m.scales.values.row_stride = s.scales_transposed ? scale_bytes : groups * scale_bytes;
    m.scales.values.col_stride = s.scales_transposed ? stored_rows * scale_bytes : scale_bytes;
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t g = 0; g < groups; ++g) {
        const uint32_t stored = in_unit(format, scale(n, g), s.scale_unit);
        std::memcpy(scales.data() + (s.first + s.step * n) * m.scales.values.row_stride +
                        g * m.scales.values.col_stride,
                    &stored, static_cast<size_t>(scale_bytes));
      }
    }
  }
  Stored(WeightFormat format, int64_t rows, int64_t cols, const Grid& code, const Grid& scale)
      : Stored(format, rows, cols, code, scale, plain(format)) {}
  Stored(const Stored&) = delete;

  static Storage plain(WeightFormat format) {
    Storage s;
    if (format == WeightFormat::mxfp8) s.pack = 1, s.axis = PackAxis::none;
    return s;
  }

  /// A scale byte in another type.
  static uint32_t in_unit(WeightFormat format, uint32_t byte, DType unit) {
    const auto b = static_cast<uint8_t>(byte);
    const float value = format == WeightFormat::nvfp4 ? kE4m3Values[b] : e8m0_to_f32(b);
    if (unit == DType::f32) return f32_bits(value);
    if (unit == DType::bf16) return f32_to_bf16(value);
    return byte;
  }
};

struct Panels {
  std::vector<std::byte> bytes;
  float multiplier = 0;
};

OperandFormat operand(WeightFormat format) { return *operand_format(format); }

Panels pack(const StoredMatrix& m) {
  const OperandFormat format = operand(m.scheme.format);
  Panels p;
  p.bytes.resize(static_cast<size_t>(kernels::panel_matrix_bytes(format, m.rows, m.cols)));
  p.multiplier = pack_panels(m, format, "gate of expert 5", p.bytes.data());
  return p;
}

/// Empty, or what the error says.
std::string refusal(const StoredMatrix& m) {
  std::string text;
  const auto code = test::code_of([&] { pack(m); }, &text);
  EXPECT_TRUE(text.empty() || code == ErrorCode::unsupported) << text;
  return text;
}

/// Each weight: the codec's, of a product that bf16 holds exactly.
void expect_codecs_values(const StoredMatrix& m, const Panels& panels) {
  std::vector<float> want(static_cast<size_t>(m.cols));
  for (int64_t n = 0; n < m.rows; ++n) {
    quant::decode_weights(m, n, 0, m.cols, want.data());
    for (int64_t k = 0; k < m.cols; ++k) {
      const test::PanelValue v =
          test::panel_value(operand(m.scheme.format), panels.bytes.data(), m.cols, n, k);
      const float expected = want[static_cast<size_t>(k)];
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(v.as_bf16())) << n << ", " << k;
        continue;
      }
      ASSERT_EQ(v.as_bf16(), v.product()) << n << ", " << k;
      ASSERT_EQ(v.as_bf16() * panels.multiplier, expected) << n << ", " << k;
    }
  }
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

// --- images and members ----------------------------------------------------------------------

using device::ExpertKernels;
using testing::LayerOptions;
using testing::TestLayer;

LayerOptions layer_options(WeightFormat format) {
  LayerOptions o;
  o.weights.format = format;
  o.bias = true;
  o.activation.kind = ActivationKind::swiglu_oai;
  return o;
}

TEST(ExpertImage, MatrixKernelsReadPanelsAndTheReferenceDoesNot) {
  for (const WeightFormat format : kFormats) {
    const TestLayer t(layer_options(format));
    const MoeConfig& c = t.layer.config;
    const ExpertImage sm90(c, ExpertKernels::sm90), decode(c, ExpertKernels::decode),
        reference(c, ExpertKernels::reference);
    EXPECT_EQ(sm90.bytes, decode.bytes) << "one image serves both chains";
    EXPECT_EQ(sm90.up.panels, operand(format));
    EXPECT_EQ(sm90.up.codes.bytes, kernels::panel_matrix_bytes(operand(format), c.inter, c.hidden));
    EXPECT_EQ(sm90.up.codes.offset - sm90.gate.codes.offset, sm90.gate.codes.bytes);
    EXPECT_EQ(sm90.down.codes.bytes,
              kernels::panel_matrix_bytes(operand(format), c.hidden, c.inter));
    EXPECT_EQ(sm90.up.scales.bytes, 0);
    EXPECT_FALSE(reference.up.panels);
    EXPECT_EQ(reference.up.codes.bytes, c.inter * reference.up.layout.code_row_bytes);
    EXPECT_GT(reference.up.scales.bytes, 0);
  }
  for (const WeightFormat format : {WeightFormat::bf16, WeightFormat::fp8_block}) {
    const TestLayer t(layer_options(format));
    EXPECT_FALSE(ExpertImage(t.layer.config, ExpertKernels::sm90).up.panels);
  }
}

TEST(ExpertImage, MembersPackPanelsBiasesAndMultipliers) {
  for (const WeightFormat format : kFormats) {
    const TestLayer t(layer_options(format));
    ThreadPool pool(2);
    for (const Experts* member : {&sm90_experts(), &cuda_decode_experts()}) {
      const WeightLayout layout = member->weight_layout(t.layer, t.local);
      EXPECT_EQ(layout.name, "cuda_panels");
      EXPECT_TRUE(layout.on_device);
      Buffer blob(layout.total_bytes());
      std::memset(blob.data(), 0xff, static_cast<size_t>(blob.size()));
      member->pack(t.layer, t.local, layout, blob.data(), pool);
      const ExpertImage image(t.layer.config, ExpertKernels::sm90);
      ASSERT_EQ(layout.expert_bytes(), image.bytes);
      for (size_t e = 0; e < t.layer.experts.size(); ++e) {
        const std::byte* at = blob.data() + layout.expert_offset[e];
        const StoredExpert& expert = t.layer.experts[e];
        const struct {
          const StoredMatrix& stored;
          const StoredVector& bias;
          const ImageMatrix& image;
        } matrices[] = {{expert.gate, expert.gate_bias, image.gate},
                        {expert.up, expert.up_bias, image.up},
                        {expert.down, expert.down_bias, image.down}};
        for (const auto& m : matrices) {
          Panels panels;
          panels.bytes.assign(at + m.image.codes.offset,
                              at + m.image.codes.offset + m.image.codes.bytes);
          std::memcpy(&panels.multiplier, at + m.image.global.offset, 4);
          expect_codecs_values(m.stored, panels);
          for (int64_t n = 0; n < m.stored.rows; ++n) {
            float bias;
            std::memcpy(&bias, at + m.image.bias.offset + n * 4, 4);
            ASSERT_EQ(bias, quant::element(m.bias, n));
          }
        }
      }
    }
    EXPECT_EQ(cuda_ref_experts().weight_layout(t.layer, t.local).name, "cuda_images");
  }
}

TEST(ExpertImage, FaultsOfAMatrixNameItsExpert) {
  TestLayer t(layer_options(WeightFormat::mxfp4));
  ThreadPool pool(2);
  const WeightLayout layout = sm90_experts().weight_layout(t.layer, t.local);
  Buffer blob(layout.total_bytes());
  std::vector<float> scales(static_cast<size_t>(160 * 3), 0.3f);
  ScaleGrid& grid = t.layer.experts[2].up.scales;
  grid.values.data = reinterpret_cast<const std::byte*>(scales.data());
  grid.values.unit = DType::f32;
  grid.values.row_stride = 12;
  grid.values.col_stride = 4;
  std::string text;
  EXPECT_EQ(test::code_of([&] { sm90_experts().pack(t.layer, t.local, layout, blob.data(), pool); },
                          &text),
            ErrorCode::unsupported);
  EXPECT_EQ(text.find("up of expert 2: the scale 0.3 of row 0"), 0u) << text;
}

TEST(ExpertImage, ScalesOfSingleColumnsAreRefusedWhenTheLayoutIsMade) {
  TestLayer t(layer_options(WeightFormat::mxfp4));
  // As ModelOpt packs GPT-OSS: groups of outputs.
  t.layer.experts[1].down.scales.row_group = 32;
  t.layer.experts[1].down.scales.col_group = 1;
  for (const Experts* member : {&sm90_experts(), &cuda_ref_experts()}) {
    std::string text;
    EXPECT_EQ(test::code_of([&] { member->weight_layout(t.layer, t.local); }, &text),
              ErrorCode::unsupported);
    EXPECT_NE(text.find("the scales of down of expert 1 stand for 1 columns"), std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace moekit::experts::cuda
