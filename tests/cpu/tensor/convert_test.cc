#include "tensor/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "moekit/error.h"
#include "tensor/float_formats.h"

namespace moekit {
namespace {

const std::vector<float> kRow = {0.0f, -1.5f, 3.140625f, 1e-6f, -65504.0f, 1e30f};

template <typename Stored>
void round_trip(DType dtype, uint16_t (*encode)(float), float (*decode)(uint16_t)) {
  const auto width = static_cast<int64_t>(kRow.size());
  std::vector<Stored> data(3 * 2 * kRow.size(), Stored{7});
  TensorView view = TensorView::contiguous(data.data(), dtype, {3, width});
  view.strides = {2 * width, 2};  // every other element of a wider row
  store_row_f32(view, 1, kRow.data());
  std::vector<float> back(kRow.size());
  load_row_f32(view, 1, back.data());
  for (size_t i = 0; i < kRow.size(); ++i) {
    EXPECT_EQ(back[i], decode(encode(kRow[i])));
    EXPECT_EQ(data[2 * kRow.size() + 2 * i + 1], Stored{7});  // gaps are left alone
  }
  EXPECT_EQ(data[0], Stored{7});
  EXPECT_EQ(data[4 * kRow.size()], Stored{7});
}

TEST(Convert, HalvesWithStrides) {
  round_trip<uint16_t>(DType::bf16, f32_to_bf16, bf16_to_f32);
  round_trip<uint16_t>(DType::f16, f32_to_f16, f16_to_f32);
}

TEST(Convert, F32BothWaysAndF64Rounded) {
  std::vector<float> data(12);
  TensorView view = TensorView::contiguous(data.data(), DType::f32, {2, 6});
  store_row_f32(view, 1, kRow.data());
  std::vector<float> back(6);
  load_row_f32(view, 1, back.data());
  EXPECT_EQ(back, kRow);
  TensorView column = view;  // transposed: [6, 2]
  column.shape = {6, 2};
  column.strides = {1, 6};
  load_row_f32(column, 2, back.data());
  EXPECT_EQ(back[1], kRow[2]);
  const double wide[] = {1.0 + 0x1p-24, 1.0 + 0x1p-24 + 0x1p-50};
  load_row_f32(TensorView::contiguous(wide, DType::f64, {1, 2}), 0, back.data());
  EXPECT_EQ(back[0], 1.0f);
  EXPECT_EQ(back[1], std::nextafterf(1.0f, 2.0f));
}

TEST(Convert, RefusesWhatItCannotRead) {
  std::vector<float> data(6);
  TensorView view = TensorView::contiguous(data.data(), DType::f32, {1, 6});
  EXPECT_THROW(load_row_f32(view, 1, data.data()), Error);
  EXPECT_THROW(load_row_f32(view, -1, data.data()), Error);
  view.dtype = DType::i32;
  EXPECT_THROW(load_row_f32(view, 0, data.data()), Error);
  view.dtype = DType::f64;
  EXPECT_THROW(store_row_f32(view, 0, data.data()), Error);
  view.dtype = DType::f32;
  view.device.type = DeviceType::cuda;
  EXPECT_THROW(load_row_f32(view, 0, data.data()), Error);
  EXPECT_THROW(load_row_f32(TensorView::contiguous(data.data(), DType::f32, {6}), 0, data.data()),
               Error);
}

}  // namespace
}  // namespace moekit
