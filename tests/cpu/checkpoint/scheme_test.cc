// Quantization schemes written by hand, value by value, in the layouts that tools use and no
// fixture has. Each case packs known codes, scales and zero points itself and expects the exact
// weights.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint_writer.h"
#include "moekit/checkpoint.h"
#include "problem/canonical_layer.h"
#include "quant/stored_codec.h"

namespace moekit {
namespace {

using Weights = std::vector<float>;  // [N, K], row-major

/// Adds the tensors of module `name` to a checkpoint and returns the weights that they mean.
using Encoder = std::function<Weights(TestCheckpoint&, const std::string& name, int64_t n,
                                      int64_t k, uint32_t seed)>;

uint32_t draw(uint32_t seed, int64_t i, uint32_t limit) {
  uint32_t x = seed * 747796405u + static_cast<uint32_t>(i) * 2891336453u + 1u;
  x ^= x >> 16;
  x *= 277803737u;
  x ^= x >> 15;
  return x % limit;
}

/// Words of 32 bits, `per_word` codes each along axis `axis` of [rows, cols]; `order` places them.
TestTensor pack_words(const std::vector<uint32_t>& codes, int64_t rows, int64_t cols, int bits,
                      bool along_rows, bool transpose, const std::vector<int>& order = {}) {
  const int per_word = 32 / bits;
  const int64_t units_r = along_rows ? (rows + per_word - 1) / per_word : rows;
  const int64_t units_c = along_rows ? cols : (cols + per_word - 1) / per_word;
  std::vector<int32_t> words(static_cast<size_t>(units_r * units_c), 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t u = along_rows ? r / per_word : r;
      const int64_t v = along_rows ? c : c / per_word;
      const int inside = static_cast<int>((along_rows ? r : c) % per_word);
      int place = inside;
      for (size_t i = 0; i < order.size(); ++i) {
        if (order[i] == inside) place = static_cast<int>(i);
      }
      const int64_t at = transpose ? v * units_r + u : u * units_c + v;
      words[static_cast<size_t>(at)] |=
          static_cast<int32_t>(codes[static_cast<size_t>(r * cols + c)] << (place * bits));
    }
  }
  std::vector<int64_t> shape = {units_r, units_c};
  if (transpose) std::swap(shape[0], shape[1]);
  return tensor_of(DType::i32, shape, words);
}

struct Integers {
  int bits = 4;
  int64_t group = 32;  // 0: one a row
  bool zeros = false;
  bool act_order = false;
  int64_t groups(int64_t k) const { return group == 0 ? 1 : (k + group - 1) / group; }
};

/// Logical codes, scales and zero points, and what they mean.
struct IntegerMatrix {
  std::vector<uint32_t> codes, zeros;  // [N, K], [N, G], unsigned
  std::vector<float> scales;           // [N, G], exact in f16
  std::vector<int32_t> index;          // [K]
  Weights weights;

  IntegerMatrix(const Integers& spec, int64_t n, int64_t k, uint32_t seed) {
    const int64_t g = spec.groups(k);
    const uint32_t top = 1u << spec.bits;
    for (int64_t i = 0; i < n * k; ++i) codes.push_back(draw(seed, i, top));
    for (int64_t i = 0; i < n * g; ++i) {
      // 1 .. top-1, so that "z - 1" can be stored.
      zeros.push_back(spec.zeros ? 1 + draw(seed + 1, i, top - 1) : top / 2);
      scales.push_back(static_cast<float>(1 + draw(seed + 2, i, 200)) / 256.0f);
    }
    for (int64_t c = 0; c < k; ++c) {
      const int64_t natural = spec.group == 0 ? 0 : c / spec.group;
      index.push_back(static_cast<int32_t>(spec.act_order ? (natural * 7 + c) % g : natural));
    }
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < k; ++c) {
        const auto at = static_cast<size_t>(r * g + index[static_cast<size_t>(c)]);
        const int value =
            static_cast<int>(codes[static_cast<size_t>(r * k + c)]) - static_cast<int>(zeros[at]);
        weights.push_back(static_cast<float>(value) * scales[at]);
      }
    }
  }
};

TestTensor f16_grid(const std::vector<float>& values, int64_t rows, int64_t cols, bool transpose) {
  std::vector<uint16_t> out(values.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      out[static_cast<size_t>(transpose ? c * rows + r : r * cols + c)] =
          f32_to_f16(values[static_cast<size_t>(r * cols + c)]);
    }
  }
  std::vector<int64_t> shape = {rows, cols};
  if (transpose) std::swap(shape[0], shape[1]);
  return tensor_of(DType::f16, shape, out);
}

Encoder pack_quantized(Integers spec) {
  return [spec](TestCheckpoint& ckpt, const std::string& name, int64_t n, int64_t k,
                uint32_t seed) {
    const IntegerMatrix m(spec, n, k, seed);
    const int64_t g = spec.groups(k);
    ckpt.tensors[name + ".weight_packed"] = pack_words(m.codes, n, k, spec.bits, false, false);
    ckpt.tensors[name + ".weight_scale"] = f16_grid(m.scales, n, g, false);
    ckpt.tensors[name + ".weight_shape"] = tensor_of<int64_t>(DType::i64, {2}, {n, k});
    if (spec.zeros) {
      ckpt.tensors[name + ".weight_zero_point"] = pack_words(m.zeros, n, g, spec.bits, true, false);
    }
    if (spec.act_order) ckpt.tensors[name + ".weight_g_idx"] = tensor_of(DType::i32, {k}, m.index);
    return m.weights;
  };
}

Encoder int_quantized() {
  return [](TestCheckpoint& ckpt, const std::string& name, int64_t n, int64_t k, uint32_t seed) {
    std::vector<int8_t> codes;
    std::vector<uint16_t> scales;
    Weights w;
    for (int64_t r = 0; r < n; ++r) {
      const float scale = static_cast<float>(1 + draw(seed + 1, r, 100)) / 64.0f;
      scales.push_back(f32_to_bf16(scale));
      for (int64_t c = 0; c < k; ++c) {
        codes.push_back(static_cast<int8_t>(static_cast<int>(draw(seed, r * k + c, 255)) - 127));
        w.push_back(static_cast<float>(codes.back()) * scale);
      }
    }
    ckpt.tensors[name + ".weight"] = tensor_of(DType::i8, {n, k}, codes);
    ckpt.tensors[name + ".weight_scale"] = tensor_of(DType::bf16, {n, 1}, scales);
    return w;
  };
}

Encoder awq() {
  return [](TestCheckpoint& ckpt, const std::string& name, int64_t n, int64_t k, uint32_t seed) {
    const Integers spec{.bits = 4, .group = 32, .zeros = true};
    const IntegerMatrix m(spec, n, k, seed);
    const int64_t g = spec.groups(k);
    const std::vector<int> order = {0, 2, 4, 6, 1, 3, 5, 7};
    ckpt.tensors[name + ".qweight"] = pack_words(m.codes, n, k, 4, true, true, order);
    ckpt.tensors[name + ".qzeros"] = pack_words(m.zeros, n, g, 4, true, true, order);
    ckpt.tensors[name + ".scales"] = f16_grid(m.scales, n, g, true);
    return m.weights;
  };
}

Encoder gptq(Integers spec, uint32_t stored_below) {
  return [=](TestCheckpoint& ckpt, const std::string& name, int64_t n, int64_t k, uint32_t seed) {
    const IntegerMatrix m(spec, n, k, seed);
    const int64_t g = spec.groups(k);
    std::vector<uint32_t> zeros = m.zeros;
    for (uint32_t& z : zeros) z -= stored_below;
    ckpt.tensors[name + ".qweight"] = pack_words(m.codes, n, k, spec.bits, false, true);
    ckpt.tensors[name + ".qzeros"] = pack_words(zeros, n, g, spec.bits, true, true);
    ckpt.tensors[name + ".scales"] = f16_grid(m.scales, n, g, true);
    ckpt.tensors[name + ".g_idx"] = tensor_of(DType::i32, {k}, m.index);
    return m.weights;
  };
}

Encoder fp8_pb_wo() {
  return [](TestCheckpoint& ckpt, const std::string& name, int64_t n, int64_t k, uint32_t seed) {
    const int64_t bn = (n + 127) / 128;
    const int64_t bk = (k + 127) / 128;
    std::vector<uint8_t> codes;
    std::vector<float> scales;
    for (int64_t i = 0; i < bn * bk; ++i) scales.push_back(static_cast<float>(i + 1) / 8.0f);
    Weights w;
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < k; ++c) {
        codes.push_back(static_cast<uint8_t>(draw(seed, r * k + c, 120)));
        w.push_back(e4m3_to_f32(codes.back()) *
                    scales[static_cast<size_t>(r / 128 * bk + c / 128)]);
      }
    }
    ckpt.tensors[name + ".weight"] = tensor_of(DType::f8_e4m3, {n, k}, codes);
    ckpt.tensors[name + ".weight_scale"] = tensor_of(DType::f32, {bn, 1, bk, 1}, scales);
    return w;
  };
}

Encoder plain_bf16() {
  return [](TestCheckpoint& ckpt, const std::string& name, int64_t n, int64_t k, uint32_t seed) {
    Weights w;
    for (int64_t i = 0; i < n * k; ++i) w.push_back(scatter(seed, i));
    ckpt.tensors[name + ".weight"] = scattered({n, k}, seed);
    return w;
  };
}

constexpr char kInt4Group[] =
    R"("num_bits":4,"type":"int","strategy":"group","group_size":32,"symmetric":)";

std::string compressed_tensors(const std::string& format, const std::string& weights) {
  return R"({"quant_method":"compressed-tensors","format":")" + format +
         R"(","config_groups":{"any_name":{"targets":["re:.*experts.*proj$"],"weights":{)" +
         weights +
         R"(},"input_activations":null}},"ignore":["re:.*gate$"],"quantization_status":"compressed"})";
}

struct Case {
  const char* name;
  std::string quantization;
  Encoder encode;
  WeightScheme scheme;
  ActivationFormat input = ActivationFormat::bf16;
  int64_t hidden = 64;
  int64_t inter = 40;  // not a multiple of the group, on purpose
};

std::vector<Case> cases() {
  using F = WeightFormat;
  const std::string gptq_head = R"({"quant_method":"gptq","bits":)";
  return {
      {"int4_group",
       compressed_tensors("pack-quantized", std::string(kInt4Group) + "true"),
       pack_quantized({}),
       {F::int4_group, 32, false}},
      {"int4_group_zeros",
       compressed_tensors("pack-quantized", std::string(kInt4Group) + "false"),
       pack_quantized({.zeros = true}),
       {F::int4_group, 32, true}},
      {"int4_act_order",
       compressed_tensors("pack-quantized", std::string(kInt4Group) + "true"),
       pack_quantized({.act_order = true}),
       {F::int4_group, 32, false}},
      {"int4_channel",
       compressed_tensors("pack-quantized",
                          R"("num_bits":4,"type":"int","strategy":"channel","symmetric":true)"),
       pack_quantized({.group = 0}),
       {F::int4_channel, 0, false}},
      {"int8_group",
       compressed_tensors(
           "pack-quantized",
           R"("num_bits":8,"type":"int","strategy":"group","group_size":32,"symmetric":true)"),
       pack_quantized({.bits = 8}),
       {F::int8_group, 32, false}},
      {"int8_channel",
       compressed_tensors("int-quantized",
                          R"("num_bits":8,"type":"int","strategy":"channel","symmetric":true)"),
       int_quantized(),
       {F::int8_channel, 0, false}},
      {"awq",
       R"({"quant_method":"awq","bits":4,"group_size":32,"version":"gemm","zero_point":true})",
       awq(),
       {F::int4_group, 32, true},
       ActivationFormat::bf16,
       64,
       64},
      {"gptq_v1",
       gptq_head + R"(4,"group_size":32,"checkpoint_format":"gptq","desc_act":false})",
       gptq({.zeros = true}, 1),
       {F::int4_group, 32, true}},
      {"gptq_v2",
       gptq_head + R"(4,"group_size":32,"checkpoint_format":"gptq_v2"})",
       gptq({.zeros = true}, 0),
       {F::int4_group, 32, true}},
      {"gptq_act_order",
       gptq_head + R"(4,"group_size":32,"desc_act":true})",
       gptq({.zeros = true, .act_order = true}, 1),
       {F::int4_group, 32, true}},
      {"gptq_int8",
       gptq_head + R"(8,"group_size":32})",
       gptq({.bits = 8, .zeros = true}, 1),
       {F::int8_group, 32, true}},
      {"gptq_one_group",
       gptq_head + R"(4,"group_size":-1})",
       gptq({.group = 0, .zeros = true}, 1),
       {F::int4_channel, 0, true}},
      {"fp8_pb_wo",
       R"({"quant_method":"modelopt","quant_algo":"FP8_PB_WO","ignore":["*gate"]})",
       fp8_pb_wo(),
       {F::fp8_block, 0, false},
       ActivationFormat::bf16,
       256,
       384},
      {"fp8_left_plain",
       R"({"quant_method":"fp8","weight_block_size":[128,128],"activation_scheme":"dynamic"})",
       plain_bf16(),
       {F::bf16, 0, false}},
  };
}

TestCheckpoint qwen3(int64_t hidden, int64_t inter, const std::string& quantization) {
  TestCheckpoint ckpt;
  ckpt.config =
      R"({"model_type":"qwen3_moe","num_hidden_layers":1,"num_experts":2,)"
      R"("num_experts_per_tok":1,"norm_topk_prob":true,"hidden_act":"silu","hidden_size":)" +
      std::to_string(hidden) + R"(,"moe_intermediate_size":)" + std::to_string(inter) +
      (quantization.empty() ? "" : ",\"quantization_config\":" + quantization) + "}";
  ckpt.tensors["model.layers.0.mlp.gate.weight"] = scattered({2, hidden}, 99);
  return ckpt;
}

void expect_weights(const StoredMatrix& m, const Weights& expected, const std::string& name) {
  ASSERT_EQ(static_cast<size_t>(m.rows * m.cols), expected.size()) << name;
  std::vector<float> row(static_cast<size_t>(m.cols));
  int64_t wrong = 0;
  for (int64_t r = 0; r < m.rows; ++r) {
    quant::decode_weights(m, r, 0, m.cols, row.data());
    for (int64_t c = 0; c < m.cols; ++c) {
      wrong += row[static_cast<size_t>(c)] != expected[static_cast<size_t>(r * m.cols + c)];
    }
  }
  EXPECT_EQ(wrong, 0) << name << ": of " << expected.size();
}

TEST(Schemes, HandwrittenLayoutsDecodeExactly) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    TestCheckpoint ckpt = qwen3(c.hidden, c.inter, c.quantization);
    std::vector<Weights> expected;
    uint32_t seed = 1;
    for (int e = 0; e < 2; ++e) {
      const std::string expert = "model.layers.0.mlp.experts." + std::to_string(e) + ".";
      expected.push_back(c.encode(ckpt, expert + "gate_proj", c.inter, c.hidden, seed++));
      expected.push_back(c.encode(ckpt, expert + "up_proj", c.inter, c.hidden, seed++));
      expected.push_back(c.encode(ckpt, expert + "down_proj", c.hidden, c.inter, seed++));
    }
    const TempDir dir;
    ckpt.write(dir.path());
    const auto layer = load_canonical(dir.path(), -1);
    EXPECT_EQ(layer->config.gate_up_weights, c.scheme);
    EXPECT_EQ(layer->config.down_weights, c.scheme);
    EXPECT_EQ(layer->config.gate_up_input.format, c.input);
    for (size_t e = 0; e < 2; ++e) {
      expect_weights(layer->experts[e].gate, expected[3 * e], "gate");
      expect_weights(layer->experts[e].up, expected[3 * e + 1], "up");
      expect_weights(layer->experts[e].down, expected[3 * e + 2], "down");
    }
    EXPECT_TRUE(inspect_checkpoint(dir.path()).layers[0].moe);
  }
}

TEST(Schemes, TrivialGroupOrderNeedsNoTable) {
  TestCheckpoint ckpt = qwen3(64, 64, R"({"quant_method":"gptq","bits":4,"group_size":32})");
  for (int e = 0; e < 2; ++e) {
    const std::string expert = "model.layers.0.mlp.experts." + std::to_string(e) + ".";
    for (const char* role : {"gate_proj", "up_proj", "down_proj"}) {
      gptq({.zeros = true}, 1)(ckpt, expert + role, 64, 64, 5);
    }
  }
  const TempDir dir;
  ckpt.write(dir.path());
  EXPECT_EQ(load_canonical(dir.path(), 0)->experts[0].up.group_index, nullptr);
  auto& index = ckpt.tensors["model.layers.0.mlp.experts.1.up_proj.g_idx"];
  index.bytes[4] = std::byte{2};  // two groups: 0 and 1
  ckpt.write(dir.path());
  expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file",
               {"experts.1.up_proj.g_idx", "2"});
}

TEST(Schemes, ActOrderNeedsItsTable) {
  const std::string gptq_config =
      R"({"quant_method":"gptq","bits":4,"group_size":32,"desc_act":true})";
  const std::string packed_config =
      compressed_tensors("pack-quantized", std::string(kInt4Group) + R"(true,"actorder":"group")");
  for (const bool is_gptq : {true, false}) {
    TestCheckpoint ckpt = qwen3(64, 64, is_gptq ? gptq_config : packed_config);
    const Encoder encode =
        is_gptq ? gptq({.zeros = true, .act_order = true}, 1) : pack_quantized({.act_order = true});
    for (int e = 0; e < 2; ++e) {
      const std::string expert = "model.layers.0.mlp.experts." + std::to_string(e) + ".";
      for (const char* role : {"gate_proj", "up_proj", "down_proj"}) {
        encode(ckpt, expert + role, 64, 64, 5);
      }
    }
    const TempDir dir;
    ckpt.write(dir.path());
    EXPECT_NE(load_canonical(dir.path(), 0)->experts[1].up.group_index, nullptr);
    const std::string table =
        std::string("model.layers.0.mlp.experts.1.up_proj.") + (is_gptq ? "g_idx" : "weight_g_idx");
    ASSERT_EQ(ckpt.tensors.erase(table), 1u);
    ckpt.write(dir.path());
    expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file", {table});
  }
}

// ---- NVFP4: multiplier against divisor, gate against up

/// The same codes and block scales with each tool's global scale.
TestCheckpoint nvfp4(bool divisor, float gate_global, float up_global) {
  TestCheckpoint ckpt = qwen3(
      64, 32,
      divisor
          ? R"({"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized","config_groups":)"
            R"({"g":{"targets":["Linear"],"weights":{"num_bits":4,"type":"float","strategy":)"
            R"("tensor_group","group_size":16},"input_activations":null}},"ignore":["re:.*\\.gate$"]})"
          : R"({"quant_method":"modelopt","quant_algo":"W4A16_NVFP4","ignore":["*.gate"]})");
  for (int e = 0; e < 2; ++e) {
    for (const auto& [role, global] :
         {std::pair{"gate_proj", gate_global}, {"up_proj", up_global}, {"down_proj", up_global}}) {
      const bool down = std::string(role) == "down_proj";
      const int64_t n = down ? 64 : 32;
      const int64_t k = down ? 32 : 64;
      const std::string name = "model.layers.0.mlp.experts." + std::to_string(e) + "." + role;
      std::vector<uint8_t> codes, scales;
      for (int64_t i = 0; i < n * k / 2; ++i)
        codes.push_back(static_cast<uint8_t>(draw(7, i, 256)));
      for (int64_t i = 0; i < n * k / 16; ++i)
        scales.push_back(static_cast<uint8_t>(draw(8, i, 120)));
      ckpt.tensors[name + (divisor ? ".weight_packed" : ".weight")] =
          tensor_of(DType::u8, {n, k / 2}, codes);
      ckpt.tensors[name + ".weight_scale"] = tensor_of(DType::f8_e4m3, {n, k / 16}, scales);
      const float stored = divisor ? 1.0f / global : global;
      ckpt.tensors[name + (divisor ? ".weight_global_scale" : ".weight_scale_2")] =
          divisor ? tensor_of<float>(DType::f32, {1}, {stored})
                  : tensor_of<float>(DType::f32, {}, {stored});
    }
  }
  return ckpt;
}

TEST(Schemes, GlobalScaleFollowsTheFormatNotTheSize) {
  const TempDir a, b;
  nvfp4(true, 0x1p-12f, 0x1p-12f).write(a.path());
  nvfp4(false, 0x1p-12f, 0x1p-12f).write(b.path());
  const auto divided = load_canonical(a.path(), 0);
  const auto multiplied = load_canonical(b.path(), 0);
  EXPECT_EQ(divided->experts[0].up.global, 4096.0f);
  EXPECT_EQ(multiplied->experts[0].up.global, 0x1p-12f);
  std::vector<float> x(64), y(64);
  for (int64_t r = 0; r < 32; ++r) {
    quant::decode_weights(divided->experts[1].up, r, 0, 64, x.data());
    quant::decode_weights(multiplied->experts[1].up, r, 0, 64, y.data());
    EXPECT_EQ(x, y) << "row " << r;
  }
}

TEST(Schemes, GateAndUpKeepTheirOwnGlobals) {
  for (const auto& [gate, up] : {std::pair{1.0f, 1.0f}, {1.0f, 2.0f}, {10.0f, 1.0f}}) {
    const TempDir dir;
    nvfp4(false, gate, up).write(dir.path());
    const auto layer = load_canonical(dir.path(), 0);
    EXPECT_EQ(layer->experts[0].gate.global, gate);
    EXPECT_EQ(layer->experts[0].up.global, up);
  }
}

TEST(Schemes, BadGlobalsAreRefused) {
  for (const float bad : {0.0f, -1.0f, INFINITY, NAN}) {
    TestCheckpoint ckpt = nvfp4(true, 1.0f, 1.0f);
    ckpt.tensors["model.layers.0.mlp.experts.0.up_proj.weight_global_scale"] =
        tensor_of<float>(DType::f32, {1}, {bad});
    const TempDir dir;
    ckpt.write(dir.path());
    expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file",
                 {"experts.0.up_proj.weight_global_scale", "scale"});
  }
}

TEST(Schemes, AMissingScaleOfAQuantizedWeightIsAnError) {
  for (const bool divisor : {true, false}) {
    TestCheckpoint ckpt = nvfp4(divisor, 1.0f, 1.0f);
    const std::string name = std::string("model.layers.0.mlp.experts.1.up_proj.") +
                             (divisor ? "weight_global_scale" : "weight_scale_2");
    ckpt.tensors.erase(name);
    const TempDir dir;
    ckpt.write(dir.path());
    expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file", {"missing", name});
    expect_error([&] { inspect_checkpoint(dir.path()); }, "corrupt_file", {"missing", name});
  }
}

TEST(Schemes, AScaleBesideNothingIsAnError) {
  TestCheckpoint ckpt = nvfp4(false, 1.0f, 1.0f);
  ckpt.tensors["model.layers.0.mlp.experts.1.up_proj.input_scale"] =
      tensor_of<float>(DType::f32, {}, {1});
  const TempDir dir;
  ckpt.write(dir.path());
  expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file",
               {"unknown", "experts.1.up_proj.input_scale"});
}

TEST(Schemes, WhatIsNotCoveredIsSaid) {
  const std::string w8 = R"("num_bits":8,"type":"int","strategy":"channel","symmetric":true)";
  const std::string w8a8 =
      R"({"quant_method":"compressed-tensors","format":"int-quantized","config_groups":{"g":{"targets":)"
      R"(["Linear"],"weights":{)" +
      w8 +
      R"(},"input_activations":{"num_bits":8,"type":"int","strategy":"token","dynamic":true}}}})";
  const std::vector<std::pair<std::string, std::string>> refused = {
      {w8a8, "8-bit int activations"},
      {compressed_tensors("marlin-24", w8), "marlin-24"},
      {compressed_tensors("pack-quantized", R"("num_bits":3,"type":"int","strategy":"channel")"),
       "3-bit"},
      {R"({"quant_method":"bitsandbytes"})", "bitsandbytes"},
      {R"({"quant_method":"modelopt","quant_algo":"W4A8_AWQ"})", "W4A8_AWQ"},
      {R"({"quant_method":"fp8","activation_scheme":"static","weight_block_size":[128,128]})",
       "static"},
      {R"({"quant_method":"fp8","weight_block_size":[64,64]})", "128x128"},
      {R"({"quant_method":"gptq","bits":3,"group_size":32})", "3 bits"},
      {R"({"quant_method":"awq","bits":4,"group_size":32,"version":"gemv"})", "gemv"},
      {R"({"quant_method":"mxfp4"})", "qwen3_moe quantized by mxfp4"},
  };
  for (const auto& [quantization, part] : refused) {
    const TempDir dir;
    qwen3(64, 32, quantization).write(dir.path());
    expect_error([&] { load_canonical(dir.path(), 0); }, "unsupported", {part});
  }
}

TEST(Schemes, MixedSchemesOfOneRoleAreNotCovered) {
  TestCheckpoint ckpt = qwen3(
      64, 32,
      R"({"quant_method":"modelopt","quant_algo":"FP8_PB_WO","ignore":["*gate","*experts.1.up_proj"]})");
  for (int e = 0; e < 2; ++e) {
    const std::string expert = "model.layers.0.mlp.experts." + std::to_string(e) + ".";
    fp8_pb_wo()(ckpt, expert + "gate_proj", 32, 64, 1);
    (e == 0 ? fp8_pb_wo() : plain_bf16())(ckpt, expert + "up_proj", 32, 64, 2);
    fp8_pb_wo()(ckpt, expert + "down_proj", 64, 32, 3);
  }
  const TempDir dir;
  ckpt.write(dir.path());
  expect_error([&] { load_canonical(dir.path(), 0); }, "unsupported",
               {"one scheme", "experts.1.up_proj"});
}

}  // namespace
}  // namespace moekit
