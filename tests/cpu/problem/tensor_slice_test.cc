// Slices of storages that checkpoints have: packed along inputs or outputs, act order, interleaved
// halves. A slice's elements are the whole's.
#include "problem/tensor_slice.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "moekit/error.h"
#include "quant/stored_codec.h"
#include "tensor/rng.h"

namespace moekit {
namespace {

constexpr int64_t kWidth = 64, kInter = 192, kGroup = 32;

/// Memory that the views of a test point into.
class Storage {
 public:
  const std::byte* random(int64_t bytes) {
    std::vector<std::byte>& block = blocks_.emplace_back(static_cast<size_t>(bytes));
    const Rng rng(blocks_.size(), 5);
    for (size_t i = 0; i < block.size(); ++i) block[i] = std::byte(rng.below(i, 256));
    return block.data();
  }
  const std::byte* floats(int64_t count) {
    std::vector<std::byte>& block = blocks_.emplace_back(static_cast<size_t>(count) * 4);
    const Rng rng(blocks_.size(), 6);
    for (int64_t i = 0; i < count; ++i) {
      const float value = 0.5f + rng.uniform(static_cast<uint64_t>(i));
      std::memcpy(block.data() + i * 4, &value, 4);
    }
    return block.data();
  }

 private:
  std::vector<std::vector<std::byte>> blocks_;
};

/// int4 groups of 32 with zero points, as AWQ (all packed along outputs) or GPTQ (codes along
/// inputs) lays them out: inputs outside.
StoredMatrix int4_matrix(Storage& storage, int64_t rows, int64_t cols, bool awq) {
  StoredMatrix m;
  m.rows = rows;
  m.cols = cols;
  m.scheme = {WeightFormat::int4_group, kGroup, true};
  const int64_t groups = cols / kGroup;
  m.codes.data = storage.random(rows * cols / 2);
  m.codes.unit = DType::i32;
  m.codes.pack = 8;
  m.codes.pack_axis = awq ? PackAxis::rows : PackAxis::cols;
  m.codes.order = awq ? PackOrder::awq : PackOrder::sequential;
  m.codes.row_stride = 4;
  m.codes.col_stride = awq ? rows / 8 * 4 : rows * 4;
  m.scales = {{storage.floats(groups * rows), DType::f32, PackAxis::none, PackOrder::sequential, 1,
               4, rows * 4},
              1,
              kGroup};
  m.zeros = {{storage.random(groups * rows / 2), DType::i32, PackAxis::rows,
              awq ? PackOrder::awq : PackOrder::sequential, 8, 4, rows / 8 * 4},
             1,
             kGroup};
  return m;
}

/// bf16, rows of gate and up in turns.
StoredMatrix interleaved(const std::byte* data, int64_t half) {
  StoredMatrix m;
  m.rows = kInter;
  m.cols = kWidth;
  m.row_first = half;
  m.row_step = 2;
  m.codes = {data, DType::bf16, PackAxis::none, PackOrder::sequential, 1, kWidth * 2, 2};
  return m;
}

CanonicalLayer layer_of(const StoredExpert& expert) {
  CanonicalLayer layer;
  layer.config.num_experts = 1;
  layer.config.top_k = 1;
  layer.config.hidden = kWidth;
  layer.config.inter = kInter;
  layer.config.has_down_bias = !expert.down_bias.empty();
  layer.experts = {expert};
  return layer;
}

std::vector<float> decode(const StoredMatrix& m, int64_t row, int64_t first, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  quant::decode_weights(m, row, first, count, values.data());
  return values;
}

void expect_parts(const CanonicalLayer& whole, const ActivationScheme& input, int tp_size) {
  const StoredExpert& w = whole.experts[0];
  int64_t covered = 0;
  for (int tp = 0; tp < tp_size; ++tp) {
    const TensorSlice slice = tensor_slice(whole, input, tp_size, tp);
    EXPECT_EQ(slice.first, covered);
    covered += slice.count;
    const CanonicalLayer part = slice_layer(whole, slice, tp);
    const StoredExpert& p = part.experts[0];
    for (const auto matrix : {&StoredExpert::gate, &StoredExpert::up}) {
      ASSERT_EQ((p.*matrix).rows, slice.count);
      for (int64_t n = 0; n < slice.count; ++n) {
        ASSERT_EQ(decode(p.*matrix, n, 0, kWidth), decode(w.*matrix, slice.first + n, 0, kWidth));
      }
    }
    ASSERT_EQ(p.down.cols, slice.count);
    for (int64_t n = 0; n < kWidth; ++n) {
      ASSERT_EQ(decode(p.down, n, 0, slice.count), decode(w.down, n, slice.first, slice.count))
          << "row " << n << " of slice " << tp;
    }
  }
  EXPECT_EQ(covered, kInter);
}

TEST(TensorSlice, AwqAndGptq) {
  for (const bool awq : {true, false}) {
    Storage storage;
    StoredExpert expert;
    expert.gate = int4_matrix(storage, kInter, kWidth, awq);
    expert.up = int4_matrix(storage, kInter, kWidth, awq);
    expert.down = int4_matrix(storage, kWidth, kInter, awq);
    const CanonicalLayer layer = layer_of(expert);
    EXPECT_EQ(slice_granule(layer, {}), kGroup);
    for (const int tp : {2, 3, 4, 6}) expect_parts(layer, {}, tp);
    EXPECT_THROW(tensor_slice(layer, {}, 7, 0), Error);
  }
}

TEST(TensorSlice, ActOrderFollowsTheColumns) {
  Storage storage;
  StoredExpert expert;
  expert.gate = int4_matrix(storage, kInter, kWidth, false);
  expert.up = int4_matrix(storage, kInter, kWidth, false);
  expert.down = int4_matrix(storage, kWidth, kInter, false);
  std::vector<int32_t> groups(kInter);
  for (size_t i = 0; i < groups.size(); ++i) groups[i] = static_cast<int32_t>(i * 5 % 6);
  expert.down.group_index = groups.data();
  const CanonicalLayer layer = layer_of(expert);
  EXPECT_EQ(slice_granule(layer, {}), 8) << "whole words of codes";
  for (const int tp : {2, 5, 24}) expect_parts(layer, {}, tp);
}

TEST(TensorSlice, InterleavedHalvesAndBiases) {
  Storage storage;
  const std::byte* stacked = storage.random(2 * kInter * kWidth * 2);
  StoredExpert expert;
  expert.gate = interleaved(stacked, 0);
  expert.up = interleaved(stacked, 1);
  expert.down = interleaved(storage.random(kInter * kWidth * 2), 0);
  expert.down.rows = kWidth;
  expert.down.cols = kInter;
  expert.down.row_step = 1;
  expert.down.codes.row_stride = kInter * 2;
  const std::byte* biases = storage.floats(2 * kInter);
  expert.gate_bias = {biases, DType::f32, kInter, 0, 2};
  expert.up_bias = {biases, DType::f32, kInter, 1, 2};
  expert.down_bias = {storage.floats(kWidth), DType::f32, kWidth, 0, 1};
  CanonicalLayer layer = layer_of(expert);
  for (auto matrix : {&StoredExpert::gate, &StoredExpert::up, &StoredExpert::down}) {
    // Random bytes hold NaN: take the exponents' top bit away.
    StoredMatrix& m = layer.experts[0].*matrix;
    auto* bytes = const_cast<std::byte*>(m.codes.data);
    for (int64_t i = 1; i < kInter * kWidth * 2; i += 2) bytes[i] &= std::byte{0xbf};
  }
  auto* rest = const_cast<std::byte*>(stacked);
  for (int64_t i = 1; i < 2 * kInter * kWidth * 2; i += 2) rest[i] &= std::byte{0xbf};
  expect_parts(layer, {}, 5);
  const TensorSlice slice = tensor_slice(layer, {}, 3, 1);
  EXPECT_EQ(slice, (TensorSlice{64, 64}));
  const CanonicalLayer first = slice_layer(layer, tensor_slice(layer, {}, 3, 0), 0);
  const CanonicalLayer second = slice_layer(layer, slice, 1);
  for (int64_t n = 0; n < slice.count; ++n) {
    EXPECT_EQ(quant::element(second.experts[0].up_bias, n),
              quant::element(layer.experts[0].up_bias, 64 + n));
    EXPECT_EQ(quant::element(second.experts[0].gate_bias, n),
              quant::element(layer.experts[0].gate_bias, 64 + n));
  }
  EXPECT_FALSE(first.experts[0].down_bias.empty());
  EXPECT_TRUE(second.experts[0].down_bias.empty());
  EXPECT_TRUE(first.config.has_down_bias);
  EXPECT_FALSE(second.config.has_down_bias);
}

TEST(TensorSlice, BlocksOfWeightsAndActivationsStayWhole) {
  Storage storage;
  StoredExpert expert;
  for (auto matrix : {&StoredExpert::gate, &StoredExpert::up, &StoredExpert::down}) {
    StoredMatrix& m = expert.*matrix;
    const bool down = matrix == &StoredExpert::down;
    m.rows = down ? kWidth : kInter;
    m.cols = down ? kInter : kWidth;
    m.codes = {storage.random(kInter * kWidth),
               DType::f8_e4m3,
               PackAxis::none,
               PackOrder::sequential,
               1,
               m.cols,
               1};
  }
  CanonicalLayer layer = layer_of(expert);
  using F = ActivationFormat;
  EXPECT_EQ(slice_granule(layer, {F::bf16}), 1);
  EXPECT_EQ(slice_granule(layer, {F::fp8_block}), 128);
  EXPECT_EQ(slice_granule(layer, {F::mxfp8}), 32);
  EXPECT_EQ(slice_granule(layer, {F::nvfp4, true}), 16);
  layer.experts[0].up.scales = {{storage.floats(4), DType::f32}, 128, 128};
  EXPECT_EQ(slice_granule(layer, {F::bf16}), 128) << "rows of up share scales too";
  layer.experts[0].up.row_step = 2;
  EXPECT_EQ(slice_granule(layer, {F::bf16}), 64) << "half of a block's rows are the other half's";
  layer.experts[0].down.scales = {{storage.floats(4), DType::f32}, 1, 48};
  EXPECT_EQ(slice_granule(layer, {F::bf16}), 192);
}

TEST(TensorSlice, ScalesOfWholeRowsAreRefusedWithAWayOut) {
  CanonicalLayer layer = layer_of({});
  using F = ActivationFormat;
  for (const ActivationScheme& input :
       {ActivationScheme{F::fp8_token}, ActivationScheme{F::nvfp4}}) {
    try {
      tensor_slice(layer, input, 2, 0);
      ADD_FAILURE() << to_string(input.format);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::unsupported);
      EXPECT_NE(std::string(e.what()).find("or tp = 1"), std::string::npos) << e.what();
    }
    EXPECT_EQ(tensor_slice(layer, input, 1, 0), (TensorSlice{0, kInter}));
  }
}

}  // namespace
}  // namespace moekit
