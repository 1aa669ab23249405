// One random matrix in a number format: codes from a table of bell-shaped quantiles, scales that
// differ from group to group.
#pragma once

#include <array>

#include "quant/weight_codec.h"

namespace moekit::engine {

/// Writes rows of one matrix of standard deviation `sigma`. Rows may be written in any order and by
/// any thread; all of them together fill the layout.
class SyntheticMatrix {
 public:
  SyntheticMatrix(const quant::EncodedLayout& layout, double sigma, uint64_t seed, uint64_t stream);

  void write_rows(int64_t first, int64_t last, std::byte* storage) const;
  /// View with its global. `storage` as given to write_rows.
  StoredMatrix view(const std::byte* storage) const;

 private:
  void write_codes(int64_t row, uint8_t* out) const;
  void write_floats(int64_t row, std::byte* out) const;
  void write_scales(int64_t scale_row, std::byte* storage) const;

  quant::EncodedLayout layout_;
  uint64_t seed_;
  uint64_t stream_;
  float sigma_;
  float global_ = 1.0f;
  std::array<uint8_t, 256> codes_{};       // code byte of a random byte
  std::array<uint32_t, 16> scale_bits_{};  // stored scale of four random bits
  int32_t middle_zero_ = 0;                // zero points lie around it
};

}  // namespace moekit::engine
