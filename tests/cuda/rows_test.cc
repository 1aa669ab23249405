// Index, quantizers, combine: bit for bit against the host's definitions.
#include <algorithm>
#include <array>

#include "kernels/smxx_moe/api.h"
#include "quant/row_codec.h"
#include "quant/row_format.h"
#include "reduce/weight_and_reduce.h"
#include "tests/cuda/gpu.h"

namespace moekit::testing {
namespace {

namespace rows = kernels::smxx_moe;

struct IndexCase {
  const char* name;
  int64_t tokens;
  int32_t top_k;
  int32_t experts;
  int hot;  // percent of slots that go to the last expert
};

class IndexTest : public ::testing::TestWithParam<IndexCase> {};

TEST_P(IndexTest, SortsAndCutsEveryRowOnce) {
  MOEKIT_NEEDS_GPU(80);
  const IndexCase c = GetParam();
  Random random(7);
  const int64_t slots = c.tokens * c.top_k;
  std::vector<int32_t> ids(slots);
  int32_t bad = 0;
  for (auto& id : ids) {
    const int64_t draw = random.below(100);
    id = draw < c.hot ? c.experts - 1 : static_cast<int32_t>(random.below(c.experts));
    if (draw == 99) id = -1;
    if (draw == 98) id = c.experts + 5, ++bad;
  }
  rows::Index index;
  DeviceArray<int32_t> device_ids(ids), offsets(c.experts + 1), row_slot(slots), row_token(slots),
      slot_row(slots), counts(4);
  index.expert_offsets = offsets.data();
  index.row_slot = row_slot.data();
  index.row_token = row_token.data();
  index.slot_row = slot_row.data();
  index.num_rows = counts.data();
  index.dropped = counts.data() + 1;
  DeviceArray<int32_t> chunks(rows::chunk_count(slots) * c.experts), pairs(2 * (c.experts + 1)),
      ticket(std::vector<int32_t>{0, 0});
  index.chunk_counts = chunks.data();
  index.pair_offsets = pairs.data();
  index.ticket = ticket.data();
  index.shapes[0] = {128, 5, 4};
  index.shapes[1] = {64, 2, 16};
  const int64_t room = rows::task_capacity(index.shapes[0], slots, c.experts) +
                       rows::task_capacity(index.shapes[1], slots, c.experts);
  DeviceArray<kernels::TileTask> tasks(room);
  index.tasks[0] = tasks.data();
  index.tasks[1] = tasks.data() + rows::task_capacity(index.shapes[0], slots, c.experts);
  index.num_tasks[0] = counts.data() + 2;
  index.num_tasks[1] = counts.data() + 3;
  device::check_cuda(
      rows::build_index(device_ids.data(), c.tokens, nullptr, c.top_k, c.experts, index, nullptr),
      "index");
  const auto got_offsets = offsets.get(), got_slots = row_slot.get(), got_tokens = row_token.get(),
             got_rows = slot_row.get(), got_counts = counts.get();
  EXPECT_EQ(got_counts[1], bad);
  EXPECT_EQ(ticket.get(), (std::vector<int32_t>{0, 0}));
  std::vector<int32_t> expected(c.experts + 1, 0);
  for (const int32_t id : ids) {
    if (id >= 0 && id < c.experts) ++expected[id + 1];
  }
  for (int32_t e = 0; e < c.experts; ++e) expected[e + 1] += expected[e];
  ASSERT_EQ(got_offsets, expected);
  ASSERT_EQ(got_counts[0], expected.back());
  for (int64_t s = 0; s < slots; ++s) {
    if (ids[s] < 0 || ids[s] >= c.experts) {
      ASSERT_EQ(got_rows[s], -1);
      continue;
    }
    const int32_t row = got_rows[s];
    ASSERT_GE(row, expected[ids[s]]);
    ASSERT_LT(row, expected[ids[s] + 1]);
    ASSERT_EQ(got_slots[row], s);
    ASSERT_EQ(got_tokens[row], s / c.top_k);
  }
  const auto got_tasks = tasks.get();
  for (int which = 0; which < 2; ++which) {
    const auto shape = index.shapes[which];
    const auto* list = got_tasks.data() + (index.tasks[which] - index.tasks[0]);
    std::vector<int> covered(static_cast<size_t>(expected.back()) * shape.n_blocks, 0);
    for (int32_t t = 0; t < got_counts[2 + which]; ++t) {
      const auto& task = list[t];
      for (int32_t r = 0; r < task.num_rows; ++r) {
        ASSERT_GE(task.first_row + r, expected[task.expert]);
        ASSERT_LT(task.first_row + r, expected[task.expert + 1]);
        ++covered[static_cast<size_t>(task.first_row + r) * shape.n_blocks + task.n_block];
      }
    }
    ASSERT_TRUE(std::all_of(covered.begin(), covered.end(), [](int n) { return n == 1; }));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, IndexTest,
    ::testing::Values(IndexCase{"one", 1, 8, 128, 0}, IndexCase{"few", 3, 2, 5, 0},
                      IndexCase{"hot", 700, 4, 16, 90}, IndexCase{"many", 5000, 8, 256, 0},
                      IndexCase{"single", 300, 1, 1, 0}, IndexCase{"wide", 900, 2, 2048, 30}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Index, LiveCountBoundsTheCall) {
  MOEKIT_NEEDS_GPU(80);
  const std::vector<int32_t> ids(64, 1);
  DeviceArray<int32_t> device_ids(ids), live(std::vector<int32_t>{5}), out(4 + 64 * 3 + 8);
  DeviceArray<int32_t> scratch(std::vector<int32_t>(32, 0));
  rows::Index index;
  index.num_rows = out.data();
  index.expert_offsets = out.data() + 4;
  index.row_slot = out.data() + 8;
  index.row_token = out.data() + 72;
  index.slot_row = out.data() + 136;
  index.ticket = scratch.data();
  index.chunk_counts = scratch.data() + 8;
  index.pair_offsets = scratch.data() + 16;
  device::check_cuda(rows::build_index(device_ids.data(), 32, live.data(), 2, 3, index, nullptr),
                     "index");
  EXPECT_EQ(out.get()[0], 10);
}

struct QuantCase {
  ActivationScheme scheme;
  float static_scale;
};

class QuantizeTest : public ::testing::TestWithParam<QuantCase> {};

TEST_P(QuantizeTest, RecordsEqualTheHostCodecs) {
  MOEKIT_NEEDS_GPU(80);
  const QuantCase c = GetParam();
  for (const int64_t width : {32, 160, 256, 2880}) {
    const int64_t num_rows = 37;
    Random random(static_cast<uint64_t>(width));
    std::vector<float> x(num_rows * width);
    for (int64_t r = 0; r < num_rows; ++r) {
      const float size = std::exp2(static_cast<float>(random.below(40)) - 20.0f);
      for (int64_t i = 0; i < width; ++i) x[r * width + i] = size * random.normal();
    }
    std::fill_n(x.begin() + 3 * width, width, 0.0f);  // a zero row
    x[4 * width + 17] = std::nanf("");                // one NaN
    x[5 * width + 1] = INFINITY;                      // one infinity
    for (int64_t i = 0; i < width; ++i)
      x[6 * width + i] = 1e-42f * static_cast<float>(i);  // subnormal
    for (int64_t i = 0; i < width; ++i)
      x[7 * width + i] = static_cast<float>(i % 28) * 0.25f;  // ties
    const RowFormat format = RowFormat::of(c.scheme.format, width);
    DeviceArray<float> device_x(x);
    std::vector<uint8_t> blank(num_rows * format.record_bytes, 0);
    DeviceArray<uint8_t> records(blank);
    rows::QuantizedRows out;
    out.scheme = c.scheme;
    out.static_scale = c.static_scale;
    out.width = width;
    out.codes = records.data();
    out.row_bytes = format.record_bytes;
    out.scales = records.data() + format.scale_offset;
    out.scale_row_bytes = format.record_bytes;
    device::check_cuda(rows::quantize_rows(device_x.data(), rows::RowType::f32, width * 4, num_rows,
                                           nullptr, out, nullptr),
                       "quantize");
    const auto got = records.get();
    std::vector<std::byte> expected(format.record_bytes);
    DeviceArray<float> decoded(num_rows * width);
    device::check_cuda(rows::dequantize_rows(out, num_rows, decoded.data(), nullptr), "dequantize");
    const auto got_values = decoded.get();
    std::vector<float> values(width);
    for (int64_t r = 0; r < num_rows; ++r) {
      quant::encode_row(c.scheme, c.static_scale, x.data() + r * width, width, expected.data());
      // NaN codes may differ in their payload, so values decide where a record holds one.
      quant::decode_row(format, expected.data(), values.data());
      const bool nan = std::any_of(values.begin(), values.end(), [](float v) { return v != v; });
      if (!nan) {
        ASSERT_EQ(std::memcmp(got.data() + r * format.record_bytes, expected.data(),
                              static_cast<size_t>(format.record_bytes)),
                  0)
            << "row " << r << ", width " << width;
      }
      for (int64_t i = 0; i < width; ++i) {
        const float v = got_values[r * width + i];
        ASSERT_TRUE(f32_bits(v) == f32_bits(values[i]) || (v != v && values[i] != values[i]))
            << "row " << r << " column " << i << ": " << v << " for " << values[i];
      }
    }
  }
}

ActivationScheme scheme(ActivationFormat format, bool is_static = false,
                        ScaleSense sense = ScaleSense::multiplier, bool ue8m0 = false) {
  return {format, is_static, sense, ue8m0};
}

INSTANTIATE_TEST_SUITE_P(
    Formats, QuantizeTest,
    ::testing::Values(
        QuantCase{scheme(ActivationFormat::fp8_tensor, true), 0.37f},
        QuantCase{scheme(ActivationFormat::fp8_token), 1.0f},
        QuantCase{scheme(ActivationFormat::fp8_token, false, ScaleSense::multiplier, true), 1.0f},
        QuantCase{scheme(ActivationFormat::fp8_block), 1.0f},
        QuantCase{scheme(ActivationFormat::fp8_block, false, ScaleSense::multiplier, true), 1.0f},
        QuantCase{scheme(ActivationFormat::mxfp8), 1.0f},
        QuantCase{scheme(ActivationFormat::mxfp4), 1.0f},
        QuantCase{scheme(ActivationFormat::nvfp4), 1.0f},
        QuantCase{scheme(ActivationFormat::nvfp4, true), 0.0123f},
        QuantCase{scheme(ActivationFormat::nvfp4, true, ScaleSense::divisor), 310.0f}));

TEST(Combine, IsTheSlotOrderedSumBitForBit) {
  MOEKIT_NEEDS_GPU(80);
  const int64_t tokens = 61, width = 264;
  for (const int32_t top_k : {1, 4, 6, 9}) {
    Random random(static_cast<uint64_t>(top_k));
    std::vector<float> y(tokens * top_k * width);
    for (auto& v : y) v = random.normal();
    std::vector<int32_t> ids(tokens * top_k);
    for (auto& id : ids) id = static_cast<int32_t>(random.below(6)) - 1;
    for (int32_t j = 0; j < top_k; ++j) ids[5 * top_k + j] = -1;
    std::vector<float> weights(tokens * top_k);
    for (auto& w : weights) w = random.normal();
    // What slots without an expert hold must not be read.
    for (size_t s = 0; s < ids.size(); ++s) {
      if (ids[s] < 0)
        std::fill_n(y.begin() + static_cast<int64_t>(s) * width, width, std::nanf(""));
    }
    DeviceArray<float> rows_in(y), device_weights(weights), out(tokens * width);
    DeviceArray<int32_t> device_ids(ids);
    device::check_cuda(rows::combine_rows(rows_in.data(), rows::RowType::f32, device_ids.data(),
                                          device_weights.data(), tokens, nullptr, top_k, 5, width,
                                          rows::RowType::f32, out.data(), nullptr),
                       "combine");
    const auto got = out.get();
    std::vector<float> expected(width);
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<const float*> row(top_k);
      for (int32_t j = 0; j < top_k; ++j) {
        const int64_t s = t * top_k + j;
        row[j] = ids[s] < 0 ? nullptr : y.data() + s * width;
      }
      reduce::sum_slots(row.data(), weights.data() + t * top_k, top_k, width, expected.data());
      ASSERT_EQ(std::memcmp(got.data() + t * width, expected.data(), width * 4), 0)
          << "token " << t;
    }
  }
}

}  // namespace
}  // namespace moekit::testing
