#include "tensor/view_check.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/error_code.h"

namespace moekit {
namespace {

/// What `body` is refused with as an invalid argument, or "".
std::string refusal(const std::function<void()>& body) {
  std::string text;
  const ErrorCode code = test::code_of(body, &text);
  EXPECT_TRUE(code == ErrorCode::ok || code == ErrorCode::invalid_argument) << text;
  return text;
}

float memory[64];

TensorView view(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                DType dtype = DType::f32) {
  TensorView v;
  v.data = memory + 32;
  v.dtype = dtype;
  for (size_t i = 0; i < shape.size(); ++i) {
    v.shape[i] = shape[i];
    v.strides[i] = strides[i];
  }
  v.rank = static_cast<int32_t>(shape.size());
  return v;
}

bool readable(const TensorView& v) {
  return refusal([&] { check_view(v, "x"); }).empty();
}
bool writable(const TensorView& v) {
  return refusal([&] { check_written_view(v, "x"); }).empty();
}

constexpr int64_t kEdge = int64_t{1} << 47;  // bytes

TEST(ViewCheck, OrdinaryViewsPass) {
  EXPECT_TRUE(readable({}));
  EXPECT_TRUE(writable({}));
  EXPECT_TRUE(writable(view({}, {})));
  EXPECT_TRUE(writable(view({4, 8}, {8, 1})));
  EXPECT_TRUE(writable(view({4, 8}, {1, 4})));
  EXPECT_TRUE(writable(view({4, 8}, {-8, 1})));
  EXPECT_TRUE(writable(view({4, 8}, {8, -1})));
  EXPECT_TRUE(readable(view({4, 8}, {0, 1})));
  EXPECT_TRUE(readable(view({4, 8}, {1, 1})));
  // An axis of length 1 and a view without elements may have any strides.
  EXPECT_TRUE(writable(view({1, 8}, {INT64_MIN, 1})));
  EXPECT_TRUE(writable(view({0, 8}, {INT64_MAX, INT64_MAX})));
}

TEST(ViewCheck, StridesStayInTheAddressSpace) {
  for (const int64_t stride : {int64_t{1} << 61, int64_t{1} << 62, INT64_MAX, INT64_MIN,
                               -(int64_t{1} << 61), kEdge / 4, -kEdge / 4}) {
    EXPECT_FALSE(readable(view({4, 8}, {stride, 1}))) << stride;
    EXPECT_FALSE(readable(view({4, 8}, {1, stride}))) << stride;
  }
  // Each axis alone would fit.
  EXPECT_FALSE(readable(view({2, 2, 2}, {kEdge / 8 + 1, kEdge / 8, 1})));
  // Below the first address.
  EXPECT_FALSE(readable(view({2, 2}, {-kEdge / 4, 1})));
  const std::string text = refusal([] {
    check_view(view({4, 160}, {int64_t{1} << 61, 1}), "hidden");
  });
  EXPECT_NE(text.find("hidden: stride 2305843009213693952 over 4 elements of axis 0"),
            std::string::npos)
      << text;
}

TEST(ViewCheck, BytesCountNotElements) {
  // 2^46 elements further: within the range as bytes or pairs of nibbles, outside as doubles.
  const std::vector<int64_t> shape = {2, 1}, strides = {int64_t{1} << 46, 1};
  EXPECT_TRUE(readable(view(shape, strides, DType::u8)));
  EXPECT_TRUE(readable(view(shape, strides, DType::f4_e2m1)));
  EXPECT_FALSE(readable(view(shape, strides, DType::f64)));
}

TEST(ViewCheck, MalformedViewsAreRefused) {
  EXPECT_FALSE(readable(view({-1, 8}, {8, 1})));
  EXPECT_FALSE(readable(view({int64_t{1} << 32, int64_t{1} << 32}, {0, 0})));
  EXPECT_FALSE(readable(view({0, int64_t{1} << 32, int64_t{1} << 32}, {0, 0, 0})));
  TensorView v = view({4, 8}, {8, 1});
  v.rank = 7;
  EXPECT_FALSE(readable(v));
  v.rank = -1;
  EXPECT_FALSE(readable(v));
  v = view({4, 8}, {8, 1});
  v.data = nullptr;
  EXPECT_FALSE(readable(v));
  v.shape[0] = 0;
  EXPECT_TRUE(readable(v));
}

/// Whether two elements of a small view have one offset, by listing them.
bool meets_itself(const TensorView& v) {
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < v.shape[0]; ++i) {
    for (int64_t j = 0; j < v.shape[1]; ++j) offsets.push_back(i * v.strides[0] + j * v.strides[1]);
  }
  for (size_t a = 0; a < offsets.size(); ++a) {
    for (size_t b = a + 1; b < offsets.size(); ++b) {
      if (offsets[a] == offsets[b]) return true;
    }
  }
  return false;
}

TEST(ViewCheck, WrittenViewsDontMeetThemselves) {
  for (int64_t rows = 1; rows <= 4; ++rows) {
    for (int64_t cols = 1; cols <= 4; ++cols) {
      for (int64_t s = -5; s <= 5; ++s) {
        for (int64_t t = -5; t <= 5; ++t) {
          const TensorView v = view({rows, cols}, {s, t});
          EXPECT_EQ(writable(v), !meets_itself(v))
              << rows << 'x' << cols << ", strides " << s << ", " << t;
        }
      }
    }
  }
  EXPECT_TRUE(writable(view({2, 3, 4}, {12, 4, 1})));
  EXPECT_FALSE(writable(view({2, 3, 4}, {12, 3, 1})));
  EXPECT_FALSE(writable(view({2, 3, 4}, {0, 4, 1})));
}

}  // namespace
}  // namespace moekit
