// Exact coordinates in every storage: codes, scales and zero points differ from all their
// neighbours, so one read from a wrong place shows (field bugs F19, F22, F30, F32).
#include "quant/stored_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "tensor/float_formats.h"

namespace moekit::quant {
namespace {

using Bytes = std::vector<std::byte>;

constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // code held by nibble i of a word

/// A grid of `outputs` x `inputs` codes of `bits`, written unit by unit from value(p, q).
/// `transposed` puts inputs first in memory.
struct Written {
  Bytes bytes;
  CodeGrid grid;
};

Written write_grid(int64_t outputs, int64_t inputs, DType unit, PackAxis axis, int pack,
                   bool transposed, PackOrder order,
                   const std::function<uint32_t(int64_t, int64_t)>& value) {
  const int64_t unit_bytes = bytes_of(unit);
  const int64_t us = axis == PackAxis::rows ? (outputs + pack - 1) / pack : outputs;
  const int64_t vs = axis == PackAxis::cols ? (inputs + pack - 1) / pack : inputs;
  Written w;
  w.bytes.resize(static_cast<size_t>(us * vs * unit_bytes + 1));
  w.grid = {nullptr,
            unit,
            axis,
            order,
            pack,
            transposed ? unit_bytes : vs * unit_bytes,
            transposed ? us * unit_bytes : unit_bytes};
  const int bits = static_cast<int>(unit_bytes * 8 / pack);
  for (int64_t u = 0; u < us; ++u) {
    for (int64_t v = 0; v < vs; ++v) {
      uint64_t word = 0;
      for (int i = 0; i < pack; ++i) {
        const int code = order == PackOrder::awq ? kAwqOrder[i] : i;
        const int64_t p = axis == PackAxis::rows ? u * pack + code : u;
        const int64_t q = axis == PackAxis::cols ? v * pack + code : v;
        if (p < outputs && q < inputs) word |= uint64_t{value(p, q)} << (i * bits);
      }
      // One byte off, as in a mapped file: nothing may rely on alignment.
      std::memcpy(w.bytes.data() + 1 + u * w.grid.row_stride + v * w.grid.col_stride, &word,
                  static_cast<size_t>(unit_bytes));
    }
  }
  w.grid.data = w.bytes.data() + 1;
  return w;
}

Written write_plain(int64_t outputs, int64_t inputs, DType unit, bool transposed,
                    const std::function<uint32_t(int64_t, int64_t)>& value) {
  return write_grid(outputs, inputs, unit, PackAxis::none, 1, transposed, PackOrder::sequential,
                    value);
}

/// Decodes all of `m`, whole rows and odd pieces, and compares with want(row, col).
void expect_values(const StoredMatrix& m, const std::function<float(int64_t, int64_t)>& want) {
  std::vector<float> w(static_cast<size_t>(m.cols));
  for (int64_t row = 0; row < m.rows; ++row) {
    decode_weights(m, row, 0, m.cols, w.data());
    for (int64_t col = 0; col < m.cols; ++col) {
      ASSERT_EQ(w[static_cast<size_t>(col)], want(row, col)) << "at " << row << ", " << col;
    }
    for (int64_t first : {int64_t{1}, m.cols / 3, m.cols - 1}) {
      const int64_t count = (m.cols - first + 1) / 2;
      decode_weights(m, row, first, count, w.data());
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(w[static_cast<size_t>(i)], want(row, first + i))
            << "at " << row << ", " << first + i;
      }
    }
  }
}

uint32_t fp8_code(int64_t p, int64_t q) {
  return static_cast<uint32_t>((p * 37 + q * 5) % 126 + 1);
}
uint32_t fp4_code(int64_t p, int64_t q) {
  return static_cast<uint32_t>((p * 7 + q * 5 + q / 16) % 16);
}
uint32_t int4_code(int64_t p, int64_t q) { return static_cast<uint32_t>((p * 3 + q * 7 + 1) % 16); }
uint32_t mx_byte(int64_t p, int64_t g) { return static_cast<uint32_t>(110 + (7 * p + 3 * g) % 31); }
float f32_scale(int64_t a, int64_t b) { return 0.01f * static_cast<float>(1 + a * 17 + b); }
uint32_t f32_scale_bits(int64_t a, int64_t b) { return f32_bits(f32_scale(a, b)); }

TEST(StoredCodec, PlainFloatsInEveryLayout) {
  for (bool transposed : {false, true}) {
    const auto value = [](int64_t p, int64_t q) { return static_cast<float>(p * 100 + q) * 0.25f; };
    const auto f32 = write_plain(6, 40, DType::f32, transposed,
                                 [&](int64_t p, int64_t q) { return f32_bits(value(p, q)); });
    const auto bf16 = write_plain(6, 40, DType::bf16, transposed, [&](int64_t p, int64_t q) {
      return uint32_t{f32_to_bf16(value(p, q))};
    });
    const auto f16 = write_plain(6, 40, DType::f16, transposed, [&](int64_t p, int64_t q) {
      return uint32_t{f32_to_f16(value(p, q))};
    });
    StoredMatrix m;
    m.rows = 6;
    m.cols = 40;
    m.scheme.format = WeightFormat::f32;
    m.codes = f32.grid;
    expect_values(m, value);
    m.scheme.format = WeightFormat::f16;
    m.codes = f16.grid;
    expect_values(m, value);
    m.scheme.format = WeightFormat::bf16;
    m.codes = bf16.grid;
    const auto rounded = [&](int64_t p, int64_t q) {
      return bf16_to_f32(f32_to_bf16(value(p, q)));
    };
    expect_values(m, rounded);
    m.rows = 3;  // every other stored row: interleaved gate and up
    m.row_first = 1;
    m.row_step = 2;
    expect_values(m, [&](int64_t row, int64_t q) { return rounded(1 + 2 * row, q); });
    EXPECT_EQ(code_at(m, 2, 7), f32_to_bf16(value(5, 7)));
    EXPECT_EQ(scale_at(m, 0, 0), 1.0f);
    EXPECT_EQ(zero_at(m, 0, 0), 0);
  }
}

TEST(StoredCodec, Fp8PerTensorChannelAndBlock) {
  const int64_t n = 200;
  const int64_t k = 300;
  const auto codes = write_plain(n, k, DType::f8_e4m3, false, fp8_code);
  StoredMatrix m;
  m.rows = n;
  m.cols = k;
  m.codes = codes.grid;
  const auto value = [](int64_t p, int64_t q) {
    return e4m3_to_f32(static_cast<uint8_t>(fp8_code(p, q)));
  };

  m.scheme.format = WeightFormat::fp8_tensor;
  const auto one = write_plain(1, 1, DType::bf16, false, [](auto, auto) { return 0x3c23u; });
  m.scales = {one.grid, 0, 0};
  expect_values(m, [&](int64_t p, int64_t q) { return value(p, q) * bf16_to_f32(0x3c23); });

  m.scheme.format = WeightFormat::fp8_channel;
  const auto channel = write_plain(n, 1, DType::f32, false, f32_scale_bits);
  m.scales = {channel.grid, 1, 0};
  expect_values(m, [&](int64_t p, int64_t q) { return value(p, q) * f32_scale(p, 0); });

  m.scheme.format = WeightFormat::fp8_block;
  const auto block = write_plain(2, 3, DType::f32, false, f32_scale_bits);
  m.scales = {block.grid, 128, 128};
  expect_values(m, [&](int64_t p, int64_t q) { return value(p, q) * f32_scale(p / 128, q / 128); });
  EXPECT_EQ(scale_at(m, 130, 257), f32_scale(1, 2));
}

// A shard of rows narrower than a scale block takes the scale of its place in the whole matrix
// (field bug F22); gate and up stacked in one tensor are two such shards.
TEST(StoredCodec, ShardsKeepTheScalesOfTheWhole) {
  const auto codes = write_plain(384, 384, DType::f8_e4m3, false, fp8_code);
  const auto scales = write_plain(3, 3, DType::f32, false, f32_scale_bits);
  for (int64_t shard : {64, 192}) {
    for (int64_t first = 0; first < 384; first += shard) {
      StoredMatrix m;
      m.rows = shard;
      m.cols = 384;
      m.row_first = first;
      m.scheme.format = WeightFormat::fp8_block;
      m.codes = codes.grid;
      m.scales = {scales.grid, 128, 128};
      const auto want = [&](int64_t row, int64_t q) {
        const int64_t p = first + row;
        return e4m3_to_f32(static_cast<uint8_t>(fp8_code(p, q))) * f32_scale(p / 128, q / 128);
      };
      expect_values(m, want);
      std::vector<float> w(static_cast<size_t>(shard));  // a shard of columns
      decode_weights(m, 0, first, shard, w.data());
      for (int64_t i = 0; i < shard; ++i) ASSERT_EQ(w[static_cast<size_t>(i)], want(0, first + i));
    }
  }
}

// Scale byte 110 + (7 row + 3 block) mod 31, so that no neighbour matches (field bug F32), and the
// special bytes 0, 1, 103, 254, 255 (field bug F26).
TEST(StoredCodec, MxScalesAtTheirExactCoordinates) {
  struct Variant {
    WeightFormat format;
    DType scale_unit;
  };
  for (const Variant& v : {Variant{WeightFormat::mxfp8, DType::u8},
                           {WeightFormat::mxfp8, DType::f8_e8m0},
                           {WeightFormat::mxfp8_e5m2, DType::u8},
                           {WeightFormat::mxfp4, DType::u8}}) {
    const bool fp4 = v.format == WeightFormat::mxfp4;
    const auto codes = fp4 ? write_grid(256, 256, DType::u8, PackAxis::cols, 2, false,
                                        PackOrder::sequential, fp4_code)
                           : write_plain(256, 256, DType::u8, false, [](int64_t p, int64_t q) {
                               return fp8_code(p, q) % 124;  // finite in e5m2 as well
                             });
    const uint32_t special[] = {0, 1, 103, 254};
    const auto scale_byte = [&](int64_t p, int64_t g) {
      return p == 9 ? special[g % 4] : mx_byte(p, g);
    };
    const auto scales = write_plain(256, 8, v.scale_unit, false, scale_byte);
    StoredMatrix m;
    m.rows = m.cols = 256;
    m.scheme.format = v.format;
    m.codes = codes.grid;
    m.scales = {scales.grid, 1, 32};
    expect_values(m, [&](int64_t p, int64_t q) {
      const uint32_t code = fp4 ? fp4_code(p, q) : fp8_code(p, q) % 124;
      const double value = fp4 ? e2m1_to_f32(static_cast<uint8_t>(code))
                           : v.format == WeightFormat::mxfp8
                               ? e4m3_to_f32(static_cast<uint8_t>(code))
                               : e5m2_to_f32(static_cast<uint8_t>(code));
      return static_cast<float>(std::ldexp(value, static_cast<int>(scale_byte(p, q / 32)) - 127));
    });
  }
  const auto codes =
      write_plain(1, 64, DType::f8_e4m3, false, [](auto, int64_t q) { return q % 2 ? 0x38u : 0u; });
  const auto scales =
      write_plain(1, 2, DType::u8, false, [](auto, int64_t g) { return g ? 255u : 0u; });
  StoredMatrix m;
  m.rows = 1;
  m.cols = 64;
  m.scheme.format = WeightFormat::mxfp8;
  m.codes = codes.grid;
  m.scales = {scales.grid, 1, 32};
  std::vector<float> w(64);
  decode_weights(m, 0, 0, 64, w.data());
  for (size_t i = 0; i < 64; ++i) {
    if (i >= 32) {
      EXPECT_TRUE(std::isnan(w[i]));
    } else {
      EXPECT_EQ(w[i], i % 2 ? 0x1p-127f : 0.0f);
    }
  }
}

struct Nvfp4Parts {
  Written codes, scales;
  StoredMatrix matrix;
};

uint32_t nvfp4_scale(int64_t p, int64_t g) {
  return static_cast<uint32_t>(1 + (p * 11 + g * 3) % 126);
}

Nvfp4Parts nvfp4_matrix(int64_t n, int64_t k, int64_t expert) {
  Nvfp4Parts parts;
  parts.codes = write_grid(n, k, DType::u8, PackAxis::cols, 2, false, PackOrder::sequential,
                           [=](int64_t p, int64_t q) { return fp4_code(p + expert, q); });
  parts.scales = write_plain(n, k / 16, DType::f8_e4m3, false,
                             [=](int64_t p, int64_t g) { return nvfp4_scale(p + expert, g); });
  parts.matrix.rows = n;
  parts.matrix.cols = k;
  parts.matrix.scheme.format = WeightFormat::nvfp4;
  parts.matrix.codes = parts.codes.grid;
  parts.matrix.scales = {parts.scales.grid, 1, 16};
  return parts;
}

float nvfp4_value(int64_t p, int64_t q) {
  return e2m1_to_f32(static_cast<uint8_t>(fp4_code(p, q))) *
         e4m3_to_f32(static_cast<uint8_t>(nvfp4_scale(p, q / 16)));
}

// Widths that are no multiple of 128, several experts (field bug F19); both senses of the global
// (F28); gate and up with unlike globals (F30).
TEST(StoredCodec, Nvfp4GlobalsInBothSenses) {
  for (int64_t k : {160, 176, 2880}) {
    for (int64_t expert = 0; expert < 3; ++expert) {
      Nvfp4Parts parts = nvfp4_matrix(6, k, expert);
      StoredMatrix& m = parts.matrix;
      for (float ratio : {1.0f, 2.0f, 10.0f}) {
        m.global = 0x1p-12f * ratio;
        m.global_sense = ScaleSense::multiplier;
        const auto want = [&](int64_t p, int64_t q) {
          return nvfp4_value(p + expert, q) * m.global;
        };
        expect_values(m, want);
      }
      std::vector<float> multiplied(static_cast<size_t>(k));
      std::vector<float> divided(static_cast<size_t>(k));
      m.global = 0x1p-12f;
      decode_weights(m, 5, 0, k, multiplied.data());
      m.global = 4096.0f;
      m.global_sense = ScaleSense::divisor;
      decode_weights(m, 5, 0, k, divided.data());
      EXPECT_EQ(multiplied, divided);
      m.global = 660.0f;
      expect_values(m, [&](int64_t p, int64_t q) { return nvfp4_value(p + expert, q) / 660.0f; });
    }
  }
}

// Fused experts of ModelOpt: codes and scales along the stored first axis, [K/2, N] and [K/16, N].
TEST(StoredCodec, Fp4PackedAlongATransposedInputAxis) {
  const auto codes =
      write_grid(10, 64, DType::u8, PackAxis::cols, 2, true, PackOrder::sequential, fp4_code);
  const auto scales = write_plain(10, 4, DType::f8_e4m3, true, nvfp4_scale);
  StoredMatrix m;
  m.rows = 5;
  m.cols = 64;
  m.row_first = 5;  // the second half of the columns: up
  m.scheme.format = WeightFormat::nvfp4;
  m.codes = codes.grid;
  m.scales = {scales.grid, 1, 16};
  m.global = 3.0f;
  expect_values(m, [](int64_t row, int64_t q) { return nvfp4_value(5 + row, q) * 3.0f; });
}

// Two codes a byte along the outputs, scales per 32 outputs.
TEST(StoredCodec, Fp4PackedAlongTheOutputAxis) {
  const auto codes =
      write_grid(96, 20, DType::u8, PackAxis::rows, 2, true, PackOrder::sequential, fp4_code);
  const auto scales = write_plain(3, 20, DType::u8, true, mx_byte);
  StoredMatrix m;
  m.rows = 48;
  m.cols = 20;
  m.row_first = 1;
  m.row_step = 2;
  m.scheme.format = WeightFormat::mxfp4;
  m.codes = codes.grid;
  m.scales = {scales.grid, 32, 1};
  expect_values(m, [](int64_t row, int64_t q) {
    const int64_t p = 1 + 2 * row;
    return e2m1_to_f32(static_cast<uint8_t>(fp4_code(p, q))) *
           e8m0_to_f32(static_cast<uint8_t>(mx_byte(p / 32, q)));
  });
}

TEST(StoredCodec, Int4PackQuantized) {
  const auto codes =
      write_grid(5, 200, DType::i32, PackAxis::cols, 8, false, PackOrder::sequential, int4_code);
  const auto scales = write_plain(5, 2, DType::f32, false, f32_scale_bits);
  StoredMatrix m;
  m.rows = 5;
  m.cols = 200;  // the last group is partial
  m.scheme = {WeightFormat::int4_group, 128, false};
  m.codes = codes.grid;
  m.code_offset = 8;
  m.scales = {scales.grid, 1, 128};
  expect_values(m, [](int64_t p, int64_t q) {
    return (static_cast<float>(int4_code(p, q)) - 8) * f32_scale(p, q / 128);
  });
  EXPECT_EQ(code_at(m, 3, 130), int4_code(3, 130));
}

TEST(StoredCodec, Int8SignedBytesAndPackedWords) {
  const auto byte = [](int64_t p, int64_t q) {
    return static_cast<uint32_t>((p * 91 + q * 13) & 255);
  };
  const auto scales = write_plain(4, 1, DType::f16, false, [](int64_t p, auto) {
    return uint32_t{f32_to_f16(0.5f + static_cast<float>(p))};
  });
  StoredMatrix m;
  m.rows = 4;
  m.cols = 37;
  m.scheme.format = WeightFormat::int8_channel;
  m.scales = {scales.grid, 1, 0};
  for (bool transposed : {false, true}) {
    const auto codes = write_plain(4, 37, DType::i8, transposed, byte);
    m.codes = codes.grid;
    m.code_offset = 0;
    expect_values(m, [&](int64_t p, int64_t q) {
      return static_cast<float>(static_cast<int8_t>(byte(p, q))) * (0.5f + static_cast<float>(p));
    });
  }
  const auto packed =
      write_grid(4, 37, DType::i32, PackAxis::cols, 4, false, PackOrder::sequential, byte);
  m.codes = packed.grid;
  m.code_offset = 128;
  expect_values(m, [&](int64_t p, int64_t q) {
    return (static_cast<float>(byte(p, q)) - 128) * (0.5f + static_cast<float>(p));
  });
}

// AWQ: [K, N/8] words of eight outputs in the order 0,2,4,6,1,3,5,7; zero points likewise.
TEST(StoredCodec, Awq) {
  const auto zero = [](int64_t p, int64_t g) {
    return static_cast<uint32_t>((p * 5 + g * 3 + 2) % 16);
  };
  const auto codes =
      write_grid(24, 96, DType::i32, PackAxis::rows, 8, true, PackOrder::awq, int4_code);
  const auto zeros = write_grid(24, 3, DType::i32, PackAxis::rows, 8, true, PackOrder::awq, zero);
  const auto scales = write_plain(24, 3, DType::f16, true, [](int64_t p, int64_t g) {
    return uint32_t{f32_to_f16(0.25f * static_cast<float>(p + 1) + static_cast<float>(g))};
  });
  StoredMatrix m;
  m.rows = 24;
  m.cols = 96;
  m.scheme = {WeightFormat::int4_group, 32, true};
  m.codes = codes.grid;
  m.scales = {scales.grid, 1, 32};
  m.zeros = {zeros.grid, 1, 32};
  expect_values(m, [&](int64_t p, int64_t q) {
    const float scale = 0.25f * static_cast<float>(p + 1) + static_cast<float>(q / 32);
    return (static_cast<float>(int4_code(p, q)) - static_cast<float>(zero(p, q / 32))) * scale;
  });
  EXPECT_EQ(zero_at(m, 7, 40), static_cast<int32_t>(zero(7, 1)));
  // Word 0 of input 0, spelled out.
  uint32_t word;
  std::memcpy(&word, codes.grid.data, 4);
  EXPECT_EQ(word >> 4 & 15, int4_code(2, 0));
  EXPECT_EQ(code_at(m, 1, 0), word >> 16 & 15);
}

// GPTQ: [K/8, N] words of eight inputs, zero points minus one, group of each input from a table.
TEST(StoredCodec, GptqWithActOrder) {
  const auto stored_zero = [](int64_t p, int64_t g) {
    return static_cast<uint32_t>((p + g * 7) % 15);
  };
  const auto codes =
      write_grid(16, 64, DType::i32, PackAxis::cols, 8, true, PackOrder::sequential, int4_code);
  const auto zeros =
      write_grid(16, 4, DType::i32, PackAxis::rows, 8, true, PackOrder::sequential, stored_zero);
  const auto scales = write_plain(16, 4, DType::f32, true, f32_scale_bits);
  std::vector<int32_t> group(64);
  for (size_t q = 0; q < 64; ++q) group[q] = static_cast<int32_t>((q * 5 + q / 7) % 4);
  StoredMatrix m;
  m.rows = 16;
  m.cols = 64;
  m.scheme = {WeightFormat::int4_group, 16, true};
  m.codes = codes.grid;
  m.scales = {scales.grid, 1, 16};
  m.zeros = {zeros.grid, 1, 16};
  for (int32_t offset : {1, 0}) {
    for (const int32_t* table :
         {static_cast<const int32_t*>(group.data()), static_cast<const int32_t*>(nullptr)}) {
      m.zero_offset = offset;
      m.group_index = table;
      expect_values(m, [&](int64_t p, int64_t q) {
        const int64_t g = table != nullptr ? table[q] : q / 16;
        const auto zero = static_cast<float>(stored_zero(p, g) + static_cast<uint32_t>(offset));
        return (static_cast<float>(int4_code(p, q)) - zero) * f32_scale(p, g);
      });
    }
  }
}

TEST(StoredCodec, Vectors) {
  const float values[] = {1.0f, 2.0f, 3.0f, 4.0f, 5.0f};
  StoredVector v{reinterpret_cast<const std::byte*>(values), DType::f32, 2, 1, 2};
  EXPECT_EQ(element(v, 0), 2.0f);
  EXPECT_EQ(element(v, 1), 4.0f);
  const uint16_t halves[] = {0x3f80, 0xc000};
  v = {reinterpret_cast<const std::byte*>(halves), DType::bf16, 2, 0, 1};
  EXPECT_EQ(element(v, 1), -2.0f);
  v.dtype = DType::f16;
  EXPECT_EQ(element(v, 1), -2.0f);
  EXPECT_EQ(element(v, 0), f16_to_f32(0x3f80));
}

}  // namespace
}  // namespace moekit::quant
