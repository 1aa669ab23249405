// Quantizers, combine: bit for bit against the host's definitions.
#include <algorithm>

#include "kernels/smxx_moe/api.h"
#include "quant/row_codec.h"
#include "quant/row_format.h"
#include "reduce/weight_and_reduce.h"
#include "tests/cuda/gpu.h"

namespace moekit::testing {
namespace {

namespace rows = kernels::smxx_moe;

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

// What a chain relies on: beside the index, rows are read after whatever wrote them, and what
// follows comes after the index too.
TEST(Quantize, BesideTheIndexReadsWhatCameBefore) {
  MOEKIT_NEEDS_GPU(80);
  const int64_t tokens = 64, width = 2048, rounds = 24;
  const int32_t experts = 32;
  Random random(11);
  const RowFormat format = RowFormat::of(ActivationFormat::fp8_block, width);
  DeviceArray<float> hidden(tokens * width), ones(std::vector<float>(tokens, 1.0f));
  const std::vector<int32_t> zeros(tokens, 0);
  DeviceArray<int32_t> zero_ids(zeros), live(std::vector<int32_t>{static_cast<int32_t>(tokens)});
  std::vector<int32_t> ids(tokens);
  for (auto& id : ids) id = static_cast<int32_t>(random.below(experts));
  DeviceArray<int32_t> device_ids(ids), offsets(experts + 1), row_slot(tokens), row_token(tokens),
      slot_row(tokens), num_rows(1);
  rows::Index index;
  index.expert_offsets = offsets.data();
  index.row_slot = row_slot.data();
  index.row_token = row_token.data();
  index.slot_row = slot_row.data();
  index.num_rows = num_rows.data();
  rows::QuantizedRows out;
  out.scheme.format = ActivationFormat::fp8_block;
  out.width = width;
  out.row_bytes = out.scale_row_bytes = format.record_bytes;
  // One buffer of codes in all rounds, as a layer has; sorted rows of each round are kept.
  DeviceArray<uint8_t> records(tokens * format.record_bytes);
  out.codes = records.data();
  out.scales = records.data() + format.scale_offset;
  std::vector<DeviceArray<float>> sources;
  std::vector<DeviceArray<uint8_t>> sorted;
  std::vector<std::vector<float>> x(rounds, std::vector<float>(tokens * width));
  for (auto& values : x) {
    for (auto& v : values) v = random.normal();
    sources.emplace_back(values);
    sorted.emplace_back(tokens * format.record_bytes);
  }
  const device::Stream stream;
  device::check_cuda(cudaDeviceSynchronize(), "uploads");  // the stream does not wait for them
  for (int64_t i = 0; i < rounds; ++i) {
    // combine_rows() with one slot of weight 1 copies.
    device::check_cuda(rows::combine_rows(sources[i].data(), rows::RowType::f32, zero_ids.data(),
                                          ones.data(), tokens, nullptr, 1, 1, width,
                                          rows::RowType::f32, hidden.data(), stream.get(), true),
                       "copy");
    device::check_cuda(rows::build_index(device_ids.data(), tokens, nullptr, 1, experts, index,
                                         stream.get(), true),
                       "index");
    device::check_cuda(rows::quantize_rows(hidden.data(), rows::RowType::f32, width * 4, tokens,
                                           live.data(), out, stream.get(), true, true),
                       "quantize");
    device::check_cuda(rows::spread_rows(records.data(), format.record_bytes, tokens, live.data(),
                                         index.slot_row, 1, sorted[i].data(), stream.get(), true),
                       "spread");
  }
  std::vector<std::byte> expected(format.record_bytes);
  for (int64_t i = 0; i < rounds; ++i) {
    const auto got = sorted[i].get();
    // Rows of an expert keep no order: each is looked for.
    for (int64_t t = 0; t < tokens; ++t) {
      quant::encode_row(out.scheme, 1.0f, x[i].data() + t * width, width, expected.data());
      int64_t found = 0;
      for (int64_t r = 0; r < tokens; ++r) {
        found += std::memcmp(got.data() + r * format.record_bytes, expected.data(),
                             static_cast<size_t>(format.record_bytes)) == 0;
      }
      ASSERT_EQ(found, 1) << "round " << i << ", token " << t;
    }
  }
}

TEST(Spread, RowsGoWhereTheIndexSays) {
  MOEKIT_NEEDS_GPU(80);
  const int64_t tokens = 21, live = 19, width = 24;  // in 2 bytes
  const int32_t slots = 3;
  Random random(14);
  const std::vector<uint16_t> x = random_bf16(tokens * width, 1.0f, random);
  std::vector<int32_t> slot_row(tokens * slots);
  int32_t num_rows = 0;
  for (auto& row : slot_row) row = random.below(4) == 0 ? -1 : num_rows++;
  const DeviceArray<uint16_t> from(x);
  const DeviceArray<int32_t> where(slot_row), count(std::vector<int32_t>{live});
  const std::vector<uint16_t> untouched(num_rows * width, 0x7fc1);
  DeviceArray<uint16_t> to(untouched);
  device::check_cuda(rows::spread_rows(from.data(), width * 2, tokens, count.data(), where.data(),
                                       slots, to.data(), nullptr),
                     "spread");
  const auto got = to.get();
  for (int64_t s = 0; s < tokens * slots; ++s) {
    if (slot_row[s] < 0) continue;
    const int64_t t = s / slots;
    const uint16_t* expected = t < live ? x.data() + t * width : untouched.data();
    EXPECT_EQ(std::memcmp(got.data() + slot_row[s] * width, expected, width * 2), 0) << s;
  }
}

TEST(Quantize, RowsGoWhereTheIndexSays) {
  MOEKIT_NEEDS_GPU(80);
  const int64_t tokens = 19, width = 416;
  const int32_t slots = 3;
  Random random(12);
  std::vector<float> x(tokens * width);
  for (auto& v : x) v = random.normal();
  std::fill_n(x.begin() + 2 * width, width, 1e-30f);  // divided without the shared reciprocal
  std::fill_n(x.begin() + 5 * width, 7, -0.0f);
  x[7 * width + 200] = std::nanf("");
  // Sorted rows in reverse; some slots have none.
  std::vector<int32_t> slot_row(tokens * slots);
  int32_t num_rows = 0;
  for (auto& row : slot_row) row = random.below(4) == 0 ? -1 : num_rows++;
  for (auto& row : slot_row) row = row < 0 ? -1 : num_rows - 1 - row;
  const RowFormat format = RowFormat::of(ActivationFormat::fp8_block, width);
  const std::vector<uint8_t> blank(num_rows * format.record_bytes, 0xee);
  DeviceArray<uint8_t> records(blank);
  DeviceArray<float> device_x(x);
  DeviceArray<int32_t> device_slot_row(slot_row);
  rows::QuantizedRows out;
  out.scheme.format = ActivationFormat::fp8_block;
  out.width = width;
  out.codes = records.data();
  out.scales = records.data() + format.scale_offset;
  out.row_bytes = out.scale_row_bytes = format.record_bytes;
  out.slot_row = device_slot_row.data();
  out.slots = slots;
  device::check_cuda(rows::quantize_rows(device_x.data(), rows::RowType::f32, width * 4, tokens,
                                         nullptr, out, nullptr),
                     "quantize");
  const auto got = records.get();
  std::vector<std::byte> expected(format.record_bytes);
  for (int64_t t = 0; t < tokens; ++t) {
    if (t == 7) continue;  // NaN codes may differ in their payload
    quant::encode_row(out.scheme, 1.0f, x.data() + t * width, width, expected.data());
    for (int32_t j = 0; j < slots; ++j) {
      const int32_t row = slot_row[t * slots + j];
      if (row < 0) continue;
      EXPECT_EQ(std::memcmp(got.data() + row * format.record_bytes, expected.data(),
                            static_cast<size_t>(format.scale_offset + (width + 127) / 128 * 4)),
                0)
          << "token " << t << ", slot " << j;
    }
  }
}

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
