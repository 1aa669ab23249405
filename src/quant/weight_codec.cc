#include "quant/weight_codec.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/math.h"
#include "quant/fp8.h"
#include "quant/int_group.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moekit::quant {
namespace {

// Rows that are encoded together: one band of 128 x 128 blocks.
constexpr int64_t kBand = 128;

void check_finite(const float* w, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = w + r * cols;
    if (is_finite(abs_max(row, cols))) continue;
    const int64_t c = std::find_if(row, row + cols, [](float x) { return !is_finite(x); }) - row;
    fail(ErrorCode::invalid_argument,
         "weights to quantize must be finite, got {} at row {}, column {}", row[c], r, c);
  }
}

class Encoder {
 public:
  Encoder(const EncodedLayout& layout, const float* w, std::byte* storage, float matrix_amax)
      : layout_(layout), w_(w), storage_(storage), matrix_amax_(matrix_amax) {
    if (layout.scheme.format == WeightFormat::nvfp4) {
      const float multiplier = nvfp4_global(std::max(matrix_amax, layout.options.amax));
      global_ =
          layout.options.global_sense == ScaleSense::multiplier ? multiplier : 1.0f / multiplier;
    }
  }

  float global() const { return global_; }

  /// Encodes rows [first, last), a whole band.
  void encode_band(int64_t first, int64_t last) const {
    switch (layout_.scheme.format) {
      case WeightFormat::f32:
      case WeightFormat::bf16:
      case WeightFormat::f16: return plain_rows(first, last);
      case WeightFormat::fp8_tensor:
      case WeightFormat::fp8_channel:
      case WeightFormat::fp8_block: return fp8_band(first, last);
      case WeightFormat::mxfp8: return mx_rows(first, last, MxElement::e4m3);
      case WeightFormat::mxfp8_e5m2: return mx_rows(first, last, MxElement::e5m2);
      case WeightFormat::mxfp4: return mx_rows(first, last, MxElement::e2m1);
      case WeightFormat::nvfp4: return nvfp4_rows(first, last);
      case WeightFormat::int4_group:
      case WeightFormat::int4_channel: return int_rows(first, last, 4);
      case WeightFormat::int8_group:
      case WeightFormat::int8_channel: return int_rows(first, last, 8);
    }
  }

 private:
  const float* row(int64_t r) const { return w_ + r * layout_.cols; }
  uint8_t* code_row(int64_t r) const {
    return reinterpret_cast<uint8_t*>(storage_) + r * layout_.code_row_bytes;
  }

  /// Stores scale number (i, j); `scale` is exact in the storage type.
  void put_scale(int64_t i, int64_t j, float scale) const {
    const int64_t at = i * layout_.scale_cols + j;
    std::byte* base = storage_ + layout_.scales_offset + at * bytes_of(layout_.scale_unit);
    const uint16_t half = layout_.scale_unit == DType::f16 ? f32_to_f16(scale) : f32_to_bf16(scale);
    switch (layout_.scale_unit) {
      case DType::f32: std::memcpy(base, &scale, 4); return;
      case DType::f8_e8m0: *base = std::byte(f32_bits(scale) >> 23); return;
      default: std::memcpy(base, &half, 2); return;
    }
  }
  void put_scale_byte(int64_t i, int64_t j, uint8_t byte) const {
    storage_[layout_.scales_offset + i * layout_.scale_cols + j] = std::byte(byte);
  }

  void plain_rows(int64_t first, int64_t last) const {
    for (int64_t r = first; r < last; ++r) {
      if (layout_.scheme.format == WeightFormat::f32) {
        std::memcpy(code_row(r), row(r), static_cast<size_t>(layout_.code_row_bytes));
        continue;
      }
      auto* out = reinterpret_cast<uint16_t*>(code_row(r));
      const bool is_bf16 = layout_.scheme.format == WeightFormat::bf16;
      for (int64_t c = 0; c < layout_.cols; ++c) {
        out[c] = is_bf16 ? f32_to_bf16(row(r)[c]) : f32_to_f16(row(r)[c]);
      }
    }
  }

  void fp8_band(int64_t first, int64_t last) const {
    const int64_t row_step = layout_.row_group == 1 ? 1 : last - first;
    const int64_t col_step = layout_.col_group == 0 ? layout_.cols : layout_.col_group;
    for (int64_t r = first; r < last; r += row_step) {
      for (int64_t c = 0; c < layout_.cols; c += col_step) {
        const int64_t n = std::min(col_step, layout_.cols - c);
        float amax = matrix_amax_;
        if (layout_.row_group != 0) {
          amax = 0;
          for (int64_t i = r; i < r + row_step; ++i) amax = std::max(amax, abs_max(row(i) + c, n));
        }
        const float scale = storable_scale(fp8_scale(amax, false), layout_.options.scale_dtype);
        // Every band of a matrix with one scale finds the same one; the first stores it.
        if (layout_.row_group != 0 || first == 0) {
          put_scale(layout_.row_group == 0 ? 0 : r / layout_.row_group, c / col_step, scale);
        }
        for (int64_t i = r; i < r + row_step; ++i) {
          fp8_encode(row(i) + c, n, scale, code_row(i) + c);
        }
      }
    }
  }

  void mx_rows(int64_t first, int64_t last, MxElement element) const {
    uint8_t codes[kMxBlock];
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0, g = 0; c < layout_.cols; c += kMxBlock, ++g) {
        const int64_t n = std::min<int64_t>(kMxBlock, layout_.cols - c);
        const uint8_t scale = mx_scale(abs_max(row(r) + c, n), element);
        put_scale_byte(r, g, scale);
        if (element == MxElement::e2m1) {
          mx_encode(row(r) + c, n, element, scale, codes);
          pack_nibbles(codes, n, code_row(r) + c / 2);
        } else {
          mx_encode(row(r) + c, n, element, scale, code_row(r) + c);
        }
      }
    }
  }

  void nvfp4_rows(int64_t first, int64_t last) const {
    uint8_t codes[kNvfp4Block];
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0, g = 0; c < layout_.cols; c += kNvfp4Block, ++g) {
        const int64_t n = std::min<int64_t>(kNvfp4Block, layout_.cols - c);
        put_scale_byte(r, g,
                       nvfp4_encode(row(r) + c, n, layout_.options.global_sense, global_, codes));
        pack_nibbles(codes, n, code_row(r) + c / 2);
      }
    }
  }

  void int_rows(int64_t first, int64_t last, int bits) const {
    const int64_t step = layout_.col_group == 0 ? layout_.cols : layout_.col_group;
    std::vector<uint8_t> codes(static_cast<size_t>(layout_.cols));
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0, g = 0; c < layout_.cols; c += step, ++g) {
        const int64_t n = std::min(step, layout_.cols - c);
        const IntGroup group = int_group_of(row(r) + c, n, bits, layout_.scheme.zero_points,
                                            layout_.options.scale_dtype);
        put_scale(r, g, group.scale);
        if (layout_.scheme.zero_points) {
          storage_[layout_.zeros_offset + r * layout_.scale_cols + g] = std::byte(group.zero);
        }
        int_encode(row(r) + c, n, bits, group, codes.data() + c);
      }
      std::memset(code_row(r), 0, static_cast<size_t>(layout_.code_row_bytes));
      if (bits == 4) {
        pack_nibbles(codes.data(), layout_.cols, code_row(r));
      } else {
        std::memcpy(code_row(r), codes.data(), codes.size());
      }
    }
  }

  const EncodedLayout& layout_;
  const float* w_;
  std::byte* storage_;
  float matrix_amax_;
  float global_ = 1.0f;
};

}  // namespace

StoredMatrix encode_weights(const EncodedLayout& layout, const float* w, std::byte* storage,
                            ThreadPool* threads) {
  if (layout.scale_rows > 0) check_finite(w, layout.rows, layout.cols);
  const Encoder encoder(layout, w, storage, abs_max(w, layout.rows * layout.cols));
  const int64_t num_bands = ceil_div(layout.rows, kBand);
  auto band = [&](int64_t b, int) {
    encoder.encode_band(b * kBand, std::min(layout.rows, (b + 1) * kBand));
  };
  if (threads != nullptr) {
    threads->parallel_for(num_bands, band);
  } else {
    for (int64_t b = 0; b < num_bands; ++b) band(b, 0);
  }
  StoredMatrix m = layout.view(storage);
  m.global = encoder.global();
  return m;
}

EncodedMatrix encode_matrix(const float* w, int64_t rows, int64_t cols, const WeightScheme& scheme,
                            const EncodeOptions& options, ThreadPool* threads) {
  const EncodedLayout layout = EncodedLayout::of(scheme, rows, cols, options);
  EncodedMatrix m;
  m.storage = Buffer::zeroed(layout.total_bytes);
  m.view = encode_weights(layout, w, m.storage.data(), threads);
  return m;
}

}  // namespace moekit::quant
